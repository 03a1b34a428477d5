"""Interleaved rANS coders of many streams at once: their states, their words, and how to decode.

The coder is rANS (Duda 2013, arXiv:1311.2540). Every stream is written by several coders that take
turns (Giesen 2014, arXiv:1402.3392). All arithmetic is on integers, in numpy arrays.

Invariants of a coder, before and after every symbol:
* the state lies in [2^16, 2^32), and the encoder starts with a state of exactly 2^16;
* a symbol moves at most one 16-bit word between the state and the stream;
* 2^PROB_BITS divides 2^16. Decoding therefore undoes encoding step by step, and a stream that
  decodes without an error is the only stream that encoding its symbols gives.

Byte layout of a stream: little-endian u32 states of its coders as the encoder left them, then
little-endian u16 words in the order in which the decoder needs them: step by step, and within a
step by coder.

Streams are coded together, because numpy is fast only on many coders, and because a stream of few
coders is shorter.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from underpar.artifact.frequencies import PROB_BITS, TOTAL
from underpar.errors import ArtifactError

WORD_BITS = 16
INITIAL_STATE = 1 << 16

# The fields of a packed slot; the rank takes the lowest bits.
_VALUE_SHIFT, _FREQ_SHIFT, _FIELD_MASK = 32, 16, (1 << 16) - 1


class Block(NamedTuple):
    """Some steps of the coders that are active in them."""

    values: np.ndarray
    """(steps, active) what the caller codes, or where the tables of the symbols begin."""
    coders: np.ndarray
    """(active,) numbers of the coders."""
    bounds: np.ndarray
    """(streams + 1,) the active coders of stream s are bounds[s] .. bounds[s + 1]."""


def make_block(values: np.ndarray, active: Sequence[int], num_coders: Sequence[int]) -> Block:
    """The block of values (steps, sum of `active`); of stream s the first active[s] coders act."""
    first = np.cumsum(num_coders) - num_coders
    coders = [np.arange(n) + at for n, at in zip(active, first, strict=True)]
    return Block(values, np.concatenate(coders), np.cumsum([0, *active]))


class Decoder:
    """Decodes several streams, each with `num_coders` coders; words are read from start to end."""

    def __init__(self, streams: Sequence[bytes], num_coders: Sequence[int]) -> None:
        split = [_split_stream(s, n) for s, n in zip(streams, num_coders, strict=True)]
        num_words = [words.size for _, words in split]
        self._states = np.concatenate([states for states, _ in split]).astype(np.int64)
        self._words = np.concatenate([words for _, words in split]).astype(np.int64)
        self._ends = np.cumsum(num_words)
        self._at = self._ends - num_words

    def read(
        self, block: Block, slots: np.ndarray, transitions: np.ndarray | None = None
    ) -> np.ndarray:
        """The int16 values (steps, active) of a block that says where in `slots` each table begins.

        With the transitions of a trellis, the table of even states is named, and that of odd
        states follows it in `slots`.
        """
        state = self._states[block.coders]
        values = np.empty(block.values.shape, dtype=np.int16)
        following = None if transitions is None else transitions.reshape(-1)
        node = np.zeros(state.shape, dtype=np.int64)
        for table, value in zip(block.values, values, strict=True):
            index = state & (TOTAL - 1)
            index += table
            if following is not None:
                index += (node & 1) << PROB_BITS
            entry = slots.take(index)
            value[:] = entry >> _VALUE_SHIFT
            state >>= PROB_BITS
            state *= entry >> _FREQ_SHIFT & _FIELD_MASK
            state += entry & _FIELD_MASK
            if following is not None:
                node = following.take(2 * node + (value >> 1 & 1))
            self._refill(state, block.bounds)
        self._states[block.coders] = state
        return values

    def _refill(self, state: np.ndarray, bounds: np.ndarray) -> None:
        """Give every coder a word whose state is below its range."""
        # Methods instead of functions of numpy, whose wrappers take as long as these small arrays.
        (low,) = (state < INITIAL_STATE).nonzero()
        cuts = low.searchsorted(bounds)
        counts = cuts[1:] - cuts[:-1]
        index = np.arange(low.size) + (self._at - cuts[:-1]).repeat(counts)
        self._at += counts
        if (self._at > self._ends).any():
            raise ArtifactError("weight stream ends before its last symbol")
        state[low] = state[low] << WORD_BITS | self._words[index]

    def finish(self) -> None:
        """Refuse streams that do not end here."""
        if np.any(self._at != self._ends):
            raise ArtifactError("weight stream has bytes after its last symbol")
        if np.any(self._states != INITIAL_STATE):
            raise ArtifactError(
                "weight stream is damaged: a coder does not end in the state it began with"
            )


def pack_slots(values: np.ndarray, freqs: np.ndarray) -> np.ndarray:
    """The lookup table of decoding: for every slot of every table value, frequency and rank, int64.

    The rank is the slot's place among those of its symbol.
    """
    freqs = freqs.astype(np.int64)
    ranks = np.arange(freqs.sum()) - np.repeat(np.cumsum(freqs) - freqs, freqs)
    entries = values.astype(np.int64) << _VALUE_SHIFT | freqs << _FREQ_SHIFT
    return np.repeat(entries, freqs) | ranks


def _split_stream(data: bytes, num_coders: int) -> tuple[np.ndarray, np.ndarray]:
    """States (num_coders,) and words of a stream, checked for size and range."""
    num_state_bytes = 4 * num_coders
    if len(data) < num_state_bytes or len(data) % 2:
        raise ArtifactError(
            f"weight stream of {len(data)} bytes: expected an even number, "
            f"at least {num_state_bytes}"
        )
    states = np.frombuffer(data, dtype="<u4", count=num_coders).astype(np.uint32)
    if states.min() < INITIAL_STATE:
        raise ArtifactError(
            f"weight stream is damaged: a coder state is {states.min()}, "
            f"expected {INITIAL_STATE} or more"
        )
    return states, np.frombuffer(data, dtype="<u2", offset=num_state_bytes)
