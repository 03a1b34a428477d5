"""QAT-lite: late in training, queries and keys of the last layers are drawn to what packing stores.

A penalty on the distance between a weight and its six-bit rounding, which is held constant, added
every few steps and rising to the end. As published it does nothing: the mean over elements leaves
each one a gradient of some 1e-10, five orders of magnitude below that of the loss. With `total` the
distance is summed over a matrix instead, and the two gradients are of one order of magnitude.
Source: PR 1894. Legal: it only sees the weights.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from underpar.levers.ste import round_rows
from underpar.recipe import ModelSpec, require
from underpar.seams import check_layers

STAGE = "train"

# The scheme int6:12.85 of the published recipe.
BITS, SIGMAS = 6, 12.85


@dataclass(frozen=True)
class Settings:
    """`layers` it draws, its `strength` at the end of the run, from `start` of it on, every `every`
    steps; `total`: the sum over a matrix instead of the mean."""

    layers: tuple[int, ...] = (7, 8, 9, 10)
    strength: float = 0.02
    start: float = 0.55
    every: int = 4
    total: bool = False

    def __post_init__(self) -> None:
        require(bool(self.layers), "levers.qat_lite.layers is empty: name at least one")
        strength, every = self.strength, self.every
        require(strength >= 0, f"levers.qat_lite.strength = {strength}: expected 0 or more")
        require(0 <= self.start < 1, f"levers.qat_lite.start = {self.start}: expected 0 up to 1")
        require(every > 0, f"levers.qat_lite.every = {every}: expected at least 1")


# By default so short a run would not see it.
TINY = (Settings(start=0.0, every=1),)


class QatLite:
    """Adds to the loss, keeps nothing."""

    def __init__(self, settings: Settings, spec: ModelSpec) -> None:
        self.settings = settings
        layers = check_layers("qat_lite", settings.layers, spec)
        self.names = [f"blocks.{layer}.attn.{part}.weight" for layer in layers for part in "qk"]

    def penalty(self, model: nn.Module, step: int, p: float) -> Tensor | None:
        """The mean distance of the matrices from their rounding, scaled; None in other steps."""
        start = self.settings.start
        if p < start or step % self.settings.every:
            return None
        ramp = (p - start) / (1.0 - start)
        distances = [self._distance(model.get_parameter(name)) for name in self.names]
        return self.settings.strength * ramp * torch.stack(distances).mean()

    def _distance(self, weight: Tensor) -> Tensor:
        squared = (weight - round_rows(weight.detach(), BITS, SIGMAS)).square()
        return squared.sum() if self.settings.total else squared.mean()


def plug(settings: Settings, spec: ModelSpec) -> QatLite:
    """The penalty for the training loop."""
    return QatLite(settings, spec)
