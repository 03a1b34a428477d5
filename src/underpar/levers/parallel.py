"""Parallel blocks: from some layer on, attention and MLP read the same input and both are added.

The two branches of a block then do not wait for each other.

Source: GPT-J (Wang and Komatsuzaki 2021); PR 1437 (0.5 mBPB), PR 1894 (from layer 7).

Legal: it only rewires the token's own states.

Cost: none; the same operations in another order.
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
    """`start`: first parallel layer."""

    start: int = 7


class Lever(nn.Module):
    """x + attention(x) + MLP(x)."""

    def __init__(self, settings: Settings, spec: ModelSpec) -> None:
        super().__init__()
        check_layers("parallel", (settings.start,), spec)
        self.start = settings.start

    def neutral_(self) -> None:
        """Nothing to set: the lever has no parameters."""

    @torch.no_grad()
    def agree_(self, blocks: Sequence[Any], plain: Sequence[Any]) -> None:
        """In each layer one branch has to be silent: only then do both orders agree."""
        take_turns(self.start, blocks, plain)

    def wires(self, layer: int) -> bool:
        """True for the parallel layers."""
        return layer >= self.start

    def wire(self, block: Branches, visit: Visit, stream: Stream) -> None:
        """Run both branches on the block's input and add both results."""
        x = block.mix(stream.x, stream)
        stream.x = x + block.attend(x, visit, stream) + block.mlp_branch(x, visit)
