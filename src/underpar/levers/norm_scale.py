"""Norm scale: divides the normed input of layer l by sqrt(l + 1).

Deep layers start with smaller inputs and make smaller changes to the stream. The layer counts, not
the visit: a looped layer has the same scale in every pass.

Source: PR 315 (2.3 mBPB jointly with partial rotary positions); LayerNorm scaling, Sun et al. 2025,
arXiv:2502.05795.

Legal: a constant per layer.

Cost: no weights, one element-wise product per branch.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from underpar.recipe import ModelSpec, require

STAGE = "model"


@dataclass(frozen=True)
class Settings:
    """`power`: the scale of layer l is (l + 1) ** -power; 0 scales nothing."""

    power: float = 0.5

    def __post_init__(self) -> None:
        power = self.power
        require(0 <= power <= 8, f"levers.norm_scale.power = {power}: expected 0 to 8")


NEUTRAL = Settings(power=0.0)


class Lever(nn.Module):
    """One constant per layer; no parameters."""

    scale: Tensor

    def __init__(self, settings: Settings, spec: ModelSpec) -> None:
        super().__init__()
        # A tensor, not Python numbers, so that the compiler can use one graph for all layers.
        scale = torch.arange(1, spec.num_layers + 1).float() ** -settings.power
        self.register_buffer("scale", scale, persistent=False)

    def normed(self, layer: int, x: Tensor) -> Tensor:
        """Scale the normed input (N, dim)."""
        return x * self.scale[layer]
