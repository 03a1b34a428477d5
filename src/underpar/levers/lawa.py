"""Latest-weight averaging: packs the uniform average of a few snapshots from the end of the run.

A snapshot is taken every few steps; the newest one follows the weights until the next begins.
Unlike in an exponential average, early steps have no part in the result. With `below` no snapshot
is from the time of high rates, when weights still move far between two of them.

Source: Kaddour 2022, arXiv:2209.14981. Twelve snapshots, 50 steps apart, are those of an earlier
run in the tree of PR 1894, which reports no figure for them. It takes them while the schedule
scales the rates to less than 0.5.

Legal: it reads the weights only.

Cost: one fp32 copy of the weights per snapshot, in memory and in each checkpoint.
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
    """`every`: steps between snapshots.
    `window`: number of snapshots that are averaged.
    `below`: snapshots begin where the schedule scales the rates to less than this; until then there
    is one, which follows the weights. 0: from the start.
    """

    every: int = 50
    window: int = 12
    below: float = added(0.0)

    def __post_init__(self) -> None:
        require(self.every > 0, f"levers.lawa.every = {self.every}: expected at least 1")
        require(0 < self.window <= 1000, f"levers.lawa.window = {self.window}: expected 1 to 1000")
        require(0 <= self.below <= 1, f"levers.lawa.below = {self.below}: expected 0 to 1")


class LatestWeights:
    """The snapshots in fp32, oldest first; the newest follows the weights until the next begins."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self._snapshots: list[dict[str, Tensor]] = []

    def start(self, weights: Mapping[str, Tensor]) -> None:
        """Start with the initial weights; the first update replaces them."""
        self._snapshots = [_copy(weights)]

    def update(self, weights: Mapping[str, Tensor], step: int, lr_scale: float = 1.0) -> None:
        """Take the weights after `step` steps into the newest snapshot, or begin another."""
        every, window, below = self.settings.every, self.settings.window, self.settings.below
        is_open = not below or lr_scale < below
        if is_open and step > 1 and (step - 1) % every == 0:
            self._snapshots = [*self._snapshots, _copy(weights)][-window:]
            return
        latest = self._snapshots[-1]
        torch._foreach_copy_(list(latest.values()), [weights[name].detach() for name in latest])

    def average(self) -> dict[str, Tensor]:
        """The mean of the snapshots, by weight name."""
        names = self._snapshots[-1]
        return {name: torch.stack([s[name] for s in self._snapshots]).mean(0) for name in names}

    def state(self) -> dict[str, Tensor]:
        """Every snapshot: "3/blocks.0..." is a weight of the fourth one."""
        return {
            f"{i}/{name}": weight
            for i, snapshot in enumerate(self._snapshots)
            for name, weight in snapshot.items()
        }

    def load(self, state: Mapping[str, Tensor]) -> None:
        """Put checkpointed snapshots back."""
        newest = self._snapshots[-1]
        num_snapshots = len(state) // len(newest)
        self._snapshots = [
            {
                name: state[f"{i}/{name}"].view(w.shape).to(w.device, copy=True)
                for name, w in newest.items()
            }
            for i in range(num_snapshots)
        ]


def _copy(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: w.detach().float().clone() for name, w in weights.items()}


def plug(settings: Settings, spec: ModelSpec) -> LatestWeights:
    """The averager for the training loop."""
    return LatestWeights(settings)
