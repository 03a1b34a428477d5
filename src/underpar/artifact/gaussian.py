"""Entropy coder for matrices of integers whose width is known by row and column (bells.py).

States, words and invariants are those of rans.py, but every symbol has a table of its own, and a
lane codes whole rows: of L lanes, lane l codes rows l, l + L, ..., each from left to right. So a
table may depend on what its row held before it: with a trellis (quant/trellis.py) it is that of the
state's parity, and every row starts in state 0. Each matrix has a stream of its own, yet matrices
with equal numbers of columns step together: few lanes make short streams, and numpy is fast on
many lanes only.

Byte layout of a stream, little-endian:
* u8: index of the exponent, plus 4 for a trellis;
* u32 x 3: bytes of the row section, bytes of the column section, number of escapes;
* row section: u8 center, u8 bucket of the rows' spread, then a stream of rans.py;
* column section: the same of columns + 48; absent where all columns are 0;
* escapes in C order, i16 each;
* the codes: u32 states of the lanes, then u16 words in the order the decoder needs them.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import NamedTuple

import numpy as np

from underpar.artifact import bells, rans
from underpar.artifact.bells import Book, Scales, Spread
from underpar.artifact.rans import (
    _FULL_SHIFT,
    _INITIAL_STATE,
    _WORD_BITS,
    PROB_BITS,
    _split_stream,
)
from underpar.errors import ArtifactError
from underpar.quant.trellis import LARGEST_CODE

_TOTAL = 1 << PROB_BITS

# A lane costs about three bytes: 0.05 % of its length at 16,384 symbols of 3 bits.
_MAX_SYMBOLS_PER_LANE = 1 << 14
# Small matrices, a few bytes of any artifact, would take as long as large ones at that rate.
_MIN_SYMBOLS_PER_LANE = 1 << 11
_MIN_LANES = 16
_MAX_SYMBOLS = 1 << 28

_HEAD = struct.Struct("<BIII")
_TRELLIS_FLAG = 4

Shape = tuple[int, int]


def choose_num_lanes(shape: Shape) -> int:
    """The lane count both sides use for a matrix."""
    wanted = max(shape[0] * shape[1] // _MIN_LANES, _MIN_SYMBOLS_PER_LANE)
    rows_per_lane = max(min(wanted, _MAX_SYMBOLS_PER_LANE) // shape[1], 1)
    return -(-shape[0] // rows_per_lane)


def encode(
    codes: np.ndarray, transitions: np.ndarray | None = None, *, num_lanes: int | None = None
) -> bytes:
    """The stream of codes (R, C); with `transitions` (S, 2) every row is a path of that trellis."""
    return encode_many([codes], transitions, num_lanes=num_lanes)[0]


def decode(
    data: bytes,
    shape: Shape,
    transitions: np.ndarray | None = None,
    *,
    num_lanes: int | None = None,
) -> np.ndarray:
    """The int16 codes (R, C) of a stream; anything but an exact stream is refused."""
    return decode_many([data], [shape], transitions, num_lanes=num_lanes)[0]


def encode_many(
    matrices: Sequence[np.ndarray],
    transitions: np.ndarray | None = None,
    *,
    num_lanes: int | None = None,
) -> list[bytes]:
    """One stream for each matrix, the same as `encode` gives, in less time."""
    transitions = _check_transitions(transitions)
    matrices = [_check_codes(codes, transitions) for codes in matrices]
    stride = 1 if transitions is None else 2
    streams = [b""] * len(matrices)
    for members in _group_by_columns([codes.shape for codes in matrices]):
        scales = [bells.fit(matrices[i], stride)[0] for i in members]
        book = Book(scales, stride)
        symbols = [
            book.find_symbols(matrices[i], book.find_tables(s))
            for i, s in zip(members, scales, strict=True)
        ]
        lanes = [num_lanes or choose_num_lanes(matrices[i].shape) for i in members]
        tails = _encode_lanes(symbols, book, lanes)
        for i, scale, places, tail in zip(members, scales, symbols, tails, strict=True):
            escapes = matrices[i][book.values[places] < -LARGEST_CODE]
            streams[i] = _write_head(scale, stride, escapes) + tail
    return streams


def decode_many(
    streams: Sequence[bytes],
    shapes: Sequence[Shape],
    transitions: np.ndarray | None = None,
    *,
    num_lanes: int | None = None,
) -> list[np.ndarray]:
    """The int16 codes (R, C) of each stream, the same as `decode` gives, in less time."""
    transitions = _check_transitions(transitions)
    stride = 1 if transitions is None else 2
    lanes = [num_lanes or choose_num_lanes(_check_shape(shape)) for shape in shapes]
    parts = [_split(d, s, n, stride) for d, s, n in zip(streams, shapes, lanes, strict=True)]
    outs: list[np.ndarray] = [np.empty(0)] * len(shapes)
    for members in _group_by_columns(shapes):
        book = Book([parts[i].scales for i in members], stride)
        tables = [book.find_tables(parts[i].scales) for i in members]
        reader = _Reader([parts[i].codes for i in members], [lanes[i] for i in members])
        found = reader.read(tables, book, transitions)
        for i, codes, numbers in zip(members, found, tables, strict=True):
            book.fill_escapes(codes, parts[i].escapes, numbers)
            outs[i] = codes
    return outs


def measure_bits(codes: np.ndarray, transitions: np.ndarray | None = None) -> float:
    """About the length of the codes' stream in bits, without its header and lane states."""
    transitions = _check_transitions(transitions)
    codes = _check_codes(codes, transitions)
    return bells.fit(codes, 1 if transitions is None else 2)[1]


