"""EMA-Nesterov: each step starts from weights pushed on along the average of the steps before.

m is an average of the changes of the weights per step. Before the forward pass the weights move by
beta m, times the schedule of the rates; the gradient is taken there and the optimizer steps from
there. Early, when m is young, and late, when the rates fall, nothing is pushed.

Source: EMA-Nesterov, arXiv:2605.25395; modded-nanogpt PR 308 (optimization track, entry 39: 6 % of
the steps with beta 0.6 on plain Muon) and PR 309 (entry 40: 0.3 on a tuned optimizer).

Legal: training only.

Cost: two fp32 copies of the weights in memory, one of them in checkpoints, and two passes over
them per step.
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
    """`beta`: how far the weights are pushed, in average steps.
    `decay`: share of the average that a step keeps.
    `begin`: progress (0 to 1) from which the weights are pushed.
    `end`: progress from which they no longer are.
    """

    beta: float = 0.3
    decay: float = 0.99
    begin: float = 0.1
    end: float = 0.7

    def __post_init__(self) -> None:
        require(0 <= self.beta <= 10, f"levers.look_ahead.beta = {self.beta:g}: expected 0 to 10")
        require(
            0 <= self.decay < 1, f"levers.look_ahead.decay = {self.decay:g}: expected 0 up to 1"
        )
        require(
            0 <= self.begin < self.end <= 1,
            f"levers.look_ahead.begin = {self.begin:g}, end = {self.end:g}: expected to rise "
            "between 0 and 1",
        )


NEUTRAL = Settings(beta=0.0)


class Lever:
    """The average step, and the weights at the start of the step in hand."""

    def __init__(self, settings: Settings, spec: ModelSpec) -> None:
        self.settings = settings
        self._step: dict[str, Tensor] = {}
        self._before: list[Tensor] = []

    def start(self, weights: Mapping[str, Tensor]) -> None:
        """Nothing has moved yet."""
        floats = {name: w for name, w in weights.items() if w.is_floating_point()}
        self._step = {name: torch.zeros_like(w, dtype=torch.float32) for name, w in floats.items()}

    @torch.no_grad()
    def push(self, weights: Mapping[str, Tensor], p: float, lr_scale: float) -> None:
        """Push the weights on, in place, before the step at progress p."""
        self._before = []
        if p >= self.settings.end:
            return
        tensors = [weights[name] for name in self._step]
        self._before = [tensor.clone() for tensor in tensors]
        if p >= self.settings.begin:
            share = self.settings.beta * lr_scale
            torch._foreach_add_(tensors, list(self._step.values()), alpha=share)

    @torch.no_grad()
    def see(self, weights: Mapping[str, Tensor]) -> None:
        """Take what the step changed, from before the push, into the average."""
        if self._before:
            moved = torch._foreach_sub([weights[name] for name in self._step], self._before)
            torch._foreach_lerp_(list(self._step.values()), list(moved), 1 - self.settings.decay)
            self._before = []

    def state(self) -> dict[str, Tensor]:
        """The average step."""
        return dict(self._step)

    def load(self, state: Mapping[str, Tensor]) -> None:
        """Put a checkpointed average back."""
        for name, step in self._step.items():
            step.copy_(state[name])
