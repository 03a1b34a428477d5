"""The weight of an expert's hints: a constant, its confidence, or learnt while scoring."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from underpar.infer.experts import Arrays, Floats, Strength, Trust
from underpar.schema import require

STRENGTHS = ("fixed", "confidence", "hedge")
# Nats: odds change by a factor of e^16, nine million, at most.
LARGEST_BOOST = 16.0


def check_strength(lever: str, kind: str, boost: float) -> None:
    """Refuse a lever's settings if no strength can be made of them."""
    known = ", ".join(STRENGTHS)
    require(kind in STRENGTHS, f"levers.{lever}.strength = {kind!r}: expected one of {known}")
    fits = 0 <= boost <= LARGEST_BOOST
    require(fits, f"levers.{lever}.boost = {boost}: expected 0 to {LARGEST_BOOST:g} nats")


def make_strength(kind: str, boost: float) -> Strength:
    """A strength by its name in STRENGTHS; "hedge" does not use `boost` (nats)."""
    assert kind in STRENGTHS
    return Hedge() if kind == "hedge" else Steady(boost, kind == "confidence")


class Steady:
    """The same boost for every hint, or a boost proportional to the confidence; learns nothing."""

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
        """Nothing to restore."""


class Hedge:
    """A Bayesian mixture over boosts, learnt per bucket of (confidence, probability of the hint).

    Half of the prior is on no boost; the rest falls with the size of the boost. If each commit has
    one target per bucket, the mixture costs at most ln(1 / prior) nats per bucket more than the
    best single boost: 0.7 nats if the expert is useless. The weights do not change within a commit,
    so that all its targets are priced at once. In a commit with many targets of a bucket, each of
    them may cost that much until the commit is settled.
    """

    GRID = np.array([-1.0, -0.5, -0.25, 0.0, 0.25, 0.5, 1.0, 1.5, 2.0, 2.5, 3.0, 4.0, 6.0])
    NUM_CONFIDENCES = 8
    # Log-odds of the hint in whole nats, from -8 to 8.
    NUM_ODDS = 17

    def __init__(self) -> None:
        self.open()

    def open(self) -> None:
        """Return to the prior."""
        fall = np.where(self.GRID == 0, 0.0, np.exp(-np.abs(self.GRID)))
        prior = np.where(self.GRID == 0, 0.5, 0.5 * fall / fall.sum())
        num_buckets = self.NUM_CONFIDENCES * self.NUM_ODDS
        self._log_weights = np.tile(np.log(prior), (num_buckets, 1))  # (buckets, G)

    def boost(self, confidence: Trust, log_p: Floats) -> Floats:
        """The boost (n,) in nats that has the effect of the mixture of all boosts."""
        log_weights = self._log_weights[self.buckets(confidence, log_p)]  # (n, G)
        # Relative to the largest weight, so that not all weights underflow.
        weights = np.exp(log_weights - log_weights.max(axis=1, keepdims=True))
        shares = weights / self._norms(log_p)
        return np.log(shares @ np.exp(self.GRID)) - np.log(shares.sum(axis=1))

    def settle(self, confidence: Trust, log_p: Floats, hit: npt.NDArray[np.bool_]) -> None:
        """Multiply the weight of every boost by its likelihood of these targets (n,)."""
        gains = hit[:, None] * self.GRID - np.log(self._norms(log_p))  # (n, G)
        buckets = self.buckets(confidence, log_p)
        for weights, gain in zip(self._log_weights.T, gains.T, strict=True):
            weights += np.bincount(buckets, gain, minlength=len(weights))

    def state(self) -> Arrays:
        """The weights."""
        return {"log_weights": self._log_weights.copy()}

    def load(self, state: Mapping[str, npt.NDArray[Any]]) -> None:
        """Restore the weights."""
        self._log_weights[:] = state["log_weights"]

    def _norms(self, log_p: Floats) -> Floats:
        return 1 + np.exp(np.minimum(log_p, 0.0))[:, None] * np.expm1(self.GRID)  # (n, G)

    def buckets(self, confidence: Trust, log_p: Floats) -> npt.NDArray[np.intp]:
        """The bucket (n,) of each hint."""
        # One bucket per halving of the doubt.
        doubt = np.maximum(1 - confidence.astype(np.float64), 2.0 ** (1 - self.NUM_CONFIDENCES))
        largest = self.NUM_ODDS // 2
        below_one = np.minimum(log_p, -1e-9)
        odds = np.rint(below_one - np.log(-np.expm1(below_one)))
        column = np.clip(odds, -largest, largest).astype(np.intp) + largest
        return np.floor(-np.log2(doubt)).astype(np.intp) * self.NUM_ODDS + column
