"""Depth recurrence: a run of layers is visited several times, with the same weights.

Depth for no bytes. It costs time (17 visits instead of 11 take 1.46 times as long), so it is
switched on part of the way through training; scoring always loops. Source: PR 1204, PR 1260,
PR 1285 (about 3 mBPB), PR 1331, PR 2014 (layers 3 to 5 three times, on from 35 %), PR 1894 (42 %);
universal transformers, arXiv:1807.03819. Legal: the same weights, applied to the token's own
states.
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
    """Layers `first` to `last` are visited `repeats` times more, once training is at `start`."""

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


class Loop(nn.Module):
    """Changes the order of visits, nothing else."""

    def __init__(self, settings: Settings, spec: ModelSpec) -> None:
        super().__init__()
        check_layers("loop", tuple(range(settings.first, settings.last + 1)), spec)
        self.settings = settings
        self.on = True

    def neutral_(self) -> None:
        """It has no parameters."""

    @torch.no_grad()
    def agree_(self, blocks: Sequence[Any], plain: Sequence[Any]) -> None:
        """Silent layers may be visited any number of times."""
        for layer in range(self.settings.first, self.settings.last + 1):
            for block in (blocks[layer], plain[layer]):
                block.attn_scale.zero_()
                block.mlp_scale.zero_()

    def progress(self, p: float) -> None:
        """Loop from `start` of training on."""
        self.on = p >= self.settings.start

    def order(self, layers: tuple[int, ...]) -> tuple[int, ...]:
        """Put the repeats behind the first visits."""
        first, last = self.settings.first, self.settings.last
        again = tuple(range(first, last + 1)) * (self.settings.repeats if self.on else 0)
        end = layers.index(last) + 1
        return layers[:end] + again + layers[end:]


def plug(settings: Settings, spec: ModelSpec) -> Loop:
    """The module to hook in."""
    return Loop(settings, spec)
