"""U-Net skips: blocks of the plan's second half also read the outputs of its first half.

The first half pushes its outputs on a stack. The second half pops them, last first, and blends each
into the stream with a gain per channel and, optionally, a gate per channel. The gains belong to a
place in the second half, not to a layer, so the partners change when a loop lengthens the plan.
Places after the first `skips` ones pop nothing.

Source: PR 1089 (gates that start at one half), PR 2014 (8 skips), PR 1894 and PR 1219 (5 skips);
U-Net, arXiv:1505.04597.

Legal: it reads the token's own earlier states.

Cost: one or two vectors of the model's width per skip, and the memory of the outputs on the stack.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from underpar.recipe import ModelSpec, require
from underpar.seams import Stream, Visit

STAGE = "model"


@dataclass(frozen=True)
class Settings:
    """`skips`: number of skip connections.
    `gates`: true blends as g x + (1 - g) w u with a learned gate g; false adds: x + w u. Here x is
    the stream, u the earlier output and w the gain.
    """

    skips: int = 8
    gates: bool = True

    def __post_init__(self) -> None:
        require(self.skips > 0, f"levers.unet.skips = {self.skips}: expected at least 1")


TINY = (Settings(), Settings(gates=False))


class Lever(nn.Module):
    """A stack of earlier outputs, made anew in each forward pass."""

    def __init__(self, settings: Settings, spec: ModelSpec) -> None:
        super().__init__()
        self.skips = settings.skips
        self.weight = nn.Parameter(torch.ones(settings.skips, spec.dim))
        gates = torch.zeros(settings.skips, spec.dim)
        self.gate = nn.Parameter(gates) if settings.gates else None

    def neutral_(self) -> None:
        """Close every skip: gains 0 and, if there are gates, gates 1."""
        nn.init.zeros_(self.weight)
        if self.gate is not None:
            # The sigmoid of 100 is 1 to the last bit.
            nn.init.constant_(self.gate, 100.0)

    def check(self, plan: Sequence[Visit]) -> None:
        """Refuse a plan of one visit: it has no halves."""
        require(len(plan) > 1, "levers.unet: a plan of one visit has nothing to skip")

    def dead(self, plan: Sequence[Visit]) -> dict[str, Tensor]:
        """The rows of places that the plan does not have or that find the stack empty."""
        rows = torch.arange(self.skips)[:, None] >= len(plan) // 2
        mask = rows.expand_as(self.weight)
        return {"weight": mask} | ({} if self.gate is None else {"gate": mask})

    def before(self, visit: Visit, stream: Stream) -> None:
        """Pop the last output of the first half and blend it into the stream."""
        # The stack is nested pairs (top, rest). The length of a list would be part of every
        # compiled graph, so layers that look alike could not share one.
        stack = stream.kept.setdefault("unet", ())
        if not 0 <= visit.decoder < self.skips or not stack:
            return
        x = stream.x
        top, stream.kept["unet"] = stack
        skip = self.weight[visit.decoder].to(x.dtype) * top
        if self.gate is None:
            stream.x = x + skip
        else:
            gate = torch.sigmoid(self.gate[visit.decoder]).to(x.dtype)
            stream.x = gate * x + (1.0 - gate) * skip

    def after(self, visit: Visit, x_in: Tensor, stream: Stream) -> None:
        """Push the output of a visit of the first half."""
        if visit.decoder < 0:
            stream.kept["unet"] = stream.x, stream.kept["unet"]
