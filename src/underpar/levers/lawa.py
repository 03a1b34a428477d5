"""The uniform average of a few snapshots from the last part of the run.

Snapshots are taken every few steps; the final weights are the last. Early steps have no part in it,
unlike in an exponential average, at the price of an fp32 copy of the weights a snapshot, in memory
and in each checkpoint. Source: latest-weight averaging (Kaddour 2022, arXiv:2209.14981); twelve
snapshots, 50 steps apart, are those of an earlier run in the tree of PR 1894, which has no figure
for them. Legal: it only sees the weights.
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
    """`every`: steps between snapshots; `window`: snapshots that are averaged."""

    every: int = 50
    window: int = 12

    def __post_init__(self) -> None:
        require(self.every > 0, f"levers.lawa.every = {self.every}: expected at least 1")
        require(0 < self.window <= 1000, f"levers.lawa.window = {self.window}: expected 1 to 1000")


class LatestWeights:
    """fp32 snapshots, oldest first; the last one follows the weights until the next begins."""

    def __init__(self, every: int, window: int) -> None:
        self.every = every
        self.window = window
        self._snapshots: list[dict[str, Tensor]] = []

    def start(self, weights: Mapping[str, Tensor]) -> None:
        """Take the initial weights; the first update replaces them."""
        self._snapshots = [_copy(weights)]

    def update(self, weights: Mapping[str, Tensor], step: int) -> None:
        """Fold in the weights after `step` steps."""
        if step > 1 and (step - 1) % self.every == 0:
            self._snapshots = [*self._snapshots, _copy(weights)][-self.window :]
            return
        latest = self._snapshots[-1]
        torch._foreach_copy_(list(latest.values()), [weights[name].detach() for name in latest])

    def average(self) -> dict[str, Tensor]:
        """The mean of the snapshots by weight name."""
        names = self._snapshots[-1]
        return {name: torch.stack([s[name] for s in self._snapshots]).mean(0) for name in names}

    def state(self) -> dict[str, Tensor]:
        """Every snapshot: "3/blocks.0..." is a weight of the fourth."""
        return {
            f"{i}/{name}": weight
            for i, snapshot in enumerate(self._snapshots)
            for name, weight in snapshot.items()
        }

    def load(self, state: Mapping[str, Tensor]) -> None:
        """Put checkpointed snapshots back."""
        here = self._snapshots[-1]
        num_snapshots = len(state) // len(here)
        self._snapshots = [
            {name: state[f"{i}/{name}"].to(w.device, copy=True) for name, w in here.items()}
            for i in range(num_snapshots)
        ]


def _copy(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: w.detach().float().clone() for name, w in weights.items()}


def plug(settings: Settings, spec: ModelSpec) -> LatestWeights:
    """The averager for the training loop."""
    return LatestWeights(settings.every, settings.window)
