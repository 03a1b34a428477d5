"""Straight-through rounding: late in training, the loss is that of the weights packing would store.

In each step the matrices are rounded for the forward and backward pass and restored before the
optimizer steps. The gradient of w + stopgrad(Q(w) - w) is the gradient at Q(w), so this is exactly
fake quantization. The network itself has no code for it: no second graph, and nothing that a
compiler could freeze. Published versions use a flag of the network, which the compiler froze at its
first trace, so that late rounding never ran. Q is the rounding of packing, fp16 steps included;
choose `bits` and `sigmas` as in quant.rules.

Source: straight-through estimator (Bengio, Leonard and Courville 2013, arXiv:1308.3432); rounding
of all weights in training since PR 65; PR 1218 dropped it for little or no benefit.

Legal: it reads the weights only.

Cost: one rounding and one copy of each chosen matrix per step, and the memory of the copies.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor

from underpar.quant.row_steps import row_steps
from underpar.recipe import ModelSpec, require

STAGE = "train"


@dataclass(frozen=True)
class Settings:
    """`start`: share of the training budget (0 to 1) after which weights are rounded.
    `pattern`: name pattern of the matrices that are rounded.
    `bits`: bits of a stored integer.
    `sigmas`: width of the integer range in standard deviations of a row; 0 takes the row's largest
    value.
    """

    start: float = 0.85
    pattern: str = "blocks.*.weight"
    bits: int = 6
    sigmas: float = 12.85

    def __post_init__(self) -> None:
        start, bits, sigmas = self.start, self.bits, self.sigmas
        require(0 <= start <= 1, f"levers.ste.start = {start}: expected 0 to 1")
        require(2 <= bits <= 8, f"levers.ste.bits = {bits}: expected 2 to 8")
        require(0 <= sigmas < 1000, f"levers.ste.sigmas = {sigmas}: expected 0 to 1000")


# In every step of training `p` is below 1.
NEUTRAL = Settings(start=1.0)
# With the defaults the few steps of a test would not reach `start`.
TINY = (Settings(start=0.0),)


class StraightThrough:
    """Rounds weights for the forward and backward pass of a step."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings

    def fake_quantize(
        self, weights: Mapping[str, Tensor], p: float
    ) -> AbstractContextManager[None]:
        """Round the matrices inside the context; restore them bit for bit after it."""
        pattern = self.settings.pattern
        chosen = [
            weight
            for name, weight in weights.items()
            if weight.ndim > 1 and fnmatch.fnmatchcase(name, pattern)
        ]
        # Checked from the first step on, not only after `start`: a wrong pattern fails at once.
        require(
            bool(chosen),
            f"levers.ste.pattern = {pattern!r} fits no matrix of the model; try 'blocks.*.weight'",
        )
        if p < self.settings.start:
            return nullcontext()
        return _rounded(chosen, self.settings)


@contextmanager
def _rounded(weights: Sequence[Tensor], settings: Settings) -> Iterator[None]:
    originals = [weight.clone() for weight in weights]
    try:
        for weight in weights:
            weight.copy_(round_rows(weight, settings.bits, settings.sigmas))
        yield
    finally:
        torch._foreach_copy_(list(weights), originals)


def round_rows(weight: Tensor, bits: int, sigmas: float) -> Tensor:
    """The weight as the scheme intB:k stores it, or intB where `sigmas` is 0."""
    limit = 2 ** (bits - 1) - 1
    rows = weight.flatten(0, -2)  # (R, C)
    steps = row_steps(rows, limit, sigmas)[:, None].half().to(rows.dtype)
    codes = (rows / steps).round().clamp(-limit, limit)
    return (codes * steps).view_as(weight)


def plug(settings: Settings, spec: ModelSpec) -> StraightThrough:
    """The fake quantization for the training loop."""
    return StraightThrough(settings)
