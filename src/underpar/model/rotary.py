"""Rotary positions (Su et al. 2021, arXiv:2104.09864)."""

from __future__ import annotations

import torch
from torch import Tensor


def frequencies_of(num_dims: int, base: float) -> Tensor:
    """Turns a token (num_dims / 2,) of the channel pairs.

    fp32 always: half-precision frequencies give distant neighbours the same angle.
    """
    return base ** -(torch.arange(0, num_dims, 2, dtype=torch.float32) / num_dims)


def angles_of(positions: Tensor, frequencies: Tensor) -> tuple[Tensor, Tensor]:
    """Cosines and sines (N, 1, pairs) of positions (N,)."""
    angle = positions[:, None, None].float() * frequencies
    return angle.cos(), angle.sin()


def rotate(x: Tensor, angles: tuple[Tensor, Tensor]) -> Tensor:
    """Rotate x (N, heads, D): channel j pairs with channel j + pairs; the rest carries no place."""
    cos, sin = (a.to(x.dtype) for a in angles)
    half = cos.size(-1)
    a, b, rest = x.split((half, half, x.size(-1) - 2 * half), dim=-1)
    return torch.cat((a * cos + b * sin, b * cos - a * sin, rest), dim=-1)
