"""Writes streams for rans_decoder.py, whose docstring has their layout and the invariants."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from underpar.artifact.frequencies import PROB_BITS, TOTAL
from underpar.artifact.rans_decoder import INITIAL_STATE, WORD_BITS, Block

# A state of at least freq << this shift would leave 32 bits if the symbol were coded into it.
_FULL_SHIFT = 32 - PROB_BITS


class Encoder:
    """Encodes blocks, the last block first, into streams with `num_coders` coders each.

    `freqs` and `starts` hold the frequency and the start of the interval of every symbol of every
    table; a block's values are places in them.
    """

    def __init__(self, num_coders: Sequence[int], freqs: np.ndarray, starts: np.ndarray) -> None:
        assert len(num_coders) < 1 << 16
        self._num_coders, self._freqs, self._starts = num_coders, freqs, starts
        self._states = np.full(sum(num_coders), INITIAL_STATE, dtype=np.uint32)
        self._owner_of = np.repeat(np.arange(len(num_coders), dtype=np.uint16), num_coders)
        self._words = [np.empty(0, dtype="<u2")]
        self._owners = [np.empty(0, dtype=np.uint16)]

    def write(self, block: Block) -> None:
        """Code a block."""
        state, owner = self._states[block.coders], self._owner_of[block.coders]
        for place in block.values[::-1]:
            freq = self._freqs.take(place)
            (full,) = (state >> _FULL_SHIFT >= freq).nonzero()
            self._words.append(state[full].astype("<u2"))
            self._owners.append(owner[full])
            state[full] >>= WORD_BITS
            state += state // freq * (TOTAL - freq) + self._starts.take(place)
        self._states[block.coders] = state

    def finish(self) -> list[bytes]:
        """The finished streams, in order."""
        owner = np.concatenate(self._owners[::-1])
        in_order = np.concatenate(self._words[::-1])[np.argsort(owner, kind="stable")]
        ends = np.cumsum(np.bincount(owner, minlength=len(self._num_coders)))[:-1]
        heads = np.split(self._states.astype("<u4"), np.cumsum(self._num_coders)[:-1])
        tails = np.split(in_order, ends)
        return [h.tobytes() + t.tobytes() for h, t in zip(heads, tails, strict=True)]
