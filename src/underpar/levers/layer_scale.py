"""Layer scale: one more gain for each channel on both branches of a block.

It multiplies what attention and the MLP add, on top of their own scales. Source: PR 1894;
LayerScale, Touvron et al. 2021, arXiv:2103.17239. Legal: an ordinary weight of the network.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from underpar.recipe import ModelSpec

STAGE = "model"


@dataclass(frozen=True)
class Settings:
    """`init` of every gain; 1 is neutral."""

    init: float = 1.0


class LayerScale(nn.Module):
    """A vector for each layer."""

    def __init__(self, settings: Settings, spec: ModelSpec) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.full((spec.num_layers, spec.dim), settings.init))

    def neutral_(self) -> None:
        """Set every gain to 1."""
        nn.init.ones_(self.scale)

    def branch(self, layer: int, y: Tensor) -> Tensor:
        """Scale what is about to be added, y (N, dim)."""
        return self.scale[layer].to(y.dtype) * y


def plug(settings: Settings, spec: ModelSpec) -> LayerScale:
    """The module to hook in."""
    return LayerScale(settings, spec)
