"""GatedAttn: gates the output of each head, per token, by all channels of the input.

It is the dense form of `sparse_attn_gate`.

Source: PR 1736 (weights from N(0, 0.005^2)). With a bias: PR 1894 (bias 1) and PR 1219 (bias 4),
switched off in both; gated attention, Qiu et al. 2025, arXiv:2505.06708.

Legal: it reads the token's own state.

Cost: heads x model width weights per layer (4,096 at full size), one product per token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from underpar.recipe import ModelSpec, require

STAGE = "model"


@dataclass(frozen=True)
class Settings:
    """`std`: standard deviation of the weights at the start of training.
    `bias`: bias before the sigmoid at the start of training, which is learned; 0 means no bias.
    """

    std: float = 0.01
    bias: float = 0.0

    def __post_init__(self) -> None:
        require(self.std >= 0, f"levers.gated_attn.std = {self.std}: expected 0 or more")


TINY = (Settings(), Settings(bias=1.0))


class Lever(nn.Module):
    """y * sigmoid(W x + b), W (heads, dim) in each layer."""

    def __init__(self, settings: Settings, spec: ModelSpec) -> None:
        super().__init__()
        self.gate = nn.Parameter(torch.empty(spec.num_layers, spec.num_heads, spec.dim))
        nn.init.normal_(self.gate, std=settings.std)
        heads = (spec.num_layers, spec.num_heads)
        self.bias = nn.Parameter(torch.full(heads, settings.bias)) if settings.bias else None

    def neutral_(self) -> None:
        """Set the weights to 0: every gate is one half, for every token."""
        nn.init.zeros_(self.gate)
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    @torch.no_grad()
    def agree_(self, blocks: Sequence[Any], plain: Sequence[Any]) -> None:
        """A sigmoid is never 1: twice the scale of attention makes up for the half."""
        for block in blocks:
            block.attn_scale.mul_(2.0)

    def attn_out(self, layer: int, y: Tensor, x: Tensor, v: Tensor) -> Tensor:
        """Gate the output y (N, H, D) of the heads by attention's input x (N, dim)."""
        gate = x.to(y.dtype) @ self.gate[layer].to(y.dtype).T  # (N, H)
        if self.bias is not None:
            gate = gate + self.bias[layer]
        return y * torch.sigmoid(gate).to(y.dtype)[:, :, None]
