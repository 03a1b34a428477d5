"""Entropy coder for matrices of integers whose width is known by row and column (width_tables.py).

States, words and invariants are those of lanes.py, but every symbol has a table of its own, and a
lane codes whole rows: of L lanes, lane l codes rows l, l + L, ..., each from left to right. So a
table may depend on what its row held before it: with a trellis (quant/trellis.py) it is that of the
state's parity, and every row starts in state 0. Each matrix has a stream of its own, yet matrices
with equal numbers of columns step together, which is faster. gaussian_writer.py writes the streams.

Byte layout of a stream, little-endian:
* u8: index of the exponent, plus 4 for a trellis;
* u32 x 3: bytes of the row section, bytes of the column section, number of escapes;
* row section: u8 center, u8 bucket of the rows' spread, then a stream of rans.py; 128 is added to
  the center if log steps predict shifts (width_tables.py): they were added to the rows, mod 96;
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

from underpar.artifact import rans, width_tables
from underpar.artifact.streams import PROB_BITS, Block, Reader, make_block, pack_slots
from underpar.artifact.width_tables import Book, Scales, Spread
from underpar.errors import ArtifactError

# A lane costs about three bytes: 0.05 % of its length at 16,384 symbols of 3 bits.
_MAX_SYMBOLS_PER_LANE = 1 << 14
# Small matrices, a few bytes of any artifact, would take as long as large ones at that rate.
_MIN_SYMBOLS_PER_LANE = 1 << 11
_MIN_LANES = 16
_MAX_SYMBOLS = 1 << 28

HEAD = struct.Struct("<BIII")
TRELLIS_FLAG = 4
SHIFT_FLAG = 128

Shape = tuple[int, int]
# Log steps of a matrix' rows (R,) and columns (C,), where there are any.
Steps = tuple[np.ndarray | None, np.ndarray | None]


def choose_num_lanes(shape: Shape) -> int:
    """The lane count both sides use for a matrix."""
    wanted = max(shape[0] * shape[1] // _MIN_LANES, _MIN_SYMBOLS_PER_LANE)
    rows_per_lane = max(min(wanted, _MAX_SYMBOLS_PER_LANE) // shape[1], 1)
    return -(-shape[0] // rows_per_lane)


def decode(
    data: bytes, shape: Shape, transitions: np.ndarray | None = None, steps: Steps = (None, None)
) -> np.ndarray:
    """The int16 codes (R, C) of a stream; anything but an exact stream is refused."""
    return decode_many([data], [shape], transitions, [steps])[0]


def decode_many(
    streams: Sequence[bytes],
    shapes: Sequence[Shape],
    transitions: np.ndarray | None = None,
    steps: Sequence[Steps] | None = None,
    *,
    num_lanes: int | None = None,
) -> list[np.ndarray]:
    """The int16 codes (R, C) of each stream, the same as `decode` gives, in less time."""
    transitions = check_transitions(transitions)
    stride = 1 if transitions is None else 2
    lanes = [num_lanes or choose_num_lanes(check_shape(shape)) for shape in shapes]
    parts = [_split(d, n, stride) for d, n in zip(streams, lanes, strict=True)]
    scales = _read_scales(parts, shapes, steps or [(None, None)] * len(shapes))
    outs: list[np.ndarray] = [np.empty(0)] * len(shapes)
    for members in group_by_columns(shapes):
        book = Book([scales[i] for i in members], stride)
        tables = [book.find_tables(scales[i]) for i in members]
        found = _read_codes(
            [parts[i].codes for i in members],
            tables,
            [lanes[i] for i in members],
            book,
            transitions,
        )
        for i, codes, numbers in zip(members, found, tables, strict=True):
            book.fill_escapes(codes, parts[i].escapes, numbers)
            outs[i] = codes
    return outs


def group_by_columns(shapes: Sequence[Shape]) -> list[list[int]]:
    """Places of shapes with equal numbers of columns."""
    groups: dict[int, list[int]] = {}
    for i, (_, num_columns) in enumerate(shapes):
        groups.setdefault(num_columns, []).append(i)
    return [*groups.values()]


def check_transitions(transitions: np.ndarray | None) -> np.ndarray | None:
    """The transitions (S, 2) of a trellis; a single state is none."""
    if transitions is None:
        return None
    num_states = len(transitions)
    if transitions.shape != (num_states, 2) or not np.isin(transitions, range(num_states)).all():
        raise ArtifactError(
            f"transitions of shape {transitions.shape}: expected (states, 2), entries being states"
        )
    return transitions.astype(np.int64) if num_states > 1 else None


def check_shape(shape: Shape) -> Shape:
    """The shape, refused unless such a matrix can be coded."""
    if len(shape) != 2 or min(shape) < 1 or shape[0] * shape[1] > _MAX_SYMBOLS:
        raise ArtifactError(
            f"codes of shape {shape}: expected rows and columns, {_MAX_SYMBOLS} codes at most"
        )
    return shape


class _Parts(NamedTuple):
    exponent: int
    rows: bytes
    columns: bytes
    escapes: np.ndarray
    codes: bytes


def _split(data: bytes, num_lanes: int, stride: int) -> _Parts:
    """The parts of a stream, none larger than the stream allows."""
    if len(data) < HEAD.size:
        raise ArtifactError(f"weight stream of {len(data)} bytes has no header")
    kind, row_bytes, column_bytes, num_escapes = HEAD.unpack_from(data)
    exponent = kind - TRELLIS_FLAG * (stride - 1)
    if not 0 <= exponent < len(width_tables.EXPONENTS):
        raise ArtifactError(
            f"weight stream of kind {kind}: unknown, or its trellis is not the one expected"
        )
    ends = [*accumulate([HEAD.size, row_bytes, column_bytes, 2 * num_escapes])]
    if ends[-1] + 4 * num_lanes > len(data):
        raise ArtifactError(
            f"weight stream of {len(data)} bytes: expected at least {ends[-1] + 4 * num_lanes}"
        )
    rows, columns, escapes, codes = (data[a:b] for a, b in pairwise([*ends, len(data)]))
    return _Parts(exponent, rows, columns, np.frombuffer(escapes, dtype="<i2"), codes)


def _read_scales(
    parts: Sequence[_Parts], shapes: Sequence[Shape], steps: Sequence[Steps]
) -> list[Scales]:
    lines, shifts = [], []
    for part, shape, own in zip(parts, shapes, steps, strict=True):
        lines.append(part.rows)
        shifts.append(width_tables.expect_shifts(own[0], shape[0]))
        if part.columns:
            lines.append(part.columns)
            shifts.append(width_tables.expect_shifts(own[1], shape[1]))
    found = iter(_read_lines(lines, shifts))
    scales = []
    for part, shape in zip(parts, shapes, strict=True):
        rows, columns = next(found), np.zeros(shape[1], dtype=np.int64)
        if part.columns:
            columns = next(found) - width_tables.COLUMN_BIAS
            if not columns.any():
                raise ArtifactError("weight stream stores columns that are all 0: expected none")
        scales.append(Scales(part.exponent, rows, columns))
    return scales


def _read_lines(lines: Sequence[bytes], shifts: Sequence[np.ndarray]) -> list[np.ndarray]:
    """The indices (N,) of each line, 0..95, given the shifts (N,) that may have been added."""
    freqs = []
    for line in lines:
        if len(line) < 2 or max(line[0] % SHIFT_FLAG, line[1]) >= width_tables.NUM_BUCKETS:
            raise ArtifactError(
                f"weight stream has a scale section of {len(line)} bytes without model"
            )
        freqs.append(Spread(line[0] % SHIFT_FLAG, line[1]).freqs())
    found = rans.decode_many([line[2:] for line in lines], freqs, [s.size for s in shifts])
    return [
        (indices - shift * (line[0] // SHIFT_FLAG)) % width_tables.NUM_BUCKETS
        for line, indices, shift in zip(lines, found, shifts, strict=True)
    ]


def count_blocks(matrices: Sequence[np.ndarray], num_lanes: Sequence[int]) -> int:
    """How many rows the busiest lane codes."""
    return max(-(-len(m) // n) for m, n in zip(matrices, num_lanes, strict=True))


def cut_block(matrices: Sequence[np.ndarray], num_lanes: Sequence[int], number: int) -> Block:
    """At most a row (C,) of every lane."""
    cut = [m[number * n : (number + 1) * n] for m, n in zip(matrices, num_lanes, strict=True)]
    values = np.ascontiguousarray(np.concatenate(cut).T)
    return make_block(values, [*map(len, cut)], num_lanes)


def _read_codes(
    streams: Sequence[bytes],
    tables: Sequence[np.ndarray],
    num_lanes: Sequence[int],
    book: Book,
    transitions: np.ndarray | None,
) -> list[np.ndarray]:
    """The int16 values of matrices (R, C), given the numbers (R, C) of their tables."""
    reader, slots = Reader(streams, num_lanes), pack_slots(book.values, book.freqs)
    outs = [np.empty(t.shape, dtype=np.int16) for t in tables]
    for number in range(count_blocks(tables, num_lanes)):
        block = cut_block(tables, num_lanes, number)
        places = block.values.astype(np.int64) << PROB_BITS
        found = reader.read(block._replace(values=places), slots, transitions)
        for i, (out, n) in enumerate(zip(outs, num_lanes, strict=True)):
            rows = out[number * n : (number + 1) * n]
            rows[:] = found[:, block.bounds[i] : block.bounds[i + 1]].T
    reader.finish()
    return outs
