"""Two lanes: in the last layers attention and MLP run side by side, each on a stream of its own.

Attention reads lane 0 (and alone sees the mix with x0), the MLP reads lane 1, both before either
has written; each writes to both lanes with learned gains. At the end the lanes are averaged. Skips
of `unet` enter lane 0. Source: PR 1204, PR 1529, PR 2014 (from layer 8; 2 mBPB in PR 1204, 3 to 4
in PR 1518 and PR 1529). Legal: it only rewires the token's own states.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from underpar.recipe import ModelSpec, require
from underpar.seams import Branches, Stream, Visit, check_layers, take_turns

STAGE = "model"


@dataclass(frozen=True)
class Settings:
    """`start`: first layer with two lanes; `residual`: what a lane keeps of itself at first."""

    start: int = 8
    residual: float = 1.1


class Lanes(nn.Module):
    """lane <- r lane + p a + p' b; gains p are indexed [layer, source (attn, MLP), lane]."""

    def __init__(self, settings: Settings, spec: ModelSpec) -> None:
        super().__init__()
        check_layers("lanes", (settings.start,), spec)
        self.start = settings.start
        self.post = nn.Parameter(torch.ones(spec.num_layers, 2, 2))
        self.residual = nn.Parameter(torch.full((spec.num_layers, 2), settings.residual))

    def neutral_(self) -> None:
        """Keep both lanes whole and write alike to both."""
        nn.init.ones_(self.post)
        nn.init.ones_(self.residual)

    @torch.no_grad()
    def agree_(self, blocks: Sequence[Any], plain: Sequence[Any]) -> None:
        """Side by side is one after the other only where one of the two is silent: take turns."""
        take_turns(self.start, blocks, plain)

    def dead(self, plan: Sequence[Visit]) -> dict[str, Tensor]:
        """Rows of layers that have one lane."""
        rows = torch.arange(len(self.post)) < self.start
        return {
            "post": rows[:, None, None].expand_as(self.post),
            "residual": rows[:, None].expand_as(self.residual),
        }

    def check(self, plan: Sequence[Visit]) -> None:
        """Once open, the lanes stay open to the end."""
        layers = [visit.layer for visit in plan]
        first = next(i for i, layer in enumerate(layers) if layer >= self.start)
        again = [layer for layer in layers[first:] if layer < self.start]
        require(
            not again,
            f"levers.lanes.start = {self.start}: a loop returns to layer {min(again, default=0)} "
            "after it; start the lanes behind the loop",
        )

    def before(self, visit: Visit, stream: Stream) -> None:
        """Open the second lane; the first is the stream itself."""
        if visit.layer >= self.start and "lanes" not in stream.kept:
            stream.kept["lanes"] = stream.x

    def wires(self, layer: int) -> bool:
        """True from the first layer with two lanes on."""
        return layer >= self.start

    def wire(self, block: Branches, visit: Visit, stream: Stream) -> None:
        """Both branches read the old lanes, then both lanes are written."""
        lane0, lane1 = stream.x, stream.kept["lanes"]
        a = block.attend(block.mix(lane0, stream), visit, stream)
        b = block.mlp_branch(lane1, visit)
        keep = self.residual[visit.layer].to(a.dtype)
        post = self.post[visit.layer].to(a.dtype)
        stream.x = keep[0] * lane0 + post[0, 0] * a + post[1, 0] * b
        stream.kept["lanes"] = keep[1] * lane1 + post[0, 1] * a + post[1, 1] * b

    def finish(self, stream: Stream) -> None:
        """Merge by the mean."""
        stream.x = 0.5 * (stream.x + stream.kept["lanes"])


def plug(settings: Settings, spec: ModelSpec) -> Lanes:
    """The module to hook in."""
    return Lanes(settings, spec)
