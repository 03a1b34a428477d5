"""An average of the weights over the last part of the run.

The horizon grows with the run (a fraction of the steps so far), so one setting serves runs of 100
and of 100,000 steps. Source: polynomial-decay averaging (Shamir and Zhang 2013, arXiv:1212.1824);
an exponential average is worth about 11 mBPB where the learning rate keeps a floor (PR 2014), and
for short runs the best horizon is much shorter (PR 2005). Legal: it only sees the weights.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from underpar.recipe import ModelSpec, require

STAGE = "train"


@dataclass(frozen=True)
class Settings:
    """`horizon`: time constant of the average, as a fraction of the steps so far."""

    horizon: float = 0.06

    def __post_init__(self) -> None:
        require(self.horizon > 0, f"levers.ema.horizon = {self.horizon}: expected more than 0")


class WeightAverage:
    """fp32 shadow of the weights."""

    def __init__(self, horizon: float) -> None:
        self.horizon = horizon
        self._shadow: dict[str, Tensor] = {}

    def start(self, weights: Mapping[str, Tensor]) -> None:
        """Take the initial weights."""
        self._shadow = {name: w.detach().float().clone() for name, w in weights.items()}

    @torch.no_grad()
    def update(self, weights: Mapping[str, Tensor], step: int) -> None:
        """Fold in the weights after `step` steps."""
        share = 1.0 / (1.0 + self.horizon * step)
        shadows = list(self._shadow.values())
        torch._foreach_lerp_(shadows, [weights[name].float() for name in self._shadow], share)

    def average(self) -> dict[str, Tensor]:
        """The average by weight name."""
        return dict(self._shadow)

    def state(self) -> dict[str, Tensor]:
        """What a resumed run needs: the average itself."""
        return self.average()

    @torch.no_grad()
    def load(self, state: Mapping[str, Tensor]) -> None:
        """Put a checkpointed average back."""
        for name, shadow in self._shadow.items():
            shadow.copy_(state[name])


def plug(settings: Settings, spec: ModelSpec) -> WeightAverage:
    """The averager for the training loop."""
    return WeightAverage(settings.horizon)
