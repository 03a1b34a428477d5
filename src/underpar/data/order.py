"""The endless order in which training reads a shard: a pure function of seed and position."""

from abc import ABC, abstractmethod
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from underpar.data.batch import count_up
from underpar.data.shards import Shard
from underpar.errors import DataError, RecipeError
from underpar.seams import BOS_ID

Ints = npt.NDArray[np.int64]


class Span(NamedTuple):
    """N consecutive tokens of an order, and for each the next token of its text."""

    inputs: Ints  # (N,)
    targets: Ints  # (N,)
    is_start: npt.NDArray[np.bool_]  # (N,) a piece of the order begins here


class Order(ABC):
    """The pieces of a shard, shuffled: every piece once per epoch, without end."""

    def __init__(self, shard: Shard, seed: int, epoch_tokens: int) -> None:
        self.epoch_tokens = epoch_tokens
        self._tokens = shard.tokens
        self._seed = seed
        self._pieces = lru_cache(maxsize=1)(self._shuffle)

    def span(self, begin: int, end: int) -> Span:
        """Tokens [begin, end) of the endless stream."""
        assert 0 <= begin < end
        parts = []
        while begin < end:
            epoch, offset = divmod(begin, self.epoch_tokens)
            stop = min(offset + end - begin, self.epoch_tokens)
            parts.append(self._places(epoch, offset, stop))
            begin += stop - offset
        places, is_first = map(np.concatenate, zip(*parts, strict=True))
        last = len(self._tokens) - 1
        inputs = self._tokens[places].astype(np.int64)
        targets = self._tokens[np.minimum(places + 1, last)].astype(np.int64)
        # BOS ends every document, also the last document of the shard.
        targets[places == last] = BOS_ID
        return Span(inputs, targets, is_first)

    def _places(self, epoch: int, begin: int, end: int) -> tuple[Ints, npt.NDArray[np.bool_]]:
        """Positions in the shard of tokens [begin, end) of an epoch; a mask of piece starts."""
        firsts, bounds = self._pieces(epoch)
        low, high = np.searchsorted(bounds, [begin, end - 1], side="right")
        firsts, bounds = firsts[low - 1 : high], bounds[low - 1 : high + 1]
        num_tokens: Ints = np.diff(bounds.clip(begin, end))
        places = np.arange(begin, end) + np.repeat(firsts - bounds[:-1], num_tokens)
        return places, places == np.repeat(firsts, num_tokens)

    def _random(self, epoch: int, count: int) -> npt.NDArray[np.uint64]:
        # Raw PCG64 output is fixed across numpy versions; Generator.permutation is not.
        return np.random.PCG64([self._seed, epoch]).random_raw(count)

    @abstractmethod
    def _shuffle(self, epoch: int) -> tuple[Ints, Ints]:
        """Each piece's first token in the shard (P,), and its bounds in the epoch (P + 1,)."""


class DocumentOrder(Order):
    """Documents, shuffled; those of more than `piece_tokens` (0: none) are cut into pieces.

    A table or a novel would else be read from its first to its last word, and the model would
    forget the other documents meanwhile. Where no document is longer, the order is that of whole
    documents. A lever that reads the previous token sees, at a cut, that of another piece.
    """

    def __init__(self, shard: Shard, seed: int, piece_tokens: int = 0) -> None:
        super().__init__(shard, seed, shard.num_tokens)
        lengths = np.diff(shard.starts, append=shard.num_tokens)
        size = piece_tokens or shard.num_tokens
        num_pieces = -(-lengths // size)
        self._starts = np.repeat(shard.starts, num_pieces) + size * count_up(num_pieces)
        self._lengths = np.diff(self._starts, append=shard.num_tokens)

    def _shuffle(self, epoch: int) -> tuple[Ints, Ints]:
        order = np.argsort(self._random(epoch, len(self._starts)), kind="stable")
        return self._starts[order], _bounds(self._lengths[order])


class SequenceOrder(Order):
    """Shuffled sequences (PR 1394, PR 1493): windows of the shard that ignore document boundaries.

    Each window has `window_tokens` inputs; its last target is the token after it. The windows of an
    epoch are adjacent and start at a random phase below their length. Their number is equal in
    every epoch, so an epoch leaves out less than two windows at the ends of the shard. Attention
    crosses documents inside a window (PR 1894, PR 1219) but not the start of a window. A lever that
    reads the previous token sees, at the start of a window, the last token of the window before.
    """

    def __init__(self, shard: Shard, seed: int, window_tokens: int) -> None:
        if shard.num_tokens <= window_tokens:
            raise DataError(
                f"the training shard has {shard.num_tokens} tokens, sequences of {window_tokens} "
                "need at least one more; use a shorter context or train.order = 'documents'"
            )
        # The largest number that fits at every phase; one window if the shard is very short.
        self._num_windows = max(1, shard.num_tokens // window_tokens - 1)
        self._window_tokens = window_tokens
        super().__init__(shard, seed, self._num_windows * window_tokens)
        self._num_phases = min(window_tokens, shard.num_tokens - self.epoch_tokens)

    def _shuffle(self, epoch: int) -> tuple[Ints, Ints]:
        random = self._random(epoch, 1 + self._num_windows)
        phase = int(random[0]) % self._num_phases
        order = np.argsort(random[1:], kind="stable")
        lengths = np.full(self._num_windows, self._window_tokens)
        return phase + order * self._window_tokens, _bounds(lengths)


def _bounds(lengths: npt.NDArray[Any]) -> Ints:
    return np.append(0, np.cumsum(lengths))


def make_order(
    name: str, shard: Shard, seed: int, window_tokens: int, piece_tokens: int = 0
) -> Order:
    """The order of that name: sequences of `window_tokens`, or documents cut at `piece_tokens`."""
    if not shard.num_tokens:
        raise DataError(
            "the training shard is empty; run 'underpar data build TEXT --out DATA' on more text"
        )
    if seed < 0:
        raise RecipeError(f"seed is {seed}, expected 0 or more")
    if name == "documents":
        return DocumentOrder(shard, seed, piece_tokens)
    if name == "sequences":
        return SequenceOrder(shard, seed, window_tokens)
    raise RecipeError(f"order is {name!r}, expected 'documents' or 'sequences'")
