"""Protocols of experts, which guess single tokens, and of strengths, which weight the guesses."""

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
    """An expert's guesses for n targets, one token each."""

    # (n,) tokens, -1 for none; (n, K) for K experts side by side.
    hints: Ints
    # The same shape, 0 to 1: how far the expert trusts its hint.
    confidence: Trust

    def rows(self, rows: slice | Ints) -> Proposals:
        """The guesses for some of the targets."""
        return Proposals(self.hints[rows], self.confidence[rows])


class Strength(Protocol):
    """The weight of an expert's hints; it may learn from targets that were priced."""

    def open(self) -> None:
        """Forget everything that was learnt."""

    def boost(self, confidence: Trust, log_p: Floats) -> Floats:
        """Nats (n,) added to the logits of hints that have log-probabilities `log_p` (n,)."""

    def settle(self, confidence: Trust, log_p: Floats, hit: npt.NDArray[np.bool_]) -> None:
        """Learn which hints were right, `hit` (n,), once their targets are committed."""

    def state(self) -> Arrays:
        """Everything that a resumed score needs, by name."""

    def load(self, state: Mapping[str, npt.NDArray[Any]]) -> None:
        """Restore a state."""


class Expert(Protocol):
    """Infer stage, seam `propose`: guesses single tokens from the tokens of its histories."""

    strength: Strength

    def open(self, num_histories: int, num_targets: int) -> None:
        """Forget everything; make room for so many targets over all histories."""

    def propose(self, history: int | Ints, targets: Ints) -> Proposals:
        """Guess each of the next targets (n,) of a history, and learn each one after its guess.

        Targets of several histories stand in the order in which they become known; `history` is
        then (n,). The guess for a target depends only on targets before it, of all histories.
        """

    def guess(self, history: int) -> Proposals:
        """The guess (1,) for the next target of a history, which nobody knows yet."""

    def state(self) -> Arrays:
        """Everything that a resumed score needs, by name."""

    def load(self, state: Mapping[str, npt.NDArray[Any]]) -> None:
        """Restore a state, after `open` with the same sizes."""
