"""RecurAlpha: a repeated visit changes the stream by a learned share of what the block would.

x <- x_in + alpha (x_out - x_in), one scalar a repeated visit, starting at 1, the plain loop.
Source: PR 1894, where it is an option and off. Legal: it reads the token's own states.
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
    """`sites`: repeated visits in the plan, each with its own share."""

    sites: int = 6

    def __post_init__(self) -> None:
        require(self.sites > 0, f"levers.recur_alpha.sites = {self.sites}: expected at least 1")


class RecurAlpha(nn.Module):
    """One share a repeated visit."""

    def __init__(self, settings: Settings) -> None:
        super().__init__()
        self.alpha = nn.Parameter(torch.ones(settings.sites))

    def neutral_(self) -> None:
        """The plain loop."""
        nn.init.ones_(self.alpha)

    def check(self, plan: Sequence[Visit]) -> None:
        """One for each repeated visit."""
        check_sites("recur_alpha", len(self.alpha), plan)

    def after(self, visit: Visit, x_in: Tensor, stream: Stream) -> None:
        """Shorten or lengthen a repeated visit's step."""
        if visit.repeat:
            alpha = self.alpha[visit.site].to(x_in.dtype)
            stream.x = x_in + alpha * (stream.x - x_in)


def plug(settings: Settings, spec: ModelSpec) -> RecurAlpha:
    """The module to hook in."""
    return RecurAlpha(settings)