def _group_by_columns(shapes: Sequence[Shape]) -> list[list[int]]:
    groups: dict[int, list[int]] = {}
    for i, (_, num_columns) in enumerate(shapes):
        groups.setdefault(num_columns, []).append(i)
    return [*groups.values()]


def _check_transitions(transitions: np.ndarray | None) -> np.ndarray | None:
    """The transitions (S, 2) of a trellis; a single state is none."""
    if transitions is None:
        return None
    num_states = len(transitions)
    if transitions.shape != (num_states, 2) or not np.isin(transitions, range(num_states)).all():
        raise ArtifactError(
            f"transitions of shape {transitions.shape}: expected (states, 2), entries being states"
        )
    return transitions.astype(np.int64) if num_states > 1 else None


def _check_codes(codes: np.ndarray, transitions: np.ndarray | None) -> np.ndarray:
    """The codes (R, C) as int16, refused unless they can be coded."""
    if codes.ndim != 2 or codes.dtype.kind not in "iu":
        raise ArtifactError(
            f"codes of shape {codes.shape} and type {codes.dtype}: expected a 2-D integer array"
        )
    _check_shape(codes.shape)
    if codes.min() < -LARGEST_CODE or codes.max() > LARGEST_CODE:
        raise ArtifactError(
            f"codes {codes.min()}..{codes.max()}: expected none beyond {LARGEST_CODE}"
        )
    codes = codes.astype(np.int16)
    if transitions is not None:
        state = np.zeros(len(codes), dtype=np.int64)
        for column, code in enumerate(codes.T):
            if np.any((code ^ state) & 1):
                raise ArtifactError(f"codes leave their trellis in column {column}: wrong parity")
            state = transitions[state, code >> 1 & 1]
    return codes


def _check_shape(shape: Shape) -> Shape:
    if len(shape) != 2 or min(shape) < 1 or shape[0] * shape[1] > _MAX_SYMBOLS:
        raise ArtifactError(
            f"codes of shape {shape}: expected rows and columns, {_MAX_SYMBOLS} codes at most"
        )
    return shape


def _write_head(scales: Scales, stride: int, escapes: np.ndarray) -> bytes:
    """All of a stream before its codes."""
    rows = _write_line(scales.rows)
    columns = _write_line(scales.columns + bells.COLUMN_BIAS) if scales.columns.any() else b""
    kind = scales.exponent + _TRELLIS_FLAG * (stride - 1)
    head = _HEAD.pack(kind, len(rows), len(columns), escapes.size)
    return head + rows + columns + escapes.astype("<i2").tobytes()


def _write_line(indices: np.ndarray) -> bytes:
    spread = bells.fit_spread(indices)
    return bytes(spread) + rans.encode(indices, spread.freqs())


def _read_line(data: bytes, num_indices: int) -> np.ndarray:
    if len(data) < 2 or max(data[:2]) >= bells.NUM_BUCKETS:
        raise ArtifactError(f"weight stream has a scale section of {len(data)} bytes without model")
    return rans.decode(data[2:], Spread(*data[:2]).freqs(), num_indices)


class _Parts(NamedTuple):
    scales: Scales
    escapes: np.ndarray
    codes: bytes


def _split(data: bytes, shape: Shape, num_lanes: int, stride: int) -> _Parts:
    """The parts of a stream, none larger than the stream allows."""
    if len(data) < _HEAD.size:
        raise ArtifactError(f"weight stream of {len(data)} bytes has no header")
    kind, row_bytes, column_bytes, num_escapes = _HEAD.unpack_from(data)
    exponent = kind - _TRELLIS_FLAG * (stride - 1)
    if not 0 <= exponent < len(bells.EXPONENTS):
        raise ArtifactError(
            f"weight stream of kind {kind}: unknown, or its trellis is not the one expected"
        )
    ends = [*accumulate([_HEAD.size, row_bytes, column_bytes, 2 * num_escapes])]
    if ends[-1] + 4 * num_lanes > len(data):
        raise ArtifactError(
            f"weight stream of {len(data)} bytes: expected at least {ends[-1] + 4 * num_lanes}"
        )
    rows, columns, escapes, codes = (data[a:b] for a, b in pairwise([*ends, len(data)]))
    column_indices = np.zeros(shape[1], dtype=np.int32)
    if columns:
        column_indices = _read_line(columns, shape[1]) - bells.COLUMN_BIAS
        if not column_indices.any():
            raise ArtifactError("weight stream stores columns that are all 0: expected none")
    scales = Scales(exponent, _read_line(rows, shape[0]), column_indices)
    return _Parts(scales, np.frombuffer(escapes, dtype="<i2"), codes)


