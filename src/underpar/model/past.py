"""Where earlier tokens live when a whole pack of documents is read at once."""

from __future__ import annotations

import torch
from torch import Tensor

from underpar.kernels.attention import Pack, attend_packed


class PackedPast:
    """The past of a flat pack: pieces for attention, the token before for everything else."""

    def __init__(self, cu: Tensor) -> None:
        self._pack = Pack.from_boundaries(cu)

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Causal attention within each piece."""
        return attend_packed(q, k, v, self._pack)

    def previous(self, name: str, x: Tensor) -> Tensor:
        """x (N, ...) one token earlier; zeros before the first."""
        return torch.cat((torch.zeros_like(x[:1]), x[:-1]))
