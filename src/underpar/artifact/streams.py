"""Lanes of rANS coders, many at once: states, words, and the steps that move between them.

The coder is rANS (Duda 2013, arXiv:1311.2540), interleaved over lanes (Giesen 2014,
arXiv:1402.3392), in integer arithmetic on numpy arrays.

Invariants of a lane, before and after every symbol:
* the state lies in [2^16, 2^32) and starts, for the encoder, at exactly 2^16;
* a symbol moves at most one 16-bit word between the state and the stream;
* 2^PROB_BITS divides 2^16, so decoding undoes encoding step by step and every stream that decodes
  without an error is the one stream that encoding its symbols gives.

Byte layout of a stream: little-endian u32 states of its lanes as the encoder left them, then
little-endian u16 words in the order the decoder needs them: step by step, in each by lane.
Streams step together: few lanes make short streams, and numpy is fast on many lanes only.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from underpar.errors import ArtifactError

PROB_BITS = 14
TOTAL = 1 << PROB_BITS
_WORD_BITS = 16
_INITIAL_STATE = 1 << 16
# A state of at least freq << this shift would leave 32 bits if the symbol were coded into it.
_FULL_SHIFT = 32 - PROB_BITS

# Fields of a packed slot; the rank is the lowest.
_VALUE_SHIFT, _FREQ_SHIFT, _FIELD_MASK = 32, 16, (1 << 16) - 1


class Block(NamedTuple):
    """Steps of some lanes: values (steps, active), active lanes, where each stream's begin."""

    values: np.ndarray
    lanes: np.ndarray
    bounds: np.ndarray


def make_block(values: np.ndarray, active: Sequence[int], num_lanes: Sequence[int]) -> Block:
    """The block of values (steps, sum of active) of the first lanes, so many, of each stream."""
    first = np.cumsum(num_lanes) - num_lanes
    lanes = [np.arange(n) + at for n, at in zip(active, first, strict=True)]
    return Block(values, np.concatenate(lanes), np.cumsum([0, *active]))


class Writer:
    """Encodes blocks, last block first, into streams of so many lanes each."""

    def __init__(self, num_lanes: Sequence[int], freqs: np.ndarray, starts: np.ndarray) -> None:
        assert len(num_lanes) < 1 << 16
        self._num_lanes, self._freqs, self._starts = num_lanes, freqs, starts
        self._states = np.full(sum(num_lanes), _INITIAL_STATE, dtype=np.uint32)
        self._owner_of = np.repeat(np.arange(len(num_lanes), dtype=np.uint16), num_lanes)
        self._words = [np.empty(0, dtype="<u2")]
        self._owners = [np.empty(0, dtype=np.uint16)]

    def write(self, block: Block) -> None:
        """Codes a block of places in the frequencies."""
        state, owner = self._states[block.lanes], self._owner_of[block.lanes]
        for place in block.values[::-1]:
            freq = self._freqs.take(place)
            full = np.flatnonzero(state >> _FULL_SHIFT >= freq)
            self._words.append(state[full].astype("<u2"))
            self._owners.append(owner[full])
            state[full] >>= _WORD_BITS
            state += state // freq * (TOTAL - freq) + self._starts.take(place)
        self._states[block.lanes] = state

    def finish(self) -> list[bytes]:
        """The streams."""
        owner = np.concatenate(self._owners[::-1])
        in_order = np.concatenate(self._words[::-1])[np.argsort(owner, kind="stable")]
        ends = np.cumsum(np.bincount(owner, minlength=len(self._num_lanes)))[:-1]
        heads = np.split(self._states.astype("<u4"), np.cumsum(self._num_lanes)[:-1])
        tails = np.split(in_order, ends)
        return [h.tobytes() + t.tobytes() for h, t in zip(heads, tails, strict=True)]


class Reader:
    """Decodes the lanes of several streams; each stream's words are read from start to end."""

    def __init__(self, streams: Sequence[bytes], num_lanes: Sequence[int]) -> None:
        split = [_split_stream(s, n) for s, n in zip(streams, num_lanes, strict=True)]
        num_words = [words.size for _, words in split]
        self._states = np.concatenate([states for states, _ in split]).astype(np.int64)
        self._words = np.concatenate([words for _, words in split]).astype(np.int64)
        self._ends = np.cumsum(num_words)
        self._at = self._ends - num_words

    def read(
        self, block: Block, slots: np.ndarray, transitions: np.ndarray | None = None
    ) -> np.ndarray:
        """The int16 values (steps, active) of a block of int64 places of tables in `slots`.

        With the transitions of a trellis, a table is followed by that of odd states.
        """
        state = self._states[block.lanes]
        found = np.empty(block.values.shape, dtype=np.int16)
        following = None if transitions is None else transitions.reshape(-1)
        node = np.zeros(state.shape, dtype=np.int64)
        for table, value in zip(block.values, found, strict=True):
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
        self._states[block.lanes] = state
        return found

    def _refill(self, state: np.ndarray, bounds: np.ndarray) -> None:
        """Gives every low lane a word; stream s has lanes bounds[s] .. bounds[s + 1]."""
        low = np.flatnonzero(state < _INITIAL_STATE)
        cuts = low.searchsorted(bounds)
        counts = np.diff(cuts)
        index = np.arange(low.size) + np.repeat(self._at - cuts[:-1], counts)
        self._at += counts
        if np.any(self._at > self._ends):
            raise ArtifactError("weight stream ends before its last symbol")
        state[low] = state[low] << _WORD_BITS | self._words[index]

    def finish(self) -> None:
        """Refuses streams that do not end here."""
        if np.any(self._at != self._ends):
            raise ArtifactError("weight stream has bytes after its last symbol")
        if np.any(self._states != _INITIAL_STATE):
            raise ArtifactError(
                "weight stream is damaged: a lane does not end in the state it began with"
            )


def pack_slots(values: np.ndarray, freqs: np.ndarray) -> np.ndarray:
    """What decoding looks up, int64 for every slot of every table: value, frequency, rank."""
    freqs = freqs.astype(np.int64)
    ranks = np.arange(freqs.sum()) - np.repeat(np.cumsum(freqs) - freqs, freqs)
    entries = values.astype(np.int64) << _VALUE_SHIFT | freqs << _FREQ_SHIFT
    return np.repeat(entries, freqs) | ranks


def _split_stream(data: bytes, num_lanes: int) -> tuple[np.ndarray, np.ndarray]:
    """States (num_lanes,) and words of a stream, checked for size and range."""
    num_state_bytes = 4 * num_lanes
    if len(data) < num_state_bytes or len(data) % 2:
        raise ArtifactError(
            f"weight stream of {len(data)} bytes: expected an even number, "
            f"at least {num_state_bytes}"
        )
    states = np.frombuffer(data, dtype="<u4", count=num_lanes).astype(np.uint32)
    if states.min() < _INITIAL_STATE:
        raise ArtifactError(
            f"weight stream is damaged: a lane state is {states.min()}, "
            f"expected {_INITIAL_STATE} or more"
        )
    return states, np.frombuffer(data, dtype="<u2", offset=num_state_bytes)
