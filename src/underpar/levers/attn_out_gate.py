"""Attention output gate: gates each head, per token, by a factor between 0 and 2 that starts at 1.

It is like `sparse_attn_gate`, but at step 0 the network equals the one without the gate.

Source: PR 1667 (12 channels; with SmearGate 1.0 mBPB before quantization); the output gate of Qiu
et al. 2025, arXiv:2505.06708.

Legal: it reads the token's own state.

Cost: heads x `width` weights per layer, one small product and one sigmoid per token.
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
        require(self.width > 0, f"levers.attn_out_gate.width = {self.width}: expected 1 or more")


class Lever(nn.Module):
    """y * 2 sigmoid(W x[:width]), W (heads, width) in each layer."""

    def __init__(self, settings: Settings, spec: ModelSpec) -> None:
        super().__init__()
        self.width = min(settings.width, spec.dim)
        self.gate = nn.Parameter(torch.zeros(spec.num_layers, spec.num_heads, self.width))

    def neutral_(self) -> None:
        """Set the weights to 0: every gate is 1, for every token."""
        nn.init.zeros_(self.gate)

    def attn_out(self, layer: int, y: Tensor, x: Tensor, v: Tensor) -> Tensor:
        """Gate the output y (N, H, D) of the heads by attention's input x (N, dim)."""
        gate = x[:, : self.width].to(y.dtype) @ self.gate[layer].to(y.dtype).T  # (N, H)
        return y * (2.0 * torch.sigmoid(gate)).to(y.dtype)[:, :, None]
