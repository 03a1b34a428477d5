"""Frozen pass blend: mixes repeated visits with the outputs of the first pass, by fixed constants.

x <- beta_i x_out + sum_j alpha_ij first_j, where first_j is the output of looped layer j in the
first pass. No gradient flows into first_j. The constants were learned in a run of the source and
are not trained here.

Source: PR 1779 (first constants), PR 1801 (the constants used here, 0.5 mBPB against PR 1787).

Legal: the constants are fixed before training, and the mix reads the token's own states.

Cost: no weights. Two element-wise operations per looped layer, plus one, in each repeated visit.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor, nn

from underpar.recipe import ModelSpec, require
from underpar.seams import Stream, Visit, check_layers

STAGE = "model"
NEEDS = ("loop",)


@dataclass(frozen=True)
class Settings:
    """`layers`: the layers of the loop.
    `beta`: factor on the output of a repeated visit, one per layer.
    `alpha`: factors on the first pass's outputs; row i, for layer i, has one factor per layer, and
    the rows stand one after the other.
    """

    layers: tuple[int, ...] = (3, 4, 5)
    beta: tuple[float, ...] = (1.56, 1.85, 2.13)
    alpha: tuple[float, ...] = (0.23, 0.04, 0.03, 0.13, -0.34, 0.01, 0.06, 0.19, -0.02)

    def __post_init__(self) -> None:
        num = len(self.layers)
        require(
            len(self.beta) == num and len(self.alpha) == num * num,
            f"levers.pass_blend: {num} layers need {num} values of beta and {num * num} of alpha, "
            f"got {len(self.beta)} and {len(self.alpha)}",
        )


NEUTRAL = Settings(beta=(1.0,) * 3, alpha=(0.0,) * 9)


class Lever(nn.Module):
    """No parameters: the constants are settings."""

    def __init__(self, settings: Settings, spec: ModelSpec) -> None:
        super().__init__()
        check_layers("pass_blend", settings.layers, spec)
        self.settings = settings

    def check(self, plan: Sequence[Visit]) -> None:
        """Refuse layers that are not those of the loop: all come once before any comes again."""
        visits = [visit for visit in plan if visit.layer in self.settings.layers]
        firsts = [visit.repeat == 0 for visit in visits[: len(self.settings.layers)]]
        require(
            all(firsts),
            f"levers.pass_blend.layers = {self.settings.layers}: not the layers of the loop",
        )

    def after(self, visit: Visit, x_in: Tensor, stream: Stream) -> None:
        """Keep the outputs of the first pass; blend them into those of later passes."""
        layers = self.settings.layers
        if visit.layer not in layers:
            return
        firsts = stream.kept.setdefault("pass_blend", {})
        if not visit.repeat:
            firsts[visit.layer] = stream.x.detach()
            return
        i = layers.index(visit.layer)
        x = self.settings.beta[i] * stream.x
        for j, layer in enumerate(layers):
            x = x + self.settings.alpha[i * len(layers) + j] * firsts[layer]
        stream.x = x
