"""Pass embeddings: adds a vector at the start of each pass through the loop that names the pass.

The looped layers share their weights; with this vector they can do different work in each pass.

Source: PR 1518 (1.2 mBPB together with a wider loop). PR 1676 saw no effect.

Legal: ordinary weights, the same for all tokens.

Cost: one vector of the model's width per pass, and one addition per pass and token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn

from underpar.recipe import ModelSpec, require
from underpar.seams import Stream, Visit, check_layers

STAGE = "model"
NEEDS = ("loop",)


@dataclass(frozen=True)
class Settings:
    """`layer`: first layer of the loop, before which the vector is added.
    `passes`: number of passes; each has a vector of its own.
    """

    layer: int = 3
    passes: int = 3

    def __post_init__(self) -> None:
        require(self.passes > 0, f"levers.pass_embed.passes = {self.passes}: expected at least 1")


class Lever(nn.Module):
    """One vector per pass, 0 at the start of training."""

    def __init__(self, settings: Settings, spec: ModelSpec) -> None:
        super().__init__()
        check_layers("pass_embed", (settings.layer,), spec)
        self.layer = settings.layer
        self.vectors = nn.Parameter(torch.zeros(settings.passes, spec.dim))

    def neutral_(self) -> None:
        """Set the vectors to 0."""
        nn.init.zeros_(self.vectors)

    def check(self, plan: Sequence[Visit]) -> None:
        """Refuse a number of passes that is not the number of visits of `layer`."""
        visits, passes = sum(v.layer == self.layer for v in plan), len(self.vectors)
        require(
            passes == visits,
            f"levers.pass_embed.passes = {passes}: layer {self.layer} is visited {visits} times",
        )

    def before(self, visit: Visit, stream: Stream) -> None:
        """Add the vector of the pass that begins here."""
        if visit.layer == self.layer:
            stream.x = stream.x + self.vectors[visit.repeat].to(stream.x.dtype)
