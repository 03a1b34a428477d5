"""Words to tokens through a table: every distinct word is encoded once, then only looked up.

Splitting at spaces changes no id where no piece holds a space after its first character, which is
how SentencePiece trains unless told otherwise. English repeats itself, so a lookup replaces most
of the work: transform, encoder and byte ledger run on new words alone.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from underpar.seams import BOS_ID

# More would not fit the processor's caches; memory stays bounded however long the stream is.
MAX_WORDS = 1 << 18
MAX_TOKENS = 1 << 22

# A word of a document: None is its BOS.
Word = str | None


@dataclass(frozen=True, eq=False)
class Pieces:
    """Tokens of several texts, one after another."""

    tokens: npt.NDArray[np.int32]  # (N,)
    weights: npt.NDArray[np.int32]  # (N,) source bytes of each token
    counts: npt.NDArray[np.int64]  # (T,) tokens of each text
    changed: npt.NDArray[np.bool_]  # (T,) whether the tokens decode to another text


class _Numbers(dict[Word, int]):
    """Word -> its row; an unknown word gets the next one and is noted."""

    def __init__(self) -> None:
        super().__init__({None: 0})
        self.new: list[str] = []

    def __missing__(self, word: str) -> int:
        number = self[word] = len(self)
        self.new.append(word)
        return number


class WordTable:
    """A bounded table of words and their tokens."""

    def __init__(self, encode_words: Callable[[list[str]], Pieces]) -> None:
        self._encode_words = encode_words
        self._clear()

    def encode(self, documents: Sequence[list[str]]) -> Pieces:
        """Tokens of documents given as words, a BOS in front of each."""
        words: list[Word] = []
        num_words = []
        for document in documents:
            words.append(None)
            words += document
            num_words.append(len(document) + 1)
        rows = np.fromiter(map(self._numbers.__getitem__, words), np.int64, len(words))
        if self._numbers.new:
            self._learn()
        counts = self._known.counts[rows]
        ends = np.cumsum(counts)
        # Token i of the output is token i - (start of its word) of that word's row.
        source = np.repeat(self._offsets[rows] - (ends - counts), counts)
        source += np.arange(len(source))
        firsts = np.cumsum([0, *num_words])[:-1]
        pieces = Pieces(
            tokens=self._known.tokens[source],
            weights=self._known.weights[source],
            counts=np.add.reduceat(counts, firsts),
            changed=np.logical_or.reduceat(self._known.changed[rows], firsts),
        )
        if len(self._numbers) > MAX_WORDS or len(self._known.tokens) > MAX_TOKENS:
            self._clear()
        return pieces

    def _clear(self) -> None:
        self._numbers = _Numbers()
        bos = np.array([BOS_ID], dtype=np.int32)
        self._set(Pieces(bos, np.zeros(1, np.int32), np.ones(1, np.int64), np.zeros(1, bool)))

    def _learn(self) -> None:
        new, self._numbers.new = self._numbers.new, []
        try:
            self._set(join([self._known, self._encode_words(new)]))
        except BaseException:
            # Words without a row must not be taken for known ones.
            self._clear()
            raise
        assert len(self._known.counts) == len(self._numbers)

    def _set(self, known: Pieces) -> None:
        self._known = known
        self._offsets = np.cumsum(known.counts) - known.counts


def join(parts: Sequence[Pieces]) -> Pieces:
    """The texts of several parts, in order."""
    return Pieces(
        np.concatenate([p.tokens for p in parts]),
        np.concatenate([p.weights for p in parts]),
        np.concatenate([p.counts for p in parts]),
        np.concatenate([p.changed for p in parts]),
    )
