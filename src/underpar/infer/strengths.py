"""How far an expert's hints are believed: a constant, its confidence, or what scoring taught."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from underpar.infer.experts import Arrays, Floats, Strength, Trust
from underpar.schema import require

STRENGTHS = ("fixed", "confidence", "hedge")
# e to the 16th is nine million: no hint deserves more.
LARGEST_BOOST = 16.0


def check_strength(lever: str, kind: str, boost: float) -> None:
    """Refuse settings of a lever that no strength can be made of."""
    known = ", ".join(STRENGTHS)
    require(kind in STRENGTHS, f"levers.{lever}.strength = {kind!r}: expected one of {known}")
    fits = 0 <= boost <= LARGEST_BOOST
    require(fits, f"levers.{lever}.boost = {boost}: expected 0 to {LARGEST_BOOST:g} nats")


def make_strength(kind: str, boost: float) -> Strength:
    """A strength by its name in STRENGTHS; `boost` in nats is not used by "hedge"."""
    assert kind in STRENGTHS
    return Hedge() if kind == "hedge" else Steady(boost, kind == "confidence")


class Steady:
    """The same boost for every hint, or one in proportion to the confidence; learns nothing."""

    def __init__(self, nats: float, by_confidence: bool = False) -> None:
        self._nats = nats
        self._by_confidence = by_confidence

    def open(self) -> None:
        """Nothing to forget."""

    def boost(self, confidence: Trust, log_p: Floats) -> Floats:
        """Nats (n,) for hints."""
        share = confidence.astype(np.float64)
        return self._nats * (share if self._by_confidence else np.ones_like(share))

    def settle(self, confidence: Trust, log_p: Floats, hit: npt.NDArray[np.bool_]) -> None:
        """Nothing to learn."""

    def state(self) -> Arrays:
        """Nothing to keep."""
        return {}

    def load(self, state: Mapping[str, npt.NDArray[Any]]) -> None:
        """Nothing to put back."""


class Hedge:
    """A Bayesian mixture over boosts, learnt in each bucket of (confidence, probability of hint).

    Half of the prior is on no boost, and the rest falls with its size. In each bucket used, the
    mixture costs at most ln(1 / prior) nats more than the best single boost there: 0.7 nats where
    the expert is of no use at all. That holds where a commit has one target of a bucket. The
    weights stand still within a commit, so that all of it is priced at once; of a larger one every
    target may cost that much until the first is settled.
    """

    GRID = np.array([-1.0, -0.5, -0.25, 0.0, 0.25, 0.5, 1.0, 1.5, 2.0, 2.5, 3.0, 4.0, 6.0])
    NUM_CONFIDENCES = 8
    # Log-odds of the hint, rounded to whole nats, from -8 to 8.
    NUM_ODDS = 17

    def __init__(self) -> None:
        self.open()

    def open(self) -> None:
        """Go back to the prior."""
        fall = np.where(self.GRID == 0, 0.0, np.exp(-np.abs(self.GRID)))
        prior = np.where(self.GRID == 0, 0.5, 0.5 * fall / fall.sum())
        num_buckets = self.NUM_CONFIDENCES * self.NUM_ODDS
        self._log_weights = np.tile(np.log(prior), (num_buckets, 1))  # (buckets, G)

    def boost(self, confidence: Trust, log_p: Floats) -> Floats:
        """Nats (n,) that tilt as the mixture of the grid's tilts does."""
        log_weights = self._log_weights[self._buckets(confidence, log_p)]  # (n, G)
        # Relative to the largest: others may vanish, not all.
        weights = np.exp(log_weights - log_weights.max(axis=1, keepdims=True))
        shares = weights / self._norms(log_p)
        return np.log(shares @ np.exp(self.GRID)) - np.log(shares.sum(axis=1))

    def settle(self, confidence: Trust, log_p: Floats, hit: npt.NDArray[np.bool_]) -> None:
        """Weigh every boost by what it would have made of these targets (n,)."""
        gains = hit[:, None] * self.GRID - np.log(self._norms(log_p))  # (n, G)
        buckets = self._buckets(confidence, log_p)
        for weights, gain in zip(self._log_weights.T, gains.T, strict=True):
            weights += np.bincount(buckets, gain, minlength=len(weights))

    def state(self) -> Arrays:
        """The weights."""
        return {"log_weights": self._log_weights.copy()}

    def load(self, state: Mapping[str, npt.NDArray[Any]]) -> None:
        """Put weights back."""
        self._log_weights[:] = state["log_weights"]

    def _norms(self, log_p: Floats) -> Floats:
        return 1 + np.exp(np.minimum(log_p, 0.0))[:, None] * np.expm1(self.GRID)  # (n, G)

    def _buckets(self, confidence: Trust, log_p: Floats) -> npt.NDArray[np.intp]:
        # One bucket for each time that doubt halves.
        doubt = np.maximum(1 - confidence.astype(np.float64), 2.0 ** (1 - self.NUM_CONFIDENCES))
        largest = self.NUM_ODDS // 2
        below_one = np.minimum(log_p, -1e-9)
        odds = np.rint(below_one - np.log(-np.expm1(below_one)))
        column = np.clip(odds, -largest, largest).astype(np.intp) + largest
        return np.floor(-np.log2(doubt)).astype(np.intp) * self.NUM_ODDS + column
