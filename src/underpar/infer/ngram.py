"""Experts that propose the next token from what their histories have shown so far.

`CountExpert` counts what follows each context (the causal token expert of PR 1514 and PR 2135);
`MatchExpert` follows the last passage that agrees with the end of the history (the match model of
PAQ, Mahoney 2005). Both share one memory over all histories, and a proposal is made before its
target is looked at. Without Numba they are slow and propose the same.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from underpar.infer.experts import Arrays, Ints, Proposals, Strength
from underpar.infer.scans import (
    BASES,
    PRIME,
    TOTAL,
    Counts,
    Gate,
    Places,
    Trail,
    compiled,
    scan_counts,
    scan_matches,
)

# Far longer than any context that tells more than the one before it.
LONGEST_CONTEXT = 64
# Rows of a table, in bits: 27 of counts take 2 GB, enough for 73 million contexts.
MIN_BITS, MAX_BITS = 12, 27
# Share of the rows that the targets of a stream may take, and that any may.
TYPICAL_LOAD, LARGEST_LOAD = 0.55, 0.75
# So many tokens that agree halve the doubt in a match.
_TOKENS_PER_BIT = 5


class Histories:
    """The ends of all histories, side by side."""

    def __init__(self, lengths: tuple[int, ...], num_histories: int) -> None:
        self._lengths = np.array(sorted(lengths, reverse=True), dtype=np.int64)
        powers = [[pow(b, int(length) - 1, PRIME) for b in BASES] for length in self._lengths]
        self._powers = np.array(powers, dtype=np.int64)
        ring_size = 1 << (int(self._lengths[0]) - 1).bit_length()
        self.arrays: Arrays = {
            "seen": np.zeros((num_histories, 1), dtype=np.int64),
            "hashes": np.zeros((num_histories, len(lengths), 2), dtype=np.int64),
            "ring": np.zeros((num_histories, ring_size), dtype=np.int64),
        }

    def trail(self, history: int) -> Trail:
        """A view of one history's end, which a scan moves on."""
        return Trail(self._lengths, self._powers, *(a[history] for a in self.arrays.values()))


def table_bits(num_entries: int) -> int:
    """Bits of a row number, so that so many entries leave the table loosely filled."""
    wanted = int(np.ceil(np.log2(max(num_entries, 1) / TYPICAL_LOAD)))
    return min(max(wanted, MIN_BITS), MAX_BITS)


def as_tokens(targets: npt.ArrayLike) -> Ints:
    """The targets as scans are compiled for them: a fresh array, whatever they came in."""
    return np.array(targets, dtype=np.int64)


class CountExpert:
    """The best token behind the longest of several contexts that passes a gate.

    `lengths` are those of the contexts. A full table goes on counting what it knows and takes
    nothing new.
    """

    def __init__(
        self, lengths: tuple[int, ...], gate: Gate, strength: Strength, plain: bool = False
    ) -> None:
        self.lengths = lengths
        self.gate = gate
        self.strength = strength
        self._plain = plain

    def open(self, num_histories: int, num_targets: int) -> None:
        """Forget everything; make room for so many targets over all histories."""
        self._scan = scan_counts if self._plain else compiled(scan_counts)
        bits = table_bits(num_targets * len(self.lengths))
        rows = np.zeros((1 << bits, 4), dtype=np.int32)
        room = int(LARGEST_LOAD * len(rows))
        self._counts = Counts(rows, np.zeros(1, dtype=np.int64), room)
        self._histories = Histories(self.lengths, num_histories)

    def propose(self, history: int, targets: Ints) -> Proposals:
        """What is expected at each of the next targets (n,) of a history, given those before."""
        hints = np.empty(len(targets), dtype=np.int64)
        confidence = np.empty(len(targets), dtype=np.float32)
        trail = self._histories.trail(history)
        self._scan(as_tokens(targets), self._counts, trail, self.gate, hints, confidence)
        return Proposals(hints, confidence)

    def state(self) -> Arrays:
        """All counts, as copies; a stream goes on from them after `load`."""
        taken = np.flatnonzero(self._counts.rows[:, TOTAL])
        state: Arrays = {"taken": taken, "rows": self._counts.rows[taken]}
        return state | {name: a.copy() for name, a in self._histories.arrays.items()}

    def load(self, state: Mapping[str, npt.NDArray[Any]]) -> None:
        """Put a state back, once opened with the sizes it was saved with."""
        self._counts.rows[:] = 0
        self._counts.rows[state["taken"]] = state["rows"]
        self._counts.used[0] = len(state["taken"])
        for name, array in self._histories.arrays.items():
            array[:] = state[name]


class MatchExpert:
    """The token behind the last passage that agrees; the longer it agrees, the surer.

    A passage is found by its last tokens, as many as the shortest of `lengths`, then followed.
    """

    def __init__(self, lengths: tuple[int, ...], strength: Strength, plain: bool = False) -> None:
        self.lengths = lengths
        self.strength = strength
        self._plain = plain

    def open(self, num_histories: int, num_targets: int) -> None:
        """Forget everything; make room for so many targets over all histories."""
        self._scan = scan_matches if self._plain else compiled(scan_matches)
        bits = table_bits(num_targets * len(self.lengths))
        rows = np.zeros((1 << bits, 2), dtype=np.int32)
        assert num_targets < 1 << 31, "places are 32 bits wide"
        tokens, after = (np.zeros(num_targets + 1, dtype=np.int32) for _ in range(2))
        self._places = Places(rows, tokens, after, np.zeros(1, dtype=np.int64))
        self._histories = Histories(self.lengths, num_histories)
        self._matches = np.zeros((num_histories, 3), dtype=np.int64)

    def propose(self, history: int, targets: Ints) -> Proposals:
        """What is expected at each of the next targets (n,) of a history, given those before."""
        room = len(self._places.tokens) - 1 - int(self._places.used[0])
        assert len(targets) <= room, f"{len(targets)} targets, opened for {room} more"
        hints, agreed = (np.empty(len(targets), dtype=np.int64) for _ in range(2))
        trail = self._histories.trail(history)
        self._scan(as_tokens(targets), self._places, trail, self._matches[history], hints, agreed)
        longest = np.minimum(agreed, max(self.lengths))
        confidence = 1 - np.exp2(-longest / _TOKENS_PER_BIT)
        return Proposals(hints, confidence.astype(np.float32))

    def state(self) -> Arrays:
        """All places, as copies; a stream goes on from them after `load`."""
        return {name: array.copy() for name, array in self._arrays().items()}

    def load(self, state: Mapping[str, npt.NDArray[Any]]) -> None:
        """Put a state back, once opened with the sizes it was saved with."""
        for name, array in self._arrays().items():
            array[:] = state[name]

    def _arrays(self) -> Arrays:
        places = self._places
        own: Arrays = {"rows": places.rows, "tokens": places.tokens, "after": places.after}
        own |= {"used": places.used, "matches": self._matches}
        return own | self._histories.arrays
