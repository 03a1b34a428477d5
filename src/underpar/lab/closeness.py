"""How far the results of a kernel may be from those of its definition."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from underpar.errors import BenchError

# Largest relative error (of norms) of outputs and of gradients, by the precision of the inputs.
LARGEST_ERRORS = {torch.float32: (1e-5, 1e-5), torch.bfloat16: (4e-3, 8e-3)}


def require_close(
    what: str, ours: Sequence[Tensor], exact: Sequence[Tensor], dtype: torch.dtype, num_outputs: int
) -> None:
    """Refuse results that are farther from the exact ones than rounding to `dtype` explains.

    The first `num_outputs` are outputs, the rest are gradients.
    """
    for place, (got, want) in enumerate(zip(ours, exact, strict=True)):
        largest = LARGEST_ERRORS[dtype][place >= num_outputs]
        got, want = got.detach().double(), want.detach().double()
        error = float((got - want).norm() / want.norm())
        # Written so that an error of NaN is refused.
        if not error <= largest:
            kind = "output" if place < num_outputs else "gradient"
            raise BenchError(
                f"{what}: {kind} {place} differs by {error:.1e} of its size, more than {largest:g}"
            )
