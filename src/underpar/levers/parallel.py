"""Parallel blocks: from some layer on, attention and MLP read the same input, and both are added.

Source: GPT-J (Wang and Komatsuzaki 2021); PR 1437 (0.5 mBPB), PR 1894 (from layer 7). Legal: it
only rewires the token's own states.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from underpar.recipe import ModelSpec
from underpar.seams import Branches, Stream, Visit, check_layers, take_turns

STAGE = "model"


@dataclass(frozen=True)
class Settings:
    """`start`: the first parallel layer."""

    start: int = 7


class Parallel(nn.Module):
    """x + attention(x) + MLP(x)."""

    def __init__(self, settings: Settings, spec: ModelSpec) -> None:
        super().__init__()
        check_layers("parallel", (settings.start,), spec)
        self.start = settings.start

    def neutral_(self) -> None:
        """It has no parameters."""

    @torch.no_grad()
    def agree_(self, blocks: Sequence[Any], plain: Sequence[Any]) -> None:
        """Side by side is one after the other only where one of the two is silent: take turns."""
        take_turns(self.start, blocks, plain)

    def wires(self, layer: int) -> bool:
        """True from the first parallel layer on."""
        return layer >= self.start

    def wire(self, block: Branches, visit: Visit, stream: Stream) -> None:
        """Both branches read the block's input."""
        x = block.mix(stream.x, stream)
        stream.x = x + block.attend(x, visit, stream) + block.mlp_branch(x, visit)


def plug(settings: Settings, spec: ModelSpec) -> Parallel:
    """The module to hook in."""
    return Parallel(settings, spec)
