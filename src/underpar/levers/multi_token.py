"""Multi-token prediction: early in training, a token's logits also predict later tokens.

The same logits serve all targets, so there is no other head. Far targets tell what the text is
about before the network can tell the next word; their weights fall to 0 while it learns to. The
loss is divided by the sum of all weights, so that the clip of gradients keeps its meaning.

Source: modded-nanogpt, record 53 (PR 178), with its weights and thirds of the run; Gloeckle et al.
2024, arXiv:2404.19737, has a head per target. PR 375 reports a loss with such heads, and nanochat
(log of 2026-01-12) no gain without them.

Legal: training only. Scoring has one target.

Cost: one more look at the logits per target, which compilers make part of the same pass.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from underpar.recipe import ModelSpec, require
from underpar.seams import BOS_ID

STAGE = "train"


@dataclass(frozen=True)
class Settings:
    """`second`: weight of the token after the next, beside 1 for the next; it falls to 0 over the
    second half of the time until `end`.
    `third`: weight of the token after that; it falls to 0 over the first half.
    `end`: progress (0 to 1) from which the next token is the only target.
    """

    second: float = 0.5
    third: float = 0.25
    end: float = 2 / 3

    def __post_init__(self) -> None:
        for name in ("second", "third"):
            value = getattr(self, name)
            require(0 <= value <= 100, f"levers.multi_token.{name} = {value:g}: expected 0 to 100")
        require(0 < self.end <= 1, f"levers.multi_token.end = {self.end:g}: expected 0 to 1")


class Lever:
    """Targets of the same piece, one and two places later."""

    def __init__(self, settings: Settings, spec: ModelSpec) -> None:
        self.settings = settings
        self.weights = [torch.zeros(()), torch.zeros(())]

    def begin(self, pieces: Sequence[bytes], device: torch.device) -> None:
        """Keep the weights on the device, where compiled training reads them."""
        self.weights = [weight.to(device) for weight in self.weights]

    def progress(self, p: float) -> None:
        """Set the weights."""
        left = 2 * (1 - p / self.settings.end)
        second, third = self.weights
        second.fill_(self.settings.second * min(1.0, max(0.0, left)))
        third.fill_(self.settings.third * min(1.0, max(0.0, left - 1)))

    def more_targets(self, targets: Tensor, positions: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Later targets (N,) and their weights (N,), 0 beyond a piece or a document."""
        found = []
        is_open = torch.ones_like(targets, dtype=torch.bool)
        for ahead, weight in enumerate(self.weights, start=1):
            is_open = is_open & (targets.roll(1 - ahead) != BOS_ID)
            same_piece = positions.roll(-ahead) == positions + ahead
            found.append((targets.roll(-ahead), weight * (is_open & same_piece)))
        return found
