"""Adapt the soft cap and the scale vectors while scoring, by SGD on tokens already priced.

A few thousand numbers follow the style of the text; the matrices stay as packed. Source: bias- and
scale-only test-time training in the line of Tent (Wang et al. 2020, arXiv:2006.10726), score-first
as ruled in PR 549. Legal: the scorer prices a chunk, commits it, and only then hands it over; the
schedule depends on nothing but the number of tokens seen, which a decoder knows too.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from underpar.recipe import ModelSpec, require

STAGE = "infer"


@dataclass(frozen=True)
class Settings:
    """SGD on the tensors that `patterns` name. `cap_lr` is the soft cap's own rate."""

    lr: float = 0.5
    cap_lr: float = 5.0
    momentum: float = 0.9
    patterns: tuple[str, ...] = ("levers.*softcap.cap_*", "blocks.*_scale")

    def __post_init__(self) -> None:
        for key in ("lr", "cap_lr"):
            rate = getattr(self, key)
            require(rate >= 0, f"levers.adapt_scales.{key} = {rate}: expected 0 or more")
        share = self.momentum
        require(0 <= share < 1, f"levers.adapt_scales.momentum = {share}: expected 0 up to 1")


class ScaleSGD:
    """Plain SGD with momentum; its state lives as long as the scored stream."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self._rates: list[float] = []
        self._velocity: list[Tensor] = []

    def parameters(self, named: Mapping[str, Tensor]) -> list[Tensor]:
        """The scale tensors of the model."""
        patterns = self.settings.patterns
        chosen = [n for n in named if any(fnmatch.fnmatch(n, pattern) for pattern in patterns)]
        is_cap = [name.rpartition(".")[2].startswith("cap_") for name in chosen]
        self._rates = [self.settings.cap_lr if cap else self.settings.lr for cap in is_cap]
        return [named[name] for name in chosen]

    @torch.no_grad()
    def update(self, parameters: list[Tensor]) -> None:
        """One step from the gradients on `parameters`."""
        if not self._velocity:
            self._velocity = [torch.zeros_like(p) for p in parameters]
        for parameter, velocity, lr in zip(parameters, self._velocity, self._rates, strict=True):
            assert parameter.grad is not None
            velocity.mul_(self.settings.momentum).add_(parameter.grad)
            parameter.sub_(velocity, alpha=lr)


def plug(settings: Settings, spec: ModelSpec) -> ScaleSGD:
    """The adapter for the scorer."""
    return ScaleSGD(settings)
