"""x0 mixing: every block starts from a learned mix of the stream and the first embedding.

Each layer has a gain per channel for both. The identity of the token stays within reach of every
layer.

Source: the residual mix of modded-nanogpt, as in PR 2014, PR 1894 and PR 1219.

Legal: it reads the token's own embedding.

Cost: two vectors of the model's width and three element-wise operations per layer.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from underpar.recipe import ModelSpec
from underpar.seams import Stream

STAGE = "model"


@dataclass(frozen=True)
class Settings:
    """Nothing to set."""


class Lever(nn.Module):
    """m0 * x + m1 * x0 in each layer; at the start of training m0 is 1 and m1 is 0."""

    def __init__(self, settings: Settings, spec: ModelSpec) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(spec.num_layers, 2, spec.dim))
        self.neutral_()

    @torch.no_grad()
    def neutral_(self) -> None:
        """Set m0 to 1 and m1 to 0: all of the stream, nothing of the embedding."""
        self.weight[:, 0] = 1.0
        self.weight[:, 1] = 0.0

    def mix(self, layer: int, x: Tensor, stream: Stream) -> Tensor:
        """Mix the stream x (N, dim) with the first embedding."""
        m = self.weight[layer].to(x.dtype)
        return m[0] * x + m[1] * stream.start
