"""Log steps: steps on a logarithmic grid of sixteenths of an octave, step = 2^(index / 16).

An index is a small integer and takes fewer bits than an fp16 step. The grid changes a step by at
most 2.2 %, which is harmless if weights are rounded with the changed step (PR 1894 changed its
steps after the solve, and lost by it). A step is a literal of the table times a power of two, so
that it has the same bits on every machine.
"""

from __future__ import annotations

import numpy as np

from underpar.errors import ArtifactError, DivergedError

STEPS_PER_OCTAVE = 16
# Steps of 2^-32 ... 2^32: the sum of a row index and a column index is still a normal float.
LARGEST_INDEX = 32 * STEPS_PER_OCTAVE

# 2^(i/16) rounded to fp32, as literals, so that no weight depends on the pow of a machine.
MANTISSAS = np.array(
    [
        1.0,
        1.0442737,
        1.0905077,
        1.1387886,
        1.1892071,
        1.2418578,
        1.2968396,
        1.3542556,
        1.4142135,
        1.4768262,
        1.5422108,
        1.6104903,
        1.6817929,
        1.7562522,
        1.8340081,
        1.9152066,
    ],
    dtype=np.float32,
)


def to_index(step: np.ndarray) -> np.ndarray:
    """The nearest index (int16) of each step, clipped to -512 ... 512; a step of 0 gets -512."""
    values = np.asarray(step, dtype=np.float64)
    if not np.isfinite(values).all() or (values < 0).any():
        raise DivergedError("a step is negative, NaN or infinite")
    # Mantissa and exponent are handled apart: the index of a step times a power of two then differs
    # by whole octaves, however log2 rounds.
    mantissas, exponents = np.frexp(np.maximum(values, 2.0**-64))
    sixteenths = np.rint(STEPS_PER_OCTAVE * np.log2(mantissas)).astype(np.int64)
    indices = STEPS_PER_OCTAVE * exponents.astype(np.int64) + sixteenths
    return np.clip(indices, -LARGEST_INDEX, LARGEST_INDEX).astype(np.int16)


def from_index(index: np.ndarray) -> np.ndarray:
    """The fp32 step of each index, or sum of two indices: -1024 ... 1024."""
    indices = np.asarray(index, dtype=np.int64)
    if indices.size and np.abs(indices).max() > 2 * LARGEST_INDEX:
        worst = indices.flat[np.abs(indices).argmax()]
        raise ArtifactError(f"log step {worst} is not within 1024 of 0; the file is damaged")
    octaves = (indices // STEPS_PER_OCTAVE).astype(np.int32)
    return np.ldexp(MANTISSAS[indices % STEPS_PER_OCTAVE], octaves)


def from_indices(rows: np.ndarray, cols: np.ndarray) -> np.ndarray:
    """The fp32 steps (R, C) of row indices (R,) and column indices (C,): 2^((u + v) / 16)."""
    total = np.asarray(rows, dtype=np.int64)[:, None] + np.asarray(cols, dtype=np.int64)
    return from_index(total)
