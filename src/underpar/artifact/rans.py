"""Entropy coder for arrays of symbols with one table of frequencies each, on lanes (lanes.py).

Symbol i belongs to lane i mod num_lanes. Neither the lane count nor the frequencies are stored.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from underpar.artifact.streams import PROB_BITS, TOTAL, Reader, Writer, make_block, pack_slots
from underpar.errors import ArtifactError

# A lane costs about three bytes: 0.1 % of a stream at this length.
_SYMBOLS_PER_LANE = 8192
_MAX_LANES = 1024
# Small arrays, a few bytes of any artifact, would take as long as large ones at that rate.
_SMALL_SYMBOLS = 1 << 16
_SYMBOLS_PER_SMALL_LANE = 512
# The tables of so many streams take 32 MB.
_STREAMS_AT_ONCE = 256


def choose_num_lanes(num_symbols: int) -> int:
    """The lane count both sides use for an array of this length: a power of two in 1..1024."""
    small = num_symbols < _SMALL_SYMBOLS
    symbols_per_lane = _SYMBOLS_PER_SMALL_LANE if small else _SYMBOLS_PER_LANE
    wanted = min(max(num_symbols // symbols_per_lane, 1), _MAX_LANES)
    return 1 << (wanted.bit_length() - 1)


def quantize_counts(counts: np.ndarray) -> np.ndarray:
    """Frequencies (uint32, sum 2^PROB_BITS, at least 1 where a count is positive) for counts.

    All-zero counts give everything to symbol 0.
    """
    counts = np.asarray(counts)
    if counts.ndim != 1 or counts.size == 0 or counts.dtype.kind not in "iu":
        raise ArtifactError(
            f"counts of shape {counts.shape} and type {counts.dtype}: expected a 1-D integer array"
        )
    num_used = int(np.count_nonzero(counts))
    if counts.min() < 0 or num_used > TOTAL:
        raise ArtifactError(
            f"counts with minimum {counts.min()} and {num_used} used symbols: "
            f"expected none below 0 and at most {TOTAL} used"
        )
    # Python integers: exact for any count, and the same on every machine.
    exact: list[int] = counts.tolist()
    if num_used == 0:
        exact[0] = num_used = 1
    return np.array(_share_total(exact, num_used), dtype=np.uint32)


def _share_total(counts: list[int], num_used: int) -> list[int]:
    """Splits 2^PROB_BITS by counts with the least code length, up to the logarithm's rounding."""
    num_symbols = sum(counts)
    # One unit per used symbol is held back, so the shares never exceed the total.
    freqs = [max(1, c * (TOTAL - num_used) // num_symbols) if c else 0 for c in counts]

    def gain(symbol: int) -> int:
        # One more unit saves count * ln((f + 1) / f) nats, and ln((f + 1) / f) ~ 2 / (2f + 1).
        return (counts[symbol] << 32) // (2 * freqs[symbol] + 1)

    heap = [(-gain(symbol), symbol) for symbol, count in enumerate(counts) if count]
    heapq.heapify(heap)
    for _ in range(TOTAL - sum(freqs)):
        symbol = heap[0][1]
        freqs[symbol] += 1
        heapq.heapreplace(heap, (-gain(symbol), symbol))
    assert sum(freqs) == TOTAL
    return freqs


def encode(symbols: np.ndarray, freqs: np.ndarray, *, num_lanes: int | None = None) -> bytes:
    """The stream of a 1-D array of symbols 0..len(freqs)-1; layout in the module docstring."""
    return encode_many([symbols], [freqs], num_lanes=num_lanes)[0]


def decode(
    data: bytes, freqs: np.ndarray, num_symbols: int, *, num_lanes: int | None = None
) -> np.ndarray:
    """The int16 symbols of a stream; anything but an exact stream of that length is refused."""
    return decode_many([data], [freqs], [num_symbols], num_lanes=num_lanes)[0]


def encode_many(
    arrays: Sequence[np.ndarray], freqs: Sequence[np.ndarray], *, num_lanes: int | None = None
) -> list[bytes]:
    """One stream for each array under its frequencies, the same as `encode` gives, faster."""
    if not arrays:
        return []
    arrays, tables = [*map(np.asarray, arrays)], [*map(_check_freqs, freqs)]
    for symbols, table in zip(arrays, tables, strict=True):
        _count_symbols(symbols, table)
    lanes = [num_lanes or choose_num_lanes(a.size) for a in arrays]
    firsts = np.cumsum([0, *(table.size for table in tables[:-1])], dtype=np.int32)
    starts = [np.cumsum(table, dtype=np.uint32) - table for table in tables]
    writer = Writer(lanes, np.concatenate(tables), np.concatenate(starts))
    for part in reversed(_cut_rounds([a.size for a in arrays], lanes)):
        rounds = [
            a[part.begin * n :][: part.num_rounds * k].reshape(part.num_rounds, k)
            for a, n, k in zip(arrays, lanes, part.active, strict=True)
        ]
        places = np.concatenate(rounds, axis=1, dtype=np.int32, casting="unsafe")
        places += np.repeat(firsts, part.active)
        writer.write(make_block(places, part.active, lanes))
    return writer.finish()


def decode_many(
    streams: Sequence[bytes],
    freqs: Sequence[np.ndarray],
    sizes: Sequence[int],
    *,
    num_lanes: int | None = None,
) -> list[np.ndarray]:
    """The int16 symbols of each stream, the same as `decode` gives, faster."""
    found: list[np.ndarray] = []
    for begin in range(0, len(streams), _STREAMS_AT_ONCE):
        some = slice(begin, begin + _STREAMS_AT_ONCE)
        found += _decode_some(streams[some], freqs[some], sizes[some], num_lanes)
    return found


def _decode_some(
    streams: Sequence[bytes],
    freqs: Sequence[np.ndarray],
    sizes: Sequence[int],
    num_lanes: int | None,
) -> list[np.ndarray]:
    tables = [*map(_check_freqs, freqs)]
    if min(sizes) < 0:
        raise ArtifactError(f"weight stream of {min(sizes)} symbols: expected 0 or more")
    lanes = [num_lanes or choose_num_lanes(size) for size in sizes]
    reader = Reader(streams, lanes)
    slots = np.concatenate([pack_slots(np.arange(table.size), table) for table in tables])
    outs = [np.empty(size, dtype=np.int16) for size in sizes]
    for part in _cut_rounds(sizes, lanes):
        places = np.repeat(np.arange(len(tables)) << PROB_BITS, part.active)
        places = np.broadcast_to(places, (part.num_rounds, places.size))
        block = make_block(places, part.active, lanes)
        found = np.split(reader.read(block, slots), block.bounds[1:-1], axis=1)
        for out, n, symbols in zip(outs, lanes, found, strict=True):
            out[part.begin * n :][: symbols.size] = symbols.reshape(-1)
    reader.finish()
    return outs


class _Part(NamedTuple):
    """Rounds in which the same lanes have a symbol: the first so many of each stream."""

    begin: int
    num_rounds: int
    active: list[int]


def _cut_rounds(sizes: Sequence[int], num_lanes: Sequence[int]) -> list[_Part]:
    """The rounds of streams that step together, one symbol of each lane in a round."""
    whole = [divmod(size, n) for size, n in zip(sizes, num_lanes, strict=True)]
    ends = sorted({0} | {r for r, _ in whole} | {r + 1 for r, left in whole if left})
    parts = []
    for begin, end in pairwise(ends):
        active = [
            n if end <= rounds else left * (begin == rounds)
            for n, (rounds, left) in zip(num_lanes, whole, strict=True)
        ]
        parts.append(_Part(begin, end - begin, active))
    return parts


def code_length_bits(symbols: np.ndarray, freqs: np.ndarray) -> float:
    """Ideal length in bits of the symbols under the frequencies, without states."""
    table = _check_freqs(freqs)
    counts = _count_symbols(np.asarray(symbols), table)
    used = counts > 0
    return float(np.sum(counts[used] * (PROB_BITS - np.log2(table[used]))))


def _check_freqs(freqs: np.ndarray) -> np.ndarray:
    """The frequencies as uint32, refused unless they are a table of this coder."""
    freqs = np.asarray(freqs)
    if freqs.ndim != 1 or freqs.size == 0 or freqs.dtype.kind not in "iu":
        raise ArtifactError(
            f"frequencies of shape {freqs.shape} and type {freqs.dtype}: "
            "expected a 1-D integer array"
        )
    # The range first: it keeps the sum from wrapping around.
    if freqs.min() < 0 or freqs.max() > TOTAL or int(freqs.sum(dtype=np.int64)) != TOTAL:
        raise ArtifactError(f"frequencies do not lie in 0..{TOTAL} with the sum {TOTAL}")
    return freqs.astype(np.uint32)


def _count_symbols(symbols: np.ndarray, table: np.ndarray) -> np.ndarray:
    """How often each symbol occurs; refuses symbols the table cannot code."""
    if symbols.ndim != 1 or symbols.dtype.kind not in "iu":
        raise ArtifactError(
            f"symbols of shape {symbols.shape} and type {symbols.dtype}: "
            "expected a 1-D integer array"
        )
    if symbols.size and (symbols.min() < 0 or symbols.max() >= table.size):
        raise ArtifactError(
            f"symbols {symbols.min()}..{symbols.max()}: expected 0..{table.size - 1}"
        )
    counts = np.bincount(symbols.astype(np.int64, copy=False), minlength=table.size)
    missing = np.flatnonzero((counts > 0) & (table == 0))
    if missing.size:
        raise ArtifactError(f"symbol {missing[0]} occurs but has frequency 0 in the table")
    return counts
