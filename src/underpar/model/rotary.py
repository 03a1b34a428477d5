"""Partial rotary positions (Su et al. 2021, arXiv:2104.09864; partial as in PR 315)."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class Rotary(nn.Module):
    """Rotates the first `num_dims` channels of each head; the others carry no position."""

    def __init__(self, num_dims: int, base: float) -> None:
        super().__init__()
        self.num_dims = num_dims
        exponents = torch.arange(0, num_dims, 2, dtype=torch.float32) / max(num_dims, 1)
        # fp32 always: half-precision frequencies give distant neighbours the same angle.
        self.register_buffer("frequencies", base**-exponents, persistent=False)
        self.frequencies: Tensor

    def angles(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Cosines and sines (N, 1, num_dims / 2) of positions (N,)."""
        angle = positions[:, None, None].float() * self.frequencies
        return angle.cos(), angle.sin()

    def forward(self, x: Tensor, angles: tuple[Tensor, Tensor]) -> Tensor:
        """Rotate x (N, heads, D); channel j pairs with channel j + num_dims / 2."""
        cos, sin = (a.to(x.dtype) for a in angles)
        half = self.num_dims // 2
        a, b, rest = x.split((half, half, x.size(-1) - 2 * half), dim=-1)
        return torch.cat((a * cos + b * sin, b * cos - a * sin, rest), dim=-1)
