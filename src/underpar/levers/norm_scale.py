"""Norm scale: the normed input of layer l is divided by sqrt(l + 1).

Deep layers start with smaller inputs and so with smaller steps of the stream. The layer counts, not
the visit: a looped layer keeps its scale. Source: PR 315 (with partial rotary positions 2.3 mBPB
jointly; LayerNorm scaling, Sun et al. 2025, arXiv:2502.05795). Legal: a constant of each layer.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from underpar.recipe import ModelSpec, require

STAGE = "model"


@dataclass(frozen=True)
class Settings:
    """The scale of layer l is (l + 1) ** -power."""

    power: float = 0.5

    def __post_init__(self) -> None:
        power = self.power
        require(0 <= power <= 8, f"levers.norm_scale.power = {power}: expected 0 to 8")


NEUTRAL = Settings(power=0.0)


class NormScale(nn.Module):
    """No parameters."""

    scale: Tensor

    def __init__(self, settings: Settings, spec: ModelSpec) -> None:
        super().__init__()
        # A tensor, not numbers: layers then look alike to a compiler.
        scale = torch.arange(1, spec.num_layers + 1).float() ** -settings.power
        self.register_buffer("scale", scale, persistent=False)

    def normed(self, layer: int, x: Tensor) -> Tensor:
        """Scale a normed input (N, dim)."""
        return x * self.scale[layer]


def plug(settings: Settings, spec: ModelSpec) -> NormScale:
    """The module to hook in."""
    return NormScale(settings, spec)
