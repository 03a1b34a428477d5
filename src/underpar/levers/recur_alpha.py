"""RecurAlpha: scales the change that a repeated visit makes by a learned factor.

x <- x_in + alpha (x_out - x_in), with one alpha per repeated visit. At alpha = 1, where training
starts, it is the plain loop.

Source: PR 1894, where it is an option that the published run leaves off.

Legal: it reads the token's own states.

Cost: one weight and three element-wise operations per repeated visit.
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
    """`sites`: number of repeated visits in the plan; each has a factor of its own."""

    sites: int = 6

    def __post_init__(self) -> None:
        require(self.sites > 0, f"levers.recur_alpha.sites = {self.sites}: expected at least 1")


class Lever(nn.Module):
    """One factor per repeated visit."""

    def __init__(self, settings: Settings, spec: ModelSpec) -> None:
        super().__init__()
        self.alpha = nn.Parameter(torch.ones(settings.sites))

    def neutral_(self) -> None:
        """Set every factor to 1, the plain loop."""
        nn.init.ones_(self.alpha)

    def check(self, plan: Sequence[Visit]) -> None:
        """Refuse a number of sites that is not the number of repeated visits."""
        check_sites("recur_alpha", len(self.alpha), plan)

    def after(self, visit: Visit, x_in: Tensor, stream: Stream) -> None:
        """Scale the change that a repeated visit made."""
        if visit.repeat:
            alpha = self.alpha[visit.site].to(x_in.dtype)
            stream.x = x_in + alpha * (stream.x - x_in)
