"""Two lanes: in the last layers attention and MLP run side by side on two residual streams.

Attention reads lane 0, after the mix with x0 if there is one; the MLP reads lane 1. Both read
before either writes. Each then writes to both lanes with learned gains. After the last layer the
output is the mean of the lanes. Skips of `unet` enter lane 0.

Source: PR 1204 (2 mBPB), PR 1518 and PR 1529 (3 to 4 mBPB), PR 2014 (from layer 8).

Legal: it only rewires the token's own states.

Cost: 6 weights per layer and a few element-wise operations per two-lane layer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from underpar.recipe import ModelSpec
from underpar.seams import Branches, Stream, Visit, check_layers, check_no_return, take_turns

STAGE = "model"


@dataclass(frozen=True)
class Settings:
    """`start`: first layer with two lanes.
    `residual`: factor that each lane applies to its own content in each layer, at the start of
    training; it is learned.
    """

    start: int = 8
    residual: float = 1.1


class Lever(nn.Module):
    """lane <- r lane + p a + p' b; gains p are indexed [layer, source (attn, MLP), lane]."""

    def __init__(self, settings: Settings, spec: ModelSpec) -> None:
        super().__init__()
        check_layers("lanes", (settings.start,), spec)
        self.start = settings.start
        self.post = nn.Parameter(torch.ones(spec.num_layers, 2, 2))
        self.residual = nn.Parameter(torch.full((spec.num_layers, 2), settings.residual))

    def neutral_(self) -> None:
        """Set every gain to 1: both lanes keep their content and get the same updates."""
        nn.init.ones_(self.post)
        nn.init.ones_(self.residual)

    @torch.no_grad()
    def agree_(self, blocks: Sequence[Any], plain: Sequence[Any]) -> None:
        """In each layer one branch has to be silent: only then do both orders agree."""
        take_turns(self.start, blocks, plain)

    def dead(self, plan: Sequence[Visit]) -> dict[str, Tensor]:
        """The rows of layers that have one lane only."""
        rows = torch.arange(len(self.post)) < self.start
        return {
            "post": rows[:, None, None].expand_as(self.post),
            "residual": rows[:, None].expand_as(self.residual),
        }

    def check(self, plan: Sequence[Visit]) -> None:
        """Refuse a plan in which a loop returns to a layer before the lanes."""
        check_no_return("lanes", self.start, plan)

    def before(self, visit: Visit, stream: Stream) -> None:
        """Open the second lane as a copy of the stream; the first lane is the stream itself."""
        if visit.layer >= self.start and "lanes" not in stream.kept:
            stream.kept["lanes"] = stream.x

    def wires(self, layer: int) -> bool:
        """True for the layers with two lanes."""
        return layer >= self.start

    def wire(self, block: Branches, visit: Visit, stream: Stream) -> None:
        """Run both branches on the old lanes, then write both lanes."""
        lane0, lane1 = stream.x, stream.kept["lanes"]
        a = block.attend(block.mix(lane0, stream), visit, stream)
        b = block.mlp_branch(lane1, visit)
        keep = self.residual[visit.layer].to(a.dtype)
        post = self.post[visit.layer].to(a.dtype)
        stream.x = keep[0] * lane0 + post[0, 0] * a + post[1, 0] * b
        stream.kept["lanes"] = keep[1] * lane1 + post[0, 1] * a + post[1, 1] * b

    def finish(self, stream: Stream) -> None:
        """Merge the lanes to their mean."""
        stream.x = 0.5 * (stream.x + stream.kept["lanes"])
