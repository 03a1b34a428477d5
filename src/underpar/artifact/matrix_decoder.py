"""Decoder of integer matrices whose rows and columns have known widths (width_tables.py).

Every symbol has a frequency table of its own. Otherwise this is the interleaved rANS of
rans_decoder.py. A coder codes whole rows: of L coders, coder l codes rows l, l + L, ..., each from
left to right. A table may therefore depend on the symbols before it in its row. With a trellis
(quant/trellis.py) it depends on the parity of the state; every row starts in state 0. Each matrix
has its own stream. Matrices with equal numbers of columns are decoded together, which is faster.
matrix_encoder.py writes the streams.

Byte layout of a stream, little-endian:
* u8: index of the exponent, plus 4 with a trellis;
* u32 x 3: bytes of the row section, bytes of the column section, number of escapes;
* row section: u8 center and u8 bucket of the spread of the row indices, then a stream of
  array_decoder.py. If 128 is added to the center, the expected shifts of width_tables.py were added
  to the indices, mod 96;
* column section: the same for the column indices + 48; absent if all column indices are 0;
* escapes in C order, i16 each;
* the codes: u32 states of the coders, then u16 words in the order in which the decoder needs them.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import NamedTuple

import numpy as np

from underpar.artifact import array_decoder, width_tables
from underpar.artifact.frequencies import PROB_BITS
from underpar.artifact.rans_decoder import Block, Decoder, make_block, pack_slots
from underpar.artifact.width_tables import Book, Scales, Spread
from underpar.errors import ArtifactError

# A coder costs about 3 bytes: 0.05 % of what it codes at 16,384 symbols of 3 bits.
_MAX_SYMBOLS_PER_CODER = 1 << 14
# A small matrix is a small part of an artifact, but with so few coders it would take as long to
# decode as a large one.
_MIN_SYMBOLS_PER_CODER = 1 << 11
_MIN_CODERS = 16
_MAX_SYMBOLS = 1 << 28

HEAD = struct.Struct("<BIII")
TRELLIS_FLAG = 4
SHIFT_FLAG = 128

Shape = tuple[int, int]
# Log steps of the rows (R,) and columns (C,) of a matrix; None without them.
Steps = tuple[np.ndarray | None, np.ndarray | None]


def choose_num_coders(shape: Shape) -> int:
    """How many coders encoder and decoder use for a matrix."""
    wanted = max(shape[0] * shape[1] // _MIN_CODERS, _MIN_SYMBOLS_PER_CODER)
    rows_per_coder = max(min(wanted, _MAX_SYMBOLS_PER_CODER) // shape[1], 1)
    return -(-shape[0] // rows_per_coder)


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
    num_coders: int | None = None,
) -> list[np.ndarray]:
    """The int16 codes (R, C) of each stream: what `decode` gives, but faster."""
    transitions = check_transitions(transitions)
    stride = 1 if transitions is None else 2
    coders = [num_coders or choose_num_coders(check_shape(shape)) for shape in shapes]
    parts = [split_stream(d, n, stride) for d, n in zip(streams, coders, strict=True)]
    scales = read_scales(parts, shapes, steps or [(None, None)] * len(shapes))
    outs: list[np.ndarray] = [np.empty(0)] * len(shapes)
    for members in group_by_columns(shapes):
        book = Book([scales[i] for i in members], stride)
        tables = [book.find_tables(scales[i]) for i in members]
        matrices = _read_codes(
            [parts[i].codes for i in members],
            tables,
            [coders[i] for i in members],
            book,
            transitions,
        )
        for i, codes, numbers in zip(members, matrices, tables, strict=True):
            book.fill_escapes(codes, parts[i].escapes, numbers)
            outs[i] = codes
    return outs


def group_by_columns(shapes: Sequence[Shape]) -> list[list[int]]:
    """Indices of the shapes, grouped by number of columns."""
    groups: dict[int, list[int]] = {}
    for i, (_, num_columns) in enumerate(shapes):
        groups.setdefault(num_columns, []).append(i)
    return [*groups.values()]


def check_transitions(transitions: np.ndarray | None) -> np.ndarray | None:
    """The checked transitions (S, 2) of a trellis; None for a machine with a single state."""
    if transitions is None:
        return None
    num_states = len(transitions)
    if transitions.shape != (num_states, 2) or not np.isin(transitions, range(num_states)).all():
        raise ArtifactError(
            f"transitions of shape {transitions.shape}: expected (states, 2), entries being states"
        )
    return transitions.astype(np.int64) if num_states > 1 else None


def check_shape(shape: Shape) -> Shape:
    """The shape; refused if such a matrix cannot be coded."""
    if len(shape) != 2 or min(shape) < 1 or shape[0] * shape[1] > _MAX_SYMBOLS:
        raise ArtifactError(
            f"codes of shape {shape}: expected rows and columns, {_MAX_SYMBOLS} codes at most"
        )
    return shape


class Parts(NamedTuple):
    """The sections of a stream."""

    exponent: int
    rows: bytes
    columns: bytes
    escapes: np.ndarray
    codes: bytes


def split_stream(data: bytes, num_coders: int, stride: int) -> Parts:
    """Cut a stream into its sections; refused if they do not fit into it."""
    if len(data) < HEAD.size:
        raise ArtifactError(f"weight stream of {len(data)} bytes has no header")
    kind, row_bytes, column_bytes, num_escapes = HEAD.unpack_from(data)
    exponent = kind - TRELLIS_FLAG * (stride - 1)
    if not 0 <= exponent < len(width_tables.EXPONENTS):
        raise ArtifactError(
            f"weight stream of kind {kind}: unknown, or its trellis is not the one expected"
        )
    ends = [*accumulate([HEAD.size, row_bytes, column_bytes, 2 * num_escapes])]
    if ends[-1] + 4 * num_coders > len(data):
        raise ArtifactError(
            f"weight stream of {len(data)} bytes: expected at least {ends[-1] + 4 * num_coders}"
        )
    rows, columns, escapes, codes = (data[a:b] for a, b in pairwise([*ends, len(data)]))
    return Parts(exponent, rows, columns, np.frombuffer(escapes, dtype="<i2"), codes)


def read_scales(
    parts: Sequence[Parts], shapes: Sequence[Shape], steps: Sequence[Steps]
) -> list[Scales]:
    """The widths of rows and columns that the sections of each stream hold."""
    lines, shifts = [], []
    for part, shape, logs in zip(parts, shapes, steps, strict=True):
        lines.append(part.rows)
        shifts.append(width_tables.expect_shifts(logs[0], shape[0]))
        if part.columns:
            lines.append(part.columns)
            shifts.append(width_tables.expect_shifts(logs[1], shape[1]))
    indices = iter(_read_lines(lines, shifts))
    scales = []
    for part, shape in zip(parts, shapes, strict=True):
        rows, columns = next(indices), np.zeros(shape[1], dtype=np.int64)
        if part.columns:
            columns = next(indices) - width_tables.COLUMN_BIAS
            if not columns.any():
                raise ArtifactError("weight stream stores columns that are all 0: expected none")
        scales.append(Scales(part.exponent, rows, columns))
    return scales


def _read_lines(lines: Sequence[bytes], shifts: Sequence[np.ndarray]) -> list[np.ndarray]:
    """The indices (N,) of each line, 0..95, without the shifts (N,) that may have been added."""
    freqs = []
    for line in lines:
        if len(line) < 2 or max(line[0] % SHIFT_FLAG, line[1]) >= width_tables.NUM_BUCKETS:
            raise ArtifactError(
                f"weight stream has a scale section of {len(line)} bytes without model"
            )
        freqs.append(Spread(line[0] % SHIFT_FLAG, line[1]).freqs())
    stored = array_decoder.decode_many(
        [line[2:] for line in lines], freqs, [s.size for s in shifts]
    )
    return [
        (indices - shift * (line[0] // SHIFT_FLAG)) % width_tables.NUM_BUCKETS
        for line, indices, shift in zip(lines, stored, shifts, strict=True)
    ]


def count_blocks(matrices: Sequence[np.ndarray], num_coders: Sequence[int]) -> int:
    """How many rows the coder with the most rows codes."""
    return max(-(-len(m) // n) for m, n in zip(matrices, num_coders, strict=True))


def cut_block(matrices: Sequence[np.ndarray], num_coders: Sequence[int], number: int) -> Block:
    """Block `number`: the next row (C,) of every coder that has one."""
    cut = [m[number * n : (number + 1) * n] for m, n in zip(matrices, num_coders, strict=True)]
    values = np.ascontiguousarray(np.concatenate(cut).T)
    return make_block(values, [*map(len, cut)], num_coders)


def _read_codes(
    streams: Sequence[bytes],
    tables: Sequence[np.ndarray],
    num_coders: Sequence[int],
    book: Book,
    transitions: np.ndarray | None,
) -> list[np.ndarray]:
    """The int16 codes of matrices (R, C) from the numbers (R, C) of their tables."""
    decoder, slots = Decoder(streams, num_coders), pack_slots(book.values, book.freqs)
    outs = [np.empty(t.shape, dtype=np.int16) for t in tables]
    for number in range(count_blocks(tables, num_coders)):
        block = cut_block(tables, num_coders, number)
        places = block.values.astype(np.int64) << PROB_BITS
        values = decoder.read(block._replace(values=places), slots, transitions)
        for i, (out, n) in enumerate(zip(outs, num_coders, strict=True)):
            rows = out[number * n : (number + 1) * n]
            rows[:] = values[:, block.bounds[i] : block.bounds[i + 1]].T
    decoder.finish()
    return outs
