"""Where earlier tokens live when a whole pack of documents is read at once."""

from __future__ import annotations

import torch
from torch import Tensor

from underpar.data.loader import Segments
from underpar.kernels.attention import attend


class PackedPast:
    """The past of a flat pack: pieces for attention, the token before for everything else."""

    def __init__(self, segments: Segments) -> None:
        self._cu, self._max_len = segments.cu, segments.max_len
        self.context = segments.context
        self.positions = segments.positions

    def attend(self, slot: int, q: Tensor, k: Tensor, v: Tensor, window: int) -> Tensor:
        """Causal attention within each piece."""
        return attend(q, k, v, self._cu, self._max_len, window)

    def previous(self, name: str, x: Tensor) -> Tensor:
        """x (N, ...) one token earlier; zeros before the first."""
        return torch.cat((torch.zeros_like(x[:1]), x[:-1]))
