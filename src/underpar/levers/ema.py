"""Exponential weight average: packs an average of the weights over the last part of the run.

The time constant is a fraction of the steps so far, so one setting serves runs of 100 and of
100,000 steps. With `decay` it is a number of steps, as in the published systems: 0.9965 in PR 2014
and PR 2135, 0.997 in PR 1219.

Source: polynomial-decay averaging (Shamir and Zhang 2013, arXiv:1212.1824). PR 2014 gains about 11
mBPB with an exponential average and a learning rate that keeps a floor; in short runs the best time
constant is much shorter (PR 2005). `share`: modded-nanogpt, optimization track, entry 45 (0.6).

Legal: it reads the weights only.

Cost: one fp32 copy of the weights in memory and in each checkpoint, and one pass over it per step.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from underpar.recipe import ModelSpec, require
from underpar.schema import added

STAGE = "train"


@dataclass(frozen=True)
class Settings:
    """`horizon`: time constant of the average, as a fraction of the steps so far.
    `decay`: share of the average that a step keeps, the same in every step; 0: `horizon` decides.
    `share`: share of the average in what is packed; the rest is the weights of the last step.
    """

    horizon: float = 0.06
    decay: float = added(0.0)
    share: float = added(1.0)

    def __post_init__(self) -> None:
        require(self.horizon > 0, f"levers.ema.horizon = {self.horizon}: expected more than 0")
        require(0 <= self.decay < 1, f"levers.ema.decay = {self.decay}: expected 0 up to 1")
        require(0 <= self.share <= 1, f"levers.ema.share = {self.share}: expected 0 to 1")


class WeightAverage:
    """The average, as an fp32 copy of the weights."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self._shadow: dict[str, Tensor] = {}
        self._weights: Mapping[str, Tensor] = {}

    def start(self, weights: Mapping[str, Tensor]) -> None:
        """Start the average at the initial weights, which training changes in place."""
        self._weights = weights
        self._shadow = {name: w.detach().float().clone() for name, w in weights.items()}

    @torch.no_grad()
    def update(self, weights: Mapping[str, Tensor], step: int, lr_scale: float = 1.0) -> None:
        """Add the weights after `step` steps to the average."""
        self._weights = weights
        decay, horizon = self.settings.decay, self.settings.horizon
        new_share = 1.0 - decay if decay else 1.0 / (1.0 + horizon * step)
        shadows = list(self._shadow.values())
        torch._foreach_lerp_(shadows, [weights[name].float() for name in self._shadow], new_share)

    def average(self) -> dict[str, Tensor]:
        """What is packed, by weight name: the average, or a mix with the weights of now."""
        share = self.settings.share
        if share == 1:
            return dict(self._shadow)
        return {
            name: torch.lerp(self._weights[name].detach().float(), shadow, share)
            for name, shadow in self._shadow.items()
        }

    def state(self) -> dict[str, Tensor]:
        """What a resumed run needs, which is the average itself."""
        return dict(self._shadow)

    @torch.no_grad()
    def load(self, state: Mapping[str, Tensor]) -> None:
        """Put a checkpointed average back."""
        for name, shadow in self._shadow.items():
            shadow.copy_(state[name].view(shadow.shape))


def plug(settings: Settings, spec: ModelSpec) -> WeightAverage:
    """The averager for the training loop."""
    return WeightAverage(settings)
