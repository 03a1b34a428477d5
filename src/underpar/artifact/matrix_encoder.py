"""Encoder of integer matrices: writes the streams that matrix_decoder.py reads."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from underpar.artifact import array_encoder, width_fit, width_tables
from underpar.artifact.matrix_decoder import (
    HEAD,
    SHIFT_FLAG,
    TRELLIS_FLAG,
    Steps,
    check_shape,
    check_transitions,
    choose_num_coders,
    count_blocks,
    cut_block,
    group_by_columns,
)
from underpar.artifact.rans_encoder import Encoder
from underpar.artifact.width_tables import Book, Scales, expect_shifts
from underpar.errors import ArtifactError
from underpar.quant.trellis import LARGEST_CODE

Shifts = tuple[np.ndarray, np.ndarray]


def encode(
    codes: np.ndarray, transitions: np.ndarray | None = None, steps: Steps = (None, None)
) -> bytes:
    """The stream of codes (R, C).

    With `transitions` (S, 2) every row must be a path of that trellis. Known log `steps` make the
    stream shorter if the widths follow them.
    """
    return encode_many([codes], transitions, [steps])[0]


def encode_many(
    matrices: Sequence[np.ndarray],
    transitions: np.ndarray | None = None,
    steps: Sequence[Steps] | None = None,
    *,
    num_coders: int | None = None,
) -> list[bytes]:
    """The stream of each matrix: what `encode` gives, but faster."""
    transitions = check_transitions(transitions)
    matrices = [_check_codes(codes, transitions) for codes in matrices]
    stride = 1 if transitions is None else 2
    shifts = [
        _expect_shifts(codes, logs)
        for codes, logs in zip(matrices, steps or [(None, None)] * len(matrices), strict=True)
    ]
    streams = [b""] * len(matrices)
    for members in group_by_columns([codes.shape for codes in matrices]):
        scales = [width_fit.fit(matrices[i], stride, shifts[i])[0] for i in members]
        book = Book(scales, stride)
        places = [
            book.find_symbols(matrices[i], book.find_tables(s))
            for i, s in zip(members, scales, strict=True)
        ]
        coders = [num_coders or choose_num_coders(matrices[i].shape) for i in members]
        tails = write_codes(places, book, coders)
        for i, scale, symbols, tail in zip(members, scales, places, tails, strict=True):
            escapes = matrices[i][book.values[symbols] < -LARGEST_CODE]
            streams[i] = _write_head(scale, stride, shifts[i], escapes) + tail
    return streams


def _expect_shifts(codes: np.ndarray, steps: Steps) -> Shifts:
    return expect_shifts(steps[0], codes.shape[0]), expect_shifts(steps[1], codes.shape[1])


def _check_codes(codes: np.ndarray, transitions: np.ndarray | None) -> np.ndarray:
    """The codes (R, C) as int16; refused if they cannot be coded."""
    if codes.ndim != 2 or codes.dtype.kind not in "iu":
        raise ArtifactError(
            f"codes of shape {codes.shape} and type {codes.dtype}: expected a 2-D integer array"
        )
    check_shape(codes.shape)
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


def _write_head(scales: Scales, stride: int, shifts: Shifts, escapes: np.ndarray) -> bytes:
    """The part of a stream before its codes."""
    rows, columns = _write_line(scales.rows, shifts[0]), b""
    if scales.columns.any():
        columns = _write_line(scales.columns + width_tables.COLUMN_BIAS, shifts[1])
    kind = scales.exponent + TRELLIS_FLAG * (stride - 1)
    head = HEAD.pack(kind, len(rows), len(columns), escapes.size)
    return head + rows + columns + escapes.astype("<i2").tobytes()


def _write_line(indices: np.ndarray, shifts: np.ndarray) -> bytes:
    spread, used = width_fit.fit_line(indices, shifts)
    moved = (indices + used) % width_tables.NUM_BUCKETS
    flag = SHIFT_FLAG if used.any() else 0
    return bytes([spread.center + flag, spread.bucket]) + array_encoder.encode(
        moved, spread.freqs()
    )


def write_codes(places: Sequence[np.ndarray], book: Book, num_coders: Sequence[int]) -> list[bytes]:
    """States and words of matrices (R, C) of places in the book; all have the same C."""
    encoder = Encoder(num_coders, book.freqs, book.starts)
    for number in reversed(range(count_blocks(places, num_coders))):
        encoder.write(cut_block(places, num_coders, number))
    return encoder.finish()
