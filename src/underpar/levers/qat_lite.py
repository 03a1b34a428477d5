"""QAT-lite: late in training, pulls late layers' queries and keys towards what packing stores.

The loss gets a penalty on the distance between a weight and its six-bit rounding, which is held
constant. It is added every few steps and rises to the end of the run. As published it does nothing:
the mean over elements leaves each element a gradient of some 1e-10, five orders of magnitude below
that of the loss. With `total` the distance is summed over a matrix, and the two gradients are of
one order of magnitude.

Source: PR 1894.

Legal: it reads the weights only.

Cost: one rounding of the chosen matrices in every `every`-th step after `start`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from underpar.levers.ste import round_rows
from underpar.recipe import ModelSpec, require
from underpar.seams import check_layers

if TYPE_CHECKING:
    from underpar.model.network import Network

STAGE = "train"

# The scheme int6:12.85 of the published recipe.
BITS, SIGMAS = 6, 12.85


@dataclass(frozen=True)
class Settings:
    """`layers`: layers whose query and key matrices are pulled.
    `strength`: factor on the penalty at the end of the run; it rises linearly from 0 at `start`.
    `start`: share of the training budget (0 to 1) after which the penalty acts.
    `every`: the penalty is added in every so many steps.
    `total`: true sums the squared distance over a matrix; false takes its mean, as published.
    """

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


# With the defaults the few steps of a test would not reach `start`.
TINY = (Settings(start=0.0, every=1),)


class Lever:
    """A term of the loss; it keeps no state."""

    def __init__(self, settings: Settings, spec: ModelSpec) -> None:
        self.settings = settings
        layers = check_layers("qat_lite", settings.layers, spec)
        self.names = [f"blocks.{layer}.attn.{part}.weight" for layer in layers for part in "qk"]

    def penalty(self, model: Network, step: int, p: float) -> Tensor | None:
        """The scaled mean distance of the matrices from their rounding; None in other steps."""
        start = self.settings.start
        if p < start or step % self.settings.every:
            return None
        ramp = (p - start) / (1.0 - start)
        distances = [self._distance(model.main.get_parameter(name)) for name in self.names]
        return self.settings.strength * ramp * torch.stack(distances).mean()

    def _distance(self, weight: Tensor) -> Tensor:
        squared = (weight - round_rows(weight.detach(), BITS, SIGMAS)).square()
        return squared.sum() if self.settings.total else squared.mean()
