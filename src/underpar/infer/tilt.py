"""Tilt a distribution towards proposed tokens, exactly normalized.

p'(a) = p(a) exp(boost [a = hint]) / Z with Z = 1 + p(hint) (exp(boost) - 1). If hint and boost do
not depend on the target, p' sums to one, and a price needs only the probabilities of the target and
of the hint (the token tilt of PR 1420, PR 1514 and PR 2135). A strength turns an expert's
confidence into the boost. Several experts tilt one after the other.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from underpar.infer.experts import Arrays, Expert, Floats, Ints, Proposals, Trust


def tilted(
    log_p: Floats,
    tokens: Ints,
    hints: Ints,
    log_p_hint: Floats,
    boost: Floats,
) -> Floats:
    """Log-probabilities (n, m) of tokens (n, m) after a tilt; `log_p` are those before it.

    `hints`, `log_p_hint` and `boost` are (n,): one hint per row.
    """
    log_z = np.log1p(np.exp(np.minimum(log_p_hint, 0.0)) * np.expm1(boost))
    return log_p + boost[:, None] * (tokens == hints[:, None]) - log_z[:, None]


class Seen(NamedTuple):
    """What one strength learns from in a commit; rows without a hint are left out."""

    confidence: Trust
    log_p: Floats
    hit: npt.NDArray[np.bool_]


def join(parts: Sequence[Proposals]) -> Proposals:
    """Proposals of several histories, concatenated."""
    hints = np.concatenate([p.hints for p in parts])
    return Proposals(hints, np.concatenate([p.confidence for p in parts]))


def _side_by_side(parts: Sequence[Proposals], num_targets: int) -> Proposals:
    """Proposals of K experts for the same targets, as (n, K)."""
    shape = (len(parts), num_targets)
    hints = np.array([p.hints for p in parts], dtype=np.int64).reshape(shape)
    confidence = np.array([p.confidence for p in parts], dtype=np.float32).reshape(shape)
    return Proposals(hints.T, confidence.T)


class Mixture:
    """Experts that tilt one after the other: propose, price, and after the commit settle."""

    def __init__(self, experts: Sequence[Expert]) -> None:
        self.experts = list(experts)
        self._seen: list[Seen] | None = None

    def open(self, num_histories: int, num_targets: int) -> None:
        """Begin a stream with this many targets over all histories."""
        for expert in self.experts:
            expert.open(num_histories, num_targets)
            expert.strength.open()
        self._seen = None

    def propose(self, history: int | Ints, targets: Ints) -> Proposals:
        """Hints and confidence (n, K) for the next targets (n,) of a history, then learn them.

        Targets of several histories stand in the order in which they become known.
        """
        return _side_by_side([e.propose(history, targets) for e in self.experts], len(targets))

    def guess(self, history: int) -> Proposals:
        """Hints and confidence (1, K) for the next target of a history, which nobody knows yet."""
        return _side_by_side([expert.guess(history) for expert in self.experts], 1)

    def price(self, proposals: Proposals, targets: Ints, log_p: npt.ArrayLike) -> Floats:
        """Log-probabilities (n,) of targets (n,) from the model's, (n, 1 + K) of target and hints.

        Call `settle` after each `price`, once the targets are committed.
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
        """Let every strength learn from the targets priced last, after their commit."""
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
        """Everything that a resumed stream needs, as copies, between two commits."""
        assert self._seen is None, "the targets priced last have not been settled"
        state: Arrays = {}
        for k, expert in enumerate(self.experts):
            state |= {f"{k}/expert/{name}": array for name, array in expert.state().items()}
            strength = expert.strength.state()
            state |= {f"{k}/strength/{name}": array for name, array in strength.items()}
        return state

    def load(self, state: Mapping[str, npt.NDArray[Any]]) -> None:
        """Restore a state, after `open` with the same sizes."""
        for k, expert in enumerate(self.experts):
            for part, owner in (("expert", expert), ("strength", expert.strength)):
                start = f"{k}/{part}/"
                owner.load({n[len(start) :]: a for n, a in state.items() if n.startswith(start)})
