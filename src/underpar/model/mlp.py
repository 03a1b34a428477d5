"""The feed-forward half of a block: LeakyReLU squared (PR 493; ReLU squared, arXiv:2109.08668)."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from underpar.recipe import ModelSpec


class MLP(nn.Module):
    """Up, leaky square, down."""

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        self.slope = spec.mlp_slope
        self.up = nn.Linear(spec.dim, spec.mlp_dim, bias=False)
        self.down = nn.Linear(spec.mlp_dim, spec.dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """x (N, dim), already normed -> (N, dim)."""
        out: Tensor = self.down(F.leaky_relu(self.up(x), self.slope).square())
        return out
