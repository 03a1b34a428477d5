"""Words to tokens through a table: every distinct word is encoded once, then looked up.

Splitting at spaces changes no id if no piece has a space after its first character, which is the
default of SentencePiece training. Words repeat in text, so most words are looked up: transform,
encoder and byte ledger run on new words only.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from underpar.seams import BOS_ID

# A larger table would not fit the CPU caches. The bound also limits memory for endless streams.
MAX_WORDS = 1 << 18
MAX_TOKENS = 1 << 22

_FIRST_CAPACITY = 1 << 12

# A word of a document; None is the BOS of the document.
Word = str | None


@dataclass(frozen=True, eq=False)
class Pieces:
    """Tokens of several texts, concatenated."""

    tokens: npt.NDArray[np.int32]  # (N,)
    source_bytes: npt.NDArray[np.int32]  # (N,) source bytes of each token
    counts: npt.NDArray[np.int64]  # (T,) tokens of each text
    changed: npt.NDArray[np.bool_]  # (T,) whether the tokens decode to another text


class _Numbers(dict[Word, int]):
    """Word -> row of the table; an unknown word gets the next row and is added to `new`."""

    def __init__(self) -> None:
        super().__init__({None: 0})
        self.new: list[str] = []

    def __missing__(self, word: str) -> int:
        number = self[word] = len(self)
        self.new.append(word)
        return number


class _Column:
    """An array that grows at its end: the capacity doubles, so that copies are rare."""

    def __init__(self, dtype: npt.DTypeLike, capacity: int = _FIRST_CAPACITY) -> None:
        self._room = np.empty(capacity, dtype)
        self._size = 0

    @property
    def values(self) -> npt.NDArray[Any]:
        """The stored values."""
        return self._room[: self._size]

    def extend(self, values: npt.NDArray[Any]) -> None:
        """Append values."""
        end = self._size + len(values)
        if end > len(self._room):
            grown = np.empty(max(end, 2 * len(self._room)), self._room.dtype)
            grown[: self._size] = self.values
            self._room = grown
        self._room[self._size : end] = values
        self._size = end

    def emptied(self) -> "_Column":
        """An empty column: the same memory, or new memory if one long text made it very large."""
        if len(self._room) > 2 * MAX_TOKENS:
            return _Column(self._room.dtype)
        self._size = 0
        return self


class WordTable:
    """A bounded table of words and their tokens."""

    def __init__(self, encode_words: Callable[[list[str]], Pieces]) -> None:
        self._encode_words = encode_words
        self._tokens, self._source_bytes = _Column(np.int32), _Column(np.int32)
        self._counts, self._offsets = _Column(np.int64), _Column(np.int64)
        self._changed = _Column(np.bool_)
        self._clear()

    def encode(self, documents: Sequence[list[str]]) -> Pieces:
        """Tokens of documents, given as words; BOS is the first token of each document."""
        words: list[Word] = []
        num_words = []
        for document in documents:
            words.append(None)
            words += document
            num_words.append(len(document) + 1)
        rows = np.fromiter(map(self._numbers.__getitem__, words), np.int64, len(words))
        if self._numbers.new:
            self._learn()
        counts = self._counts.values[rows]
        ends = np.cumsum(counts)
        # Token i of the output is token i - (start of its word) of that word's row.
        source = np.repeat(self._offsets.values[rows] - (ends - counts), counts)
        source += np.arange(len(source))
        firsts = np.cumsum([0, *num_words])[:-1]
        pieces = Pieces(
            tokens=self._tokens.values[source],
            source_bytes=self._source_bytes.values[source],
            counts=np.add.reduceat(counts, firsts),
            changed=np.logical_or.reduceat(self._changed.values[rows], firsts),
        )
        if len(self._numbers) > MAX_WORDS or len(self._tokens.values) > MAX_TOKENS:
            self._clear()
        return pieces

    def _clear(self) -> None:
        self._numbers = _Numbers()
        self._tokens, self._source_bytes = self._tokens.emptied(), self._source_bytes.emptied()
        self._counts, self._offsets = self._counts.emptied(), self._offsets.emptied()
        self._changed = self._changed.emptied()
        bos = np.array([BOS_ID], dtype=np.int32)
        self._append(Pieces(bos, np.zeros(1, np.int32), np.ones(1, np.int64), np.zeros(1, bool)))

    def _learn(self) -> None:
        new, self._numbers.new = self._numbers.new, []
        try:
            self._append(self._encode_words(new))
        except BaseException:
            # These words have a number but no row. Clear, or they would count as known.
            self._clear()
            raise
        assert len(self._counts.values) == len(self._numbers)

    def _append(self, pieces: Pieces) -> None:
        offsets = np.cumsum(pieces.counts) - pieces.counts
        self._offsets.extend(offsets + len(self._tokens.values))
        self._tokens.extend(pieces.tokens)
        self._source_bytes.extend(pieces.source_bytes)
        self._counts.extend(pieces.counts)
        self._changed.extend(pieces.changed)
