"""Prefix-token prediction: early in training, a token's logits also predict a part of the next.

The other target is the longest token that is a proper prefix of the next one: "inter" for
"international". A rare token then learns from the frequent ones that begin it. The weight falls to
0 while training goes on. The loss is divided by the sum of all weights.

Source: modded-nanogpt, record 88 (PR 337), with its weight and its thirds of the run.

Legal: training only. Scoring has one target. The table of prefixes is made of the vocabulary.

Cost: one more look at the logits, which compilers make part of the same pass.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from underpar.recipe import ModelSpec, require

STAGE = "train"


@dataclass(frozen=True)
class Settings:
    """`weight`: weight of the prefix, beside 1 for the token itself; it falls to 0 over the second
    half of the time until `end`.
    `end`: progress (0 to 1) from which the token itself is the only target.
    """

    weight: float = 0.25
    end: float = 2 / 3

    def __post_init__(self) -> None:
        weight, end = self.weight, self.end
        require(0 <= weight <= 100, f"levers.prefix_token.weight = {weight:g}: expected 0 to 100")
        require(0 < end <= 1, f"levers.prefix_token.end = {end:g}: expected 0 to 1")


def longest_prefixes(pieces: Sequence[bytes]) -> list[int]:
    """For each piece the longest other piece that it begins with, or -1.

    In sorted order, the pieces that begin a piece stand before it, the longest one last.
    """
    prefixes = [-1] * len(pieces)
    open_pieces: list[int] = []
    for token in sorted(range(len(pieces)), key=lambda token: pieces[token]):
        text = pieces[token]
        # Control tokens have no text; of equal pieces none is a proper prefix.
        while open_pieces and (
            not text.startswith(pieces[open_pieces[-1]]) or text == pieces[open_pieces[-1]]
        ):
            open_pieces.pop()
        if text:
            prefixes[token] = open_pieces[-1] if open_pieces else -1
            open_pieces.append(token)
    return prefixes


class Lever:
    """The prefix of each target, from a table."""

    def __init__(self, settings: Settings, spec: ModelSpec) -> None:
        self.settings = settings
        self.weight = torch.zeros(())
        self.prefixes = torch.full((spec.vocab_size,), -1)

    def begin(self, pieces: Sequence[bytes], device: torch.device) -> None:
        """Make the table from the pieces of the vocabulary."""
        self.prefixes = torch.tensor(longest_prefixes(pieces), device=device)
        self.weight = self.weight.to(device)

    def progress(self, p: float) -> None:
        """Set the weight."""
        left = 2 * (1 - p / self.settings.end)
        self.weight.fill_(self.settings.weight * min(1.0, max(0.0, left)))

    def more_targets(self, targets: Tensor, positions: Tensor) -> list[tuple[Tensor, Tensor]]:
        """The prefixes (N,) of targets (N,) and their weights (N,), 0 where there is none."""
        prefixes = self.prefixes[targets]
        return [(prefixes.clamp(min=0), self.weight * (prefixes >= 0))]
