"""Pass embeddings: each pass through the loop begins with a vector that says which pass it is.

The shared weights can then do different work in different passes. Source: PR 1518 (1.2 mBPB
together with a wider loop; PR 1676 saw nothing). Legal: an ordinary weight, the same for all
tokens.
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
    """`layer`: the loop's first; `passes`: visits that have a vector of their own."""

    layer: int = 3
    passes: int = 3

    def __post_init__(self) -> None:
        require(self.passes > 0, f"levers.pass_embed.passes = {self.passes}: expected at least 1")


class PassEmbed(nn.Module):
    """A vector a pass, starting at 0."""

    def __init__(self, settings: Settings, spec: ModelSpec) -> None:
        super().__init__()
        check_layers("pass_embed", (settings.layer,), spec)
        self.layer = settings.layer
        self.vectors = nn.Parameter(torch.zeros(settings.passes, spec.dim))

    def neutral_(self) -> None:
        """Say nothing."""
        nn.init.zeros_(self.vectors)

    def check(self, plan: Sequence[Visit]) -> None:
        """One for each pass."""
        visits, passes = sum(v.layer == self.layer for v in plan), len(self.vectors)
        require(
            passes == visits,
            f"levers.pass_embed.passes = {passes}: layer {self.layer} is visited {visits} times",
        )

    def before(self, visit: Visit, stream: Stream) -> None:
        """Add the pass's vector where a pass begins."""
        if visit.layer == self.layer:
            stream.x = stream.x + self.vectors[visit.repeat].to(stream.x.dtype)


def plug(settings: Settings, spec: ModelSpec) -> PassEmbed:
    """The module to hook in."""
    return PassEmbed(settings, spec)
