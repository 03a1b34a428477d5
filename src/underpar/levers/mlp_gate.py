"""MLP output gate: gates what the MLP adds, per token, by a factor between 0 and 2.

Twelve channels of the input and a bias decide how much of the MLP's output the token takes. The
gate starts at 1.

Source: PR 1941 (143 parameters, 0.85 mBPB in three paired seeds).

Legal: it reads the token's own state.

Cost: `width` + 1 weights per layer, one small product and one sigmoid per token.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from underpar.recipe import ModelSpec, require

STAGE = "model"


@dataclass(frozen=True)
class Settings:
    """`width`: number of input channels that the gate reads."""

    width: int = 12

    def __post_init__(self) -> None:
        require(self.width > 0, f"levers.mlp_gate.width = {self.width}: expected 1 or more")


class Lever(nn.Module):
    """y * 2 sigmoid(w . x[:width] + b) in each layer."""

    def __init__(self, settings: Settings, spec: ModelSpec) -> None:
        super().__init__()
        self.width = min(settings.width, spec.dim)
        self.gate = nn.Parameter(torch.zeros(spec.num_layers, self.width))
        self.bias = nn.Parameter(torch.zeros(spec.num_layers))

    def neutral_(self) -> None:
        """Set weights and biases to 0: every gate is 1, for every token."""
        nn.init.zeros_(self.gate)
        nn.init.zeros_(self.bias)

    def mlp_out(self, layer: int, y: Tensor, x: Tensor) -> Tensor:
        """Gate the MLP's output y (N, dim) by its input x (N, dim)."""
        gate = x[:, : self.width].to(y.dtype) @ self.gate[layer].to(y.dtype) + self.bias[layer]
        return y * (2.0 * torch.sigmoid(gate)).to(y.dtype)[:, None]