class _Block(NamedTuple):
    """At most a row for every lane: values (C, active), active lanes, where each stream's begin."""

    values: np.ndarray
    lanes: np.ndarray
    bounds: np.ndarray


def _count_blocks(matrices: Sequence[np.ndarray], num_lanes: Sequence[int]) -> int:
    return max(-(-len(m) // n) for m, n in zip(matrices, num_lanes, strict=True))


def _cut_block(matrices: Sequence[np.ndarray], num_lanes: Sequence[int], number: int) -> _Block:
    cut = [m[number * n : (number + 1) * n] for m, n in zip(matrices, num_lanes, strict=True)]
    first = np.cumsum(num_lanes) - num_lanes
    lanes = np.concatenate([np.arange(len(c)) + at for c, at in zip(cut, first, strict=True)])
    values = np.ascontiguousarray(np.concatenate(cut).T)
    return _Block(values, lanes, np.cumsum([0, *map(len, cut)]))


def _encode_lanes(
    symbols: Sequence[np.ndarray], book: Book, num_lanes: Sequence[int]
) -> list[bytes]:
    """States and words of each matrix (R, C) of symbols of the book; C is common."""
    assert len(symbols) < 1 << 16
    states = np.full(sum(num_lanes), _INITIAL_STATE, dtype=np.uint32)
    owner_of = np.repeat(np.arange(len(symbols), dtype=np.uint16), num_lanes)
    words, owners = [np.empty(0, dtype="<u2")], [np.empty(0, dtype=np.uint16)]
    for number in reversed(range(_count_blocks(symbols, num_lanes))):
        block = _cut_block(symbols, num_lanes, number)
        state, owner = states[block.lanes], owner_of[block.lanes]
        for symbol in block.values[::-1]:
            freq = book.freqs.take(symbol)
            full = np.flatnonzero(state >> _FULL_SHIFT >= freq)
            words.append(state[full].astype("<u2"))
            owners.append(owner[full])
            state[full] >>= _WORD_BITS
            state += state // freq * (_TOTAL - freq) + book.starts.take(symbol)
        states[block.lanes] = state
    owner = np.concatenate(owners[::-1])
    in_order = np.concatenate(words[::-1])[np.argsort(owner, kind="stable")]
    ends = np.cumsum(np.bincount(owner, minlength=len(symbols)))[:-1]
    heads = np.split(states.astype("<u4"), np.cumsum(num_lanes)[:-1])
    tails = np.split(in_order, ends)
    return [h.tobytes() + t.tobytes() for h, t in zip(heads, tails, strict=True)]


class _Reader:
    """Decodes the lanes of several streams; each stream's words are read from start to end."""

    def __init__(self, streams: Sequence[bytes], num_lanes: Sequence[int]) -> None:
        split = [_split_stream(s, n) for s, n in zip(streams, num_lanes, strict=True)]
        num_words = [words.size for _, words in split]
        self._num_lanes = num_lanes
        self._states = np.concatenate([states for states, _ in split]).astype(np.int64)
        self._words = np.concatenate([words for _, words in split]).astype(np.int64)
        self._ends = np.cumsum(num_words)
        self._at = self._ends - num_words

    def read(
        self, tables: Sequence[np.ndarray], book: Book, transitions: np.ndarray | None
    ) -> list[np.ndarray]:
        """The int16 values of matrices (R, C), given the numbers (R, C) of their tables."""
        slots = book.pack_slots()
        outs = [np.empty(t.shape, dtype=np.int16) for t in tables]
        for number in range(_count_blocks(tables, self._num_lanes)):
            block = _cut_block(tables, self._num_lanes, number)
            found = self._read_block(block, slots, transitions)
            for i, (out, n) in enumerate(zip(outs, self._num_lanes, strict=True)):
                rows = out[number * n : (number + 1) * n]
                rows[:] = found[:, block.bounds[i] : block.bounds[i + 1]].T
        if np.any(self._at != self._ends):
            raise ArtifactError("weight stream has bytes after its last symbol")
        if np.any(self._states != _INITIAL_STATE):
            raise ArtifactError(
                "weight stream is damaged: a lane does not end in the state it began with"
            )
        return outs

    def _read_block(
        self, block: _Block, slots: np.ndarray, transitions: np.ndarray | None
    ) -> np.ndarray:
        """The values (C, active) of one row in every active lane."""
        state = self._states[block.lanes]
        found = np.empty(block.values.shape, dtype=np.int16)
        following = None if transitions is None else transitions.reshape(-1)
        node = np.zeros(state.shape, dtype=np.int64)
        for table, value in zip(block.values.astype(np.int64) << PROB_BITS, found, strict=True):
            index = state & (_TOTAL - 1)
            index += table
            if following is not None:
                index += (node & 1) << PROB_BITS
            entry = slots.take(index)
            value[:] = entry >> bells.VALUE_SHIFT
            state >>= PROB_BITS
            state *= entry >> bells.FREQ_SHIFT & bells.FIELD_MASK
            state += entry & bells.FIELD_MASK
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
