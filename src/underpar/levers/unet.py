"""U-Net skips: blocks of the second half also read what blocks of the first half wrote.

The plan's first half pushes its outputs, the second pops them, last first, and blends each in with
a gain and a gate for each channel. Gains go by place in the second half, not by layer, so partners
change when a loop lengthens the plan; places past `skips` pop nothing. Source: PR 1089 (gates that
start at one half), PR 2014 (8 skips), PR 1894 and PR 1219 (5 skips); U-Net, arXiv:1505.04597.
Legal: it reads the token's own earlier states.
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
    """`skips`: rows of gains; `gates`: g x + (1 - g) w u where it is true, else x + w u."""

    skips: int = 8
    gates: bool = True

    def __post_init__(self) -> None:
        require(self.skips > 0, f"levers.unet.skips = {self.skips}: expected at least 1")


TINY = (Settings(), Settings(gates=False))


class UNet(nn.Module):
    """A stack of earlier outputs that lives as long as one forward pass."""

    def __init__(self, settings: Settings, spec: ModelSpec) -> None:
        super().__init__()
        self.skips = settings.skips
        self.weight = nn.Parameter(torch.ones(settings.skips, spec.dim))
        gates = torch.zeros(settings.skips, spec.dim)
        self.gate = nn.Parameter(gates) if settings.gates else None

    def neutral_(self) -> None:
        """Blend nothing in."""
        nn.init.zeros_(self.weight)
        if self.gate is not None:
            # The sigmoid of 100 is 1 to the last bit.
            nn.init.constant_(self.gate, 100.0)

    def check(self, plan: Sequence[Visit]) -> None:
        """A single visit has no halves."""
        require(len(plan) > 1, "levers.unet: a plan of one visit has nothing to skip")

    def dead(self, plan: Sequence[Visit]) -> dict[str, Tensor]:
        """Rows of places that the plan does not have, or that find the stack empty."""
        rows = torch.arange(self.skips)[:, None] >= len(plan) // 2
        mask = rows.expand_as(self.weight)
        return {"weight": mask} | ({} if self.gate is None else {"gate": mask})

    def before(self, visit: Visit, stream: Stream) -> None:
        """Blend the last output pushed into the stream."""
        # A stack as pairs of its top and the rest: a list's length would be part of every trace.
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
        """Push the outputs of the first half."""
        if visit.decoder < 0:
            stream.kept["unet"] = stream.x, stream.kept["unet"]


def plug(settings: Settings, spec: ModelSpec) -> UNet:
    """The module to hook in."""
    return UNet(settings, spec)
