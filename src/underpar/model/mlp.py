"""The feed-forward half of a block: up, squared ReLU (So et al. 2021, arXiv:2109.08668), down."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from underpar.model.hooks import Hooks
from underpar.recipe import ModelSpec
from underpar.seams import Visit


class MLP(nn.Module):
    """Up, nonlinearity, down."""

    def __init__(self, spec: ModelSpec, layer: int, hooks: Hooks) -> None:
        super().__init__()
        self.layer = layer
        self.hooks = hooks
        self.up = nn.Linear(spec.dim, spec.mlp_dim, bias=False)
        self.down = nn.Linear(spec.mlp_dim, spec.dim, bias=False)

    def forward(self, x: Tensor, visit: Visit) -> Tensor:
        """x (N, dim), already normed -> (N, dim)."""
        h = self.up(x)
        own = self.hooks.activate
        h = own(h) if own is not None else F.relu(h).square()
        y: Tensor = self.down(h)
        for hook in self.hooks.mlp_out:
            y = hook(self.layer, y, x)
        for hook in self.hooks.adjust:
            y = hook("mlp", visit, y, x)
        return y
