"""RECUR_AB: a repeated visit is blended with what the same layer gave the time before.

Two scalars a repeated visit: x <- a x_out + b x_before, where x_before is the layer's last output
after its own blend. At a = 1, b = 0 it is the plain loop. Source: PR 1894, whose published run
keeps the scalars in bf16, which swallows late updates; here they are fp32. Legal: it reads the
token's own earlier states.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from underpar.recipe import ModelSpec, require
from underpar.seams import Stream, Visit, check_sites

STAGE = "model"
NEEDS = ("loop",)


@dataclass(frozen=True)
class Settings:
    """`sites`: repeated visits in the plan, each with its own pair."""

    sites: int = 6

    def __post_init__(self) -> None:
        require(self.sites > 0, f"levers.recur_ab.sites = {self.sites}: expected at least 1")


class RecurAB(nn.Module):
    """Pairs (a, b) by repeated visit."""

    def __init__(self, settings: Settings) -> None:
        super().__init__()
        self.pairs = nn.Parameter(torch.empty(settings.sites, 2))
        self.neutral_()

    @torch.no_grad()
    def neutral_(self) -> None:
        """The plain loop."""
        self.pairs[:, 0] = 1.0
        self.pairs[:, 1] = 0.0

    def check(self, plan: Sequence[Visit]) -> None:
        """One for each repeated visit."""
        check_sites("recur_ab", len(self.pairs), plan)

    def after(self, visit: Visit, x_in: Tensor, stream: Stream) -> None:
        """Blend a repeated visit, and keep the result for the next."""
        outputs = stream.kept.setdefault("recur_ab", {})
        if visit.repeat:
            a, b = self.pairs[visit.site].to(stream.x.dtype).unbind()
            stream.x = a * stream.x + b * outputs[visit.layer]
        outputs[visit.layer] = stream.x


def plug(settings: Settings, spec: ModelSpec) -> RecurAB:
    """The module to hook in."""
    return RecurAB(settings)
