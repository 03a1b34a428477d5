"""Layer scale: multiplies what attention and MLP add by one more gain per channel.

It acts on top of the block's own scales (`attn_scale`, `mlp_scale`).

Source: PR 1894; LayerScale, Touvron et al. 2021, arXiv:2103.17239.

Legal: ordinary weights of the network.

Cost: one vector of the model's width per layer and one element-wise product per branch.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from underpar.recipe import ModelSpec

STAGE = "model"


@dataclass(frozen=True)
class Settings:
    """`init`: every gain at the start of training; 1 changes nothing."""

    init: float = 1.0


class Lever(nn.Module):
    """One vector of gains per layer."""

    def __init__(self, settings: Settings, spec: ModelSpec) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.full((spec.num_layers, spec.dim), settings.init))

    def neutral_(self) -> None:
        """Set every gain to 1."""
        nn.init.ones_(self.scale)

    def branch(self, layer: int, y: Tensor) -> Tensor:
        """Scale y (N, dim), which is about to be added to the stream."""
        return self.scale[layer].to(y.dtype) * y
