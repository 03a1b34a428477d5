"""Tilting a distribution towards proposed tokens, exactly normalized.

p'(a) = p(a) exp(boost [a = hint]) / Z with Z = 1 + p(hint) (exp(boost) - 1): for any hint and boost
that do not depend on the target, p' sums to one, and only the probabilities of the target and of
the hint are needed (the token tilt of PR 1420, PR 1514 and PR 2135). A strength turns an expert's
confidence into the boost; several experts tilt one after the other.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from underpar.infer.experts import Arrays, Expert, Floats, Ints, Proposals, Strength, Trust
from underpar.parts import require

STRENGTHS = ("fixed", "confidence", "hedge")
# e to the 16th is nine million: no hint deserves more.
LARGEST_BOOST = 16.0


def tilted(
    log_p: Floats,
    tokens: Ints,
    hints: Ints,
    log_p_hint: Floats,
    boost: Floats,
) -> Floats:
    """Log-probabilities (n, m) of tokens (n, m), given those before the tilt.

    `hints`, `log_p_hint` and `boost` are (n,): one hint a row.
    """
    log_z = np.log1p(np.exp(np.minimum(log_p_hint, 0.0)) * np.expm1(boost))
    return log_p + boost[:, None] * (tokens == hints[:, None]) - log_z[:, None]


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


class Seen(NamedTuple):
    """What one strength is told of a commit, for hints alone."""

    confidence: Trust
    log_p: Floats
    hit: npt.NDArray[np.bool_]


def join(parts: Sequence[Proposals]) -> Proposals:
    """Proposals for the targets of several histories, one after the other."""
    hints = np.concatenate([p.hints for p in parts])
    return Proposals(hints, np.concatenate([p.confidence for p in parts]))


class Mixture:
    """Experts that tilt in turn: propose, price, and only after the commit settle."""

    def __init__(self, experts: Sequence[Expert]) -> None:
        self.experts = list(experts)
        self._seen: list[Seen] | None = None

    def open(self, num_histories: int, num_targets: int) -> None:
        """Begin a stream of so many targets over all histories."""
        for expert in self.experts:
            expert.open(num_histories, num_targets)
            expert.strength.open()
        self._seen = None

    def propose(self, history: int, targets: Ints) -> Proposals:
        """Hints and confidence (n, K) for the next targets (n,) of a history, which are learnt."""
        parts = [expert.propose(history, targets) for expert in self.experts]
        shape = (len(parts), len(targets))
        hints = np.array([p.hints for p in parts], dtype=np.int64).reshape(shape)
        confidence = np.array([p.confidence for p in parts], dtype=np.float32).reshape(shape)
        return Proposals(hints.T, confidence.T)

    def price(self, proposals: Proposals, targets: Ints, log_p: npt.ArrayLike) -> Floats:
        """Log-probabilities (n,) of targets (n,), given the model's (n, 1 + K) of target and hints.

        One price a commit: `settle` comes before the next.
        """
        assert self._seen is None, "the targets priced last have not been settled"
        tokens = np.concatenate([targets[:, None], proposals.hints], axis=1)  # (n, 1 + K)
        columns = np.array(log_p, dtype=np.float64)
        self._seen = []
        for k, expert in enumerate(self.experts):
            rows = np.flatnonzero(proposals.hints[:, k] >= 0)
            hints, confidence = proposals.hints[rows, k], proposals.confidence[rows, k]
            log_p_hint = columns[rows, 1 + k]
            boost = expert.strength.boost(confidence, log_p_hint)
            columns[rows] = tilted(columns[rows], tokens[rows], hints, log_p_hint, boost)
            self._seen.append(Seen(confidence, log_p_hint, targets[rows] == hints))
        return columns[:, 0]

    def settle(self) -> None:
        """Let every strength learn from the targets priced last, which are committed now."""
        assert self._seen is not None, "nothing has been priced"
        for expert, seen in zip(self.experts, self._seen, strict=True):
            expert.strength.settle(*seen)
        self._seen = None

    def distribution(self, proposals: Proposals, log_p: npt.ArrayLike) -> Floats:
        """Log-probabilities (V,) of every token at the one target of `proposals` (1, K)."""
        columns = np.array(log_p, dtype=np.float64)[None]  # (1, V)
        tokens = np.arange(columns.shape[1])[None]
        for k, expert in enumerate(self.experts):
            hints = proposals.hints[:, k]
            if hints[0] >= 0:
                log_p_hint = columns[:, hints[0]]
                boost = expert.strength.boost(proposals.confidence[:, k], log_p_hint)
                columns = tilted(columns, tokens, hints, log_p_hint, boost)
        return columns[0]

    def state(self) -> Arrays:
        """All that a resumed stream needs, as copies, between two commits."""
        assert self._seen is None, "the targets priced last have not been settled"
        kept: Arrays = {}
        for k, expert in enumerate(self.experts):
            kept |= {f"{k}/expert/{name}": array for name, array in expert.state().items()}
            strength = expert.strength.state()
            kept |= {f"{k}/strength/{name}": array for name, array in strength.items()}
        return kept

    def load(self, state: Mapping[str, npt.NDArray[Any]]) -> None:
        """Go on from a state, once opened as it was."""
        for k, expert in enumerate(self.experts):
            for part, owner in (("expert", expert), ("strength", expert.strength)):
                start = f"{k}/{part}/"
                owner.load({n[len(start) :]: a for n, a in state.items() if n.startswith(start)})
