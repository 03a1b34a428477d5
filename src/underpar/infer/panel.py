"""Experts that make one proposal together: the strongest, and stronger where experts agree.

Source: PR 1105, with the repair of PR 1219. Where two experts name the same token, a bonus is added
to the boost of each; then the largest boost counts, of the earlier expert if two are equal.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from underpar.infer.experts import Arrays, Expert, Ints, Proposals
from underpar.infer.ngram import WordExpert
from underpar.infer.strengths import Steady


class Panel:
    """One proposal out of those of `members`, whose strengths are steady ones.

    The confidence of a proposal is its boost as a share of the largest one: `largest`, which no
    member exceeds, and the bonus.
    """

    def __init__(self, members: Sequence[Expert], largest: float, bonus: float) -> None:
        self.members = list(members)
        self._bonus = bonus
        self._largest = largest + bonus
        self.strength = Steady(self._largest, by_confidence=True)

    @property
    def needs_pieces(self) -> bool:
        """True if a member has to know where words start."""
        return any(isinstance(member, WordExpert) for member in self.members)

    def read_pieces(self, pieces: Sequence[bytes]) -> None:
        """Pass the bytes of each token on to the members that need them."""
        for member in self.members:
            if isinstance(member, WordExpert):
                member.read_pieces(pieces)

    def open(self, num_histories: int, num_targets: int) -> None:
        """Forget everything; make room for so many targets over all histories."""
        for member in self.members:
            member.open(num_histories, num_targets)

    def propose(self, history: int | Ints, targets: Ints) -> Proposals:
        """The strongest guess for each of the next targets (n,) of a history."""
        return self._strongest([member.propose(history, targets) for member in self.members])

    def guess(self, history: int) -> Proposals:
        """The strongest guess (1,) for the next target of a history."""
        return self._strongest([member.guess(history) for member in self.members])

    def _strongest(self, said: Sequence[Proposals]) -> Proposals:
        hints = np.stack([proposals.hints for proposals in said])  # (K, n)
        nothing = np.zeros(hints.shape[1])
        boosts = np.stack(
            [
                m.strength.boost(p.confidence, nothing)
                for m, p in zip(self.members, said, strict=True)
            ]
        )
        for own, boost in zip(hints, boosts, strict=True):
            # An expert always agrees with itself.
            boost += self._bonus * ((hints == own).sum(axis=0) > 1)
        boosts[hints < 0] = -1.0
        best = boosts.argmax(axis=0)[None]  # (1, n)
        strongest = np.take_along_axis(boosts, best, axis=0)[0]
        share = np.maximum(strongest, 0.0) / (self._largest or 1.0)
        return Proposals(np.take_along_axis(hints, best, axis=0)[0], share.astype(np.float32))

    def state(self) -> Arrays:
        """The states of all members, by name."""
        return {
            f"{k}/{name}": array
            for k, member in enumerate(self.members)
            for name, array in member.state().items()
        }

    def load(self, state: Mapping[str, npt.NDArray[Any]]) -> None:
        """Restore a state, after `open` with the same sizes."""
        for k, member in enumerate(self.members):
            begin = f"{k}/"
            member.load({n.removeprefix(begin): a for n, a in state.items() if n.startswith(begin)})
