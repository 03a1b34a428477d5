"""RECUR_AB: blends the output of a repeated visit with the layer's previous output.

x <- a x_out + b x_before with two learned scalars per repeated visit. x_before is the layer's last
output after its own blend. With a = 1 and b = 0 it is the plain loop.

Source: PR 1894. The published run keeps the scalars in bf16, which swallows late updates; here they
are fp32.

Legal: it reads the token's own earlier states.

Cost: two weights and three element-wise operations per repeated visit.
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
    """`sites`: number of repeated visits in the plan; each has a pair (a, b) of its own."""

    sites: int = 6

    def __post_init__(self) -> None:
        require(self.sites > 0, f"levers.recur_ab.sites = {self.sites}: expected at least 1")


class Lever(nn.Module):
    """One pair (a, b) per repeated visit."""

    def __init__(self, settings: Settings, spec: ModelSpec) -> None:
        super().__init__()
        self.pairs = nn.Parameter(torch.empty(settings.sites, 2))
        self.neutral_()

    @torch.no_grad()
    def neutral_(self) -> None:
        """Set every pair to (1, 0), the plain loop."""
        self.pairs[:, 0] = 1.0
        self.pairs[:, 1] = 0.0

    def check(self, plan: Sequence[Visit]) -> None:
        """Refuse a number of sites that is not the number of repeated visits."""
        check_sites("recur_ab", len(self.pairs), plan)

    def after(self, visit: Visit, x_in: Tensor, stream: Stream) -> None:
        """Blend the output of a repeated visit; keep the result for this layer's next visit."""
        outputs = stream.kept.setdefault("recur_ab", {})
        if visit.repeat:
            a, b = self.pairs[visit.site].to(stream.x.dtype).unbind()
            stream.x = a * stream.x + b * outputs[visit.layer]
        outputs[visit.layer] = stream.x
