"""What an expert is: it guesses single tokens, and its strength says how far it is believed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]
Trust = npt.NDArray[np.float32]
Arrays = dict[str, npt.NDArray[Any]]


@dataclass(frozen=True)
class Proposals:
    """What is expected at n targets, one token each."""

    # (n,) tokens, -1 for none; (n, K) for K experts side by side.
    hints: Ints
    # The same shape, 0 to 1: how far the expert trusts its hint.
    confidence: Trust


class Strength(Protocol):
    """How far an expert's hints are believed; it may learn from targets that were priced."""

    def open(self) -> None:
        """Forget what was learnt."""

    def boost(self, confidence: Trust, log_p: Floats) -> Floats:
        """Nats (n,) added to the logits of hints that have log-probabilities `log_p` (n,)."""

    def settle(self, confidence: Trust, log_p: Floats, hit: npt.NDArray[np.bool_]) -> None:
        """Learn from hints, once their targets are committed, which of them were right (n,)."""

    def state(self) -> Arrays:
        """What a resumed scoring needs, by names of its own."""

    def load(self, state: Mapping[str, npt.NDArray[Any]]) -> None:
        """Put a state back."""


class Expert(Protocol):
    """Infer stage, seam `propose`: guesses single tokens from what its histories have shown."""

    strength: Strength

    def open(self, num_histories: int, num_targets: int) -> None:
        """Forget everything; make room for so many targets over all histories."""

    def propose(self, history: int, targets: Ints) -> Proposals:
        """What is expected at each of the next targets (n,) of a history, then learn them.

        The proposal for a target depends on targets before it alone, of all histories.
        """

    def state(self) -> Arrays:
        """What a resumed scoring needs, by names of its own."""

    def load(self, state: Mapping[str, npt.NDArray[Any]]) -> None:
        """Put a state back, once opened with the sizes it was saved with."""
