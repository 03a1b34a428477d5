"""Depth recurrence: visits a run of layers several times with the same weights.

It adds depth without adding bytes. Because the extra visits cost time (17 visits instead of 11 take
1.46 times as long), training switches the loop on part of the way through. Scoring always loops.

Source: PR 1204, PR 1260, PR 1285 (about 3 mBPB), PR 1331, PR 2014 (layers 3 to 5 three times, on
from 35 % of training), PR 1894 (on from 42 %); universal transformers, arXiv:1807.03819.

Legal: the same weights are applied to the token's own states.

Cost: no weights. One block per extra visit, in training (once the loop is on) and in scoring.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from underpar.recipe import ModelSpec, require
from underpar.seams import check_layers

STAGE = "model"


@dataclass(frozen=True)
class Settings:
    """`first`: first layer of the loop.
    `last`: last layer of the loop.
    `repeats`: number of extra passes through these layers, after the first one.
    `start`: share of the training budget (0 to 1) after which training loops.
    """

    first: int = 3
    last: int = 5
    repeats: int = 2
    start: float = 0.35

    def __post_init__(self) -> None:
        require(
            self.first <= self.last,
            f"levers.loop.first = {self.first}, last = {self.last}: the first comes before",
        )
        require(0 <= self.repeats <= 16, f"levers.loop.repeats = {self.repeats}: expected 0 to 16")
        # At 1 training would never loop, and scoring always does.
        require(0 <= self.start < 1, f"levers.loop.start = {self.start}: expected 0 up to 1")


class Lever(nn.Module):
    """Changes the order of visits and nothing else."""

    def __init__(self, settings: Settings, spec: ModelSpec) -> None:
        super().__init__()
        check_layers("loop", tuple(range(settings.first, settings.last + 1)), spec)
        self.settings = settings
        self.on = True

    def neutral_(self) -> None:
        """Nothing to set: the loop has no parameters."""

    @torch.no_grad()
    def agree_(self, blocks: Sequence[Any], plain: Sequence[Any]) -> None:
        """Set the looped blocks' scales to 0: such blocks may be visited any number of times."""
        for layer in range(self.settings.first, self.settings.last + 1):
            for block in (blocks[layer], plain[layer]):
                block.attn_scale.zero_()
                block.mlp_scale.zero_()

    def progress(self, p: float) -> None:
        """Switch the loop on once training has reached `start`."""
        self.on = p >= self.settings.start

    def order(self, layers: tuple[int, ...]) -> tuple[int, ...]:
        """Insert the extra passes after the first one."""
        first, last = self.settings.first, self.settings.last
        again = tuple(range(first, last + 1)) * (self.settings.repeats if self.on else 0)
        end = layers.index(last) + 1
        return layers[:end] + again + layers[end:]
