"""Experts that guess the next token from the tokens of their histories.

`CountExpert` counts which tokens follow each context (the causal token expert of PR 1514 and PR
2135). `WordExpert` counts how words go on and how they start (PR 1219). `MatchExpert` follows the
last passage that agrees with the end of the history (the match model of PAQ, Mahoney 2005). Each
has one memory for all histories, and guesses before it reads the target. Without Numba the guesses
are the same, but slow.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from underpar.errors import RuleError
from underpar.infer.experts import Arrays, Ints, Proposals, Strength
from underpar.infer.scans import (
    BASES,
    CONTINUES,
    OUTSIDE,
    PRIME,
    STARTS,
    TOTAL,
    Counts,
    Gate,
    Gates,
    Links,
    Trail,
    WordTrail,
    compiled,
    scan_counts,
    scan_matches,
    scan_word,
    scan_word_starts,
)

# Longer contexts do not improve a guess.
LONGEST_CONTEXT = 64
# The number of rows of a table, as a power of two: 2^27 rows of counts take 2 GB, enough for 73
# million contexts.
MIN_BITS, MAX_BITS = 12, 27
# The share of rows that a stream is expected to fill, and the share that may be filled.
TYPICAL_LOAD, LARGEST_LOAD = 0.55, 0.75
# This many tokens that agree halve the doubt in a match.
_TOKENS_PER_BIT = 5


class Histories:
    """The last tokens of all histories, as hashes."""

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

    @property
    def trails(self) -> Trail:
        """The ends of all histories; a scan updates them."""
        return Trail(self._lengths, self._powers, *self.arrays.values())


class Scan(ABC):
    """An expert that is a scan: what `propose` and `guess` have in common."""

    def propose(self, history: int | Ints, targets: Ints) -> Proposals:
        """A guess for each of the next targets (n,) of histories, from the targets before it."""
        tokens = np.array(targets, dtype=np.int64)
        histories = np.array(np.broadcast_to(history, tokens.shape), dtype=np.int64)
        return self._scanned(tokens, histories)

    def guess(self, history: int) -> Proposals:
        """The guess (1,) for the next target of a history; nothing is learned."""
        return self._scanned(np.empty(0, dtype=np.int64), np.array([history], dtype=np.int64))

    @abstractmethod
    def _scanned(self, tokens: Ints, histories: Ints) -> Proposals:
        """A guess for each of `histories` (n,), then for `tokens` (n,) or one fewer: learn them."""


def table_bits(num_entries: int) -> int:
    """The number of rows for this many entries, as a power of two."""
    wanted = int(np.ceil(np.log2(max(num_entries, 1) / TYPICAL_LOAD)))
    return min(max(wanted, MIN_BITS), MAX_BITS)


def open_counts(num_entries: int) -> Counts:
    """An empty table for this many entries; a full one takes no new contexts."""
    rows = np.zeros((1 << table_bits(num_entries), 4), dtype=np.int32)
    return Counts(rows, np.zeros(1, dtype=np.int64), int(LARGEST_LOAD * len(rows)))


def counts_state(counts: Counts) -> Arrays:
    """The rows of a table that are taken, as copies."""
    taken = np.flatnonzero(counts.rows[:, TOTAL])
    return {"taken": taken, "rows": counts.rows[taken]}


def load_counts(counts: Counts, state: Mapping[str, npt.NDArray[Any]]) -> None:
    """Put the rows of a table back."""
    counts.rows[:] = 0
    counts.rows[state["taken"]] = state["rows"]
    counts.used[0] = len(state["taken"])


def gates_of(gates: Sequence[Gate]) -> Gates:
    """Gates as arrays, for a scan."""
    min_counts, min_confidences, priors = zip(*gates, strict=True)
    return Gates(
        np.array(min_counts, dtype=np.int64),
        np.array(min_confidences, dtype=np.float64),
        np.array(priors, dtype=np.float64),
    )


class CountExpert(Scan):
    """Guesses the most frequent token after the longest context that passes its gate.

    `lengths` are the lengths of the contexts. They share one gate, or `gate` maps each length to
    its own. A full table counts known contexts and takes no new ones.
    """

    def __init__(
        self,
        lengths: tuple[int, ...],
        gate: Gate | Mapping[int, Gate],
        strength: Strength,
        plain: bool = False,
    ) -> None:
        self.lengths = lengths
        self.gate = gate
        self.strength = strength
        self._plain = plain

    def open(self, num_histories: int, num_targets: int) -> None:
        """Forget everything; make room for so many targets over all histories."""
        self._scan = scan_counts if self._plain else compiled(scan_counts)
        gate, longest_first = self.gate, sorted(self.lengths, reverse=True)
        self._gates = gates_of([gate if isinstance(gate, Gate) else gate[n] for n in longest_first])
        self._counts = open_counts(num_targets * len(self.lengths))
        self._histories = Histories(self.lengths, num_histories)

    def _scanned(self, tokens: Ints, histories: Ints) -> Proposals:
        hints = np.empty(len(histories), dtype=np.int64)
        confidence = np.empty(len(histories), dtype=np.float32)
        trails = self._histories.trails
        self._scan(tokens, histories, self._counts, trails, self._gates, hints, confidence)
        return Proposals(hints, confidence)

    def state(self) -> Arrays:
        """All counts, as copies."""
        histories = {name: array.copy() for name, array in self._histories.arrays.items()}
        return counts_state(self._counts) | histories

    def load(self, state: Mapping[str, npt.NDArray[Any]]) -> None:
        """Restore a state, after `open` with the same sizes."""
        load_counts(self._counts, state)
        for name, array in self._histories.arrays.items():
            array[:] = state[name]


def kinds_of(pieces: Sequence[bytes]) -> npt.NDArray[np.int8]:
    """What each token does to words, from the bytes that it stands for.

    A token that begins with white space starts a word; a token without bytes is outside of words.
    """
    kinds = [STARTS if piece[:1].isspace() else CONTINUES for piece in pieces]
    kinds = [kind if piece else OUTSIDE for kind, piece in zip(kinds, pieces, strict=True)]
    return np.array(kinds, dtype=np.int8)


class WordExpert(Scan):
    """Guesses how the open word goes on, or, with `num_words`, how the word after so many starts.

    Nothing tells the expert which of the two the next token does: it guesses wherever it has a
    context, as PR 1219 repaired the experts of PR 1105. `read_pieces` comes before `propose`.
    """

    def __init__(self, num_words: int, gate: Gate, strength: Strength, plain: bool = False) -> None:
        self.num_words = num_words
        self.gate = gate
        self.strength = strength
        self._plain = plain
        self._kinds: npt.NDArray[np.int8] | None = None

    def read_pieces(self, pieces: Sequence[bytes]) -> None:
        """Take the bytes of each token, which say where words start."""
        self._kinds = kinds_of(pieces)

    def open(self, num_histories: int, num_targets: int) -> None:
        """Forget everything; make room for so many targets over all histories."""
        scan = scan_word_starts if self.num_words else scan_word
        self._scan = scan if self._plain else compiled(scan)
        self._gates = gates_of([self.gate])
        self._counts = open_counts(num_targets)
        self._words: Arrays = {
            "word": np.zeros((num_histories, 3), dtype=np.int64),
            "closed": np.zeros((num_histories, max(self.num_words, 1), 2), dtype=np.int64),
            "num_closed": np.zeros((num_histories, 1), dtype=np.int64),
        }

    def _scanned(self, tokens: Ints, histories: Ints) -> Proposals:
        if self._kinds is None:
            raise RuleError("experts of words need a tokenizer, to know where words start")
        assert tokens.max(initial=0) < len(self._kinds), "a token that the tokenizer does not have"
        hints = np.empty(len(histories), dtype=np.int64)
        confidence = np.empty(len(histories), dtype=np.float32)
        words, counts = WordTrail(*self._words.values()), self._counts
        self._scan(tokens, histories, self._kinds, counts, words, self._gates, hints, confidence)
        return Proposals(hints, confidence)

    def state(self) -> Arrays:
        """All counts, as copies."""
        words = {name: array.copy() for name, array in self._words.items()}
        return counts_state(self._counts) | words

    def load(self, state: Mapping[str, npt.NDArray[Any]]) -> None:
        """Restore a state, after `open` with the same sizes."""
        load_counts(self._counts, state)
        for name, array in self._words.items():
            array[:] = state[name]


class MatchExpert(Scan):
    """Guesses the token after the last passage that agrees; a longer match gives more confidence.

    A passage is found by the hash of its last tokens, for each of `lengths`, and then followed.
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
        assert num_targets < 1 << 31, "positions are 32 bits wide"
        tokens, after = (np.zeros(num_targets + 1, dtype=np.int32) for _ in range(2))
        self._links = Links(rows, tokens, after, np.zeros(1, dtype=np.int64))
        self._histories = Histories(self.lengths, num_histories)
        self._matches = np.zeros((num_histories, 3), dtype=np.int64)

    def _scanned(self, tokens: Ints, histories: Ints) -> Proposals:
        room = len(self._links.tokens) - 1 - int(self._links.used[0])
        assert len(tokens) <= room, f"{len(tokens)} targets, opened for {room} more"
        hints, agreed = (np.empty(len(histories), dtype=np.int64) for _ in range(2))
        trails = self._histories.trails
        self._scan(tokens, histories, self._links, trails, self._matches, hints, agreed)
        longest = np.minimum(agreed, max(self.lengths))
        confidence = 1 - np.exp2(-longest / _TOKENS_PER_BIT)
        return Proposals(hints, confidence.astype(np.float32))

    def state(self) -> Arrays:
        """All tokens and their links, as copies."""
        return {name: array.copy() for name, array in self._arrays().items()}

    def load(self, state: Mapping[str, npt.NDArray[Any]]) -> None:
        """Restore a state, after `open` with the same sizes."""
        for name, array in self._arrays().items():
            array[:] = state[name]

    def _arrays(self) -> Arrays:
        links = self._links
        arrays: Arrays = {"rows": links.rows, "tokens": links.tokens, "after": links.after}
        arrays |= {"used": links.used, "matches": self._matches}
        return arrays | self._histories.arrays
