"""Frequency tables of weight codes, by the width of their row and their column.

The codes of a matrix are modeled as rounded samples of generalized Gaussians, with a density
proportional to exp(-|x|^exponent). The probability of integer n is the mass between n - 1/2 and
n + 1/2. The standard deviation is 2^(k / 8); the bucket is k + 36. The symbol in row r and column j
has bucket rows[r] + columns[j], clipped to 0..95. All symbols of a matrix have the same exponent.

Frequencies are computed from integer constants with integer arithmetic, so that they are the same
on every machine. width_fit.py chooses the widths.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

import numpy as np

from underpar.artifact.frequencies import PROB_BITS, normalize_counts
from underpar.errors import ArtifactError
from underpar.quant.trellis import LARGEST_CODE

# Widths are in eighths of an octave. With 500 integers per row, finer widths cost more than they
# save.
NUM_BUCKETS = 96
_UNIT_BUCKET = 36
# Added to column indices, which are stored without a sign.
COLUMN_BIAS = NUM_BUCKETS // 2

# An escape first decodes to this value plus a residue of n; all integers that may be coded are
# larger.
_ESCAPE = -(1 << 15)
# An integer with less mass than this, a sixteenth of a unit of frequency, is cheaper as an escape.
_LEAST_MASS = 1 << 12

# 2^30 / 2^(i / 8)
INVERSE_OCTAVE = (
    1073741824, 984625594, 902905651, 827968132, 759250125, 696235434, 638450708, 585461881,
)  # fmt: skip
EXPONENTS = (2.0, 1.8, 1.5, 1.2)
# 2^30 P(x > i / 8) for variance 1 and these exponents, up to the last that is not 0, or x = 8.
TAILS = (
    (
        536870912, 483464900, 430885802, 379922320, 331289660, 285599787, 243339267, 204855931,
        170354782, 139902672, 113440581, 90801753, 71733686, 55921848, 43013192, 32637845, 24427768,
        18031675, 13125928, 9421521, 6667577, 4651931, 3199496, 2169106, 1449442, 954584, 619576,
        396295, 249784, 155135, 94937, 57244, 34007, 19904, 11477, 6519, 3648, 2011, 1092, 584, 308,
        160, 82, 41, 20, 10, 5, 2, 1,
    ),
    (
        536870912, 480484603, 425492354, 372873076, 323374327, 277544512, 235746957, 198175052,
        164871283, 135749774, 110620994, 89217087, 71216327, 56265527, 43999505, 34057127, 26093725,
        19789996, 14857687, 11042496, 8124731, 5918230, 4268068, 3047497, 2154485, 1508162, 1045376,
        717519, 487692, 328266, 218821, 144462, 94456, 61170, 39236, 24929, 15689, 9780, 6040, 3695,
        2240, 1345, 800, 471, 275, 159, 91, 52, 29, 16, 9, 5, 3, 1, 1,
    ),
    (
        536870912, 473877576, 414039106, 358478021, 307756771, 262107833, 221534570, 185877633,
        154864895, 128150716, 105347029, 86047625, 69846665, 56352265, 45195943, 36038678, 28574231,
        22530353, 17668413, 13781889, 10694109, 8255546, 6340903, 4846153, 3685691, 2789651,
        2101463, 1575670, 1176006, 873741, 646266, 475907, 348930, 254733, 185177, 134049, 96636,
        69379, 49609, 35330, 25062, 17708, 12464, 8739, 6104, 4247, 2944, 2034, 1400, 960, 656, 446,
        303, 205, 138, 93, 62, 41, 27, 18, 12, 8, 5, 3, 2,
    ),
    (
        536870912, 462558764, 395792509, 336861375, 285407442, 240846866, 202510977, 169715217,
        141796405, 118133054, 98155693, 81351035, 67262288, 55487086, 45674016, 37518389, 30757687,
        25166984, 20554519, 16757540, 13638480, 11081500, 8989391, 7280849, 5888074, 4754690,
        3833947, 3087172, 2482458, 1993533, 1598819, 1280626, 1024482, 818573, 653271, 520740,
        414622, 329758, 261976, 207901, 164813, 130519, 103255, 81604, 64429, 50819, 40046, 31527,
        24797, 19486, 15299, 12000, 9405, 7365, 5762, 4504, 3518, 2746, 2141, 1668, 1299, 1010, 786,
        610, 474,
    ),
)  # fmt: skip


def mass_above(exponent: int, bucket: int, half_edge: int) -> int:
    """2^30 P(x > half_edge / 2), half_edge >= 0, by cubic interpolation of the constants."""
    octave, step = divmod(bucket - _UNIT_BUCKET, 8)
    one = 1 << 16
    # Cells are an eighth of the standard deviation wide.
    cell, part = divmod(half_edge * INVERSE_OCTAVE[step] >> 12 + octave, one)
    tail = TAILS[exponent]
    # Nodes at -1, 0, 1 and 2 cells; the density is even.
    y = ((1 << 30) - tail[1], *tail, 0, 0, 0, 0)[min(cell, len(tail) + 1) :][:4]
    first, second = y[1] - y[0], y[2] - 2 * y[1] + y[0]
    third = y[3] - 3 * y[2] + 3 * y[1] - y[0]
    slope = 6 * first * one * one + 3 * second * part * one + third * part * (part - one)
    # The cubic swings a little below 0 where the constants end.
    return max(y[0] + slope * (part + one) // (6 * one**3), 0)


def _mass_of(exponent: int, bucket: int, n: int, stride: int) -> int:
    """2^30 P(|x - n| < stride / 2), n >= 0, at least 1."""
    above = mass_above(exponent, bucket, 2 * n + stride)
    from_edge = mass_above(exponent, bucket, 2 * n - stride) if n else (1 << 30) - above
    return max(from_edge - above, 1)


class Table(NamedTuple):
    """Symbols: the integers -limit, ..., limit, then escapes; with their values and frequencies."""

    values: np.ndarray
    freqs: np.ndarray
    limit: int


@cache
def build_table(exponent: int, bucket: int, stride: int, parity: int) -> Table:
    """The table of the integers n = parity (mod stride).

    Stride 1 has all integers. Stride 2 is for a trellis: half of the integers, and an escape for
    each branch bit, floor(n / 2) mod 2, because the next state depends on it.
    """
    masses: list[int] = []
    limit = parity - stride
    while limit < stride or masses[-1] >= _LEAST_MASS:
        limit += stride
        masses.append(_mass_of(exponent, bucket, limit, stride))
    mass_beyond = 2 * mass_above(exponent, bucket, 2 * limit + stride)
    mirrored = masses[::-1] if parity else masses[:0:-1]
    counts = np.array(mirrored + masses + [mass_beyond // stride + 1] * stride)
    escapes = [_ESCAPE + residue for residue in range(parity, 2 * stride, 2)]
    values = np.array([*range(-limit, limit + 1, stride), *escapes], dtype=np.int16)
    return Table(values, normalize_counts(counts), limit)


@dataclass(frozen=True)
class Scales:
    """The model of a matrix: exponent (an index), rows (R,) in 0..95, columns (C,) in -48..47."""

    exponent: int
    rows: np.ndarray
    columns: np.ndarray

    def buckets(self) -> np.ndarray:
        """The bucket (R, C) of every symbol."""
        return clip_buckets(self.rows[:, None] + self.columns)

    def kinds(self) -> list[tuple[int, int]]:
        """Exponent and bucket of every table that may be needed."""
        sums = np.unique(self.rows)[:, None] + np.unique(self.columns)
        return [(self.exponent, bucket) for bucket in np.unique(clip_buckets(sums)).tolist()]


def clip_buckets(sums: np.ndarray) -> np.ndarray:
    """Sums of indices of rows and columns as buckets, 0..95."""
    return np.clip(sums, 0, NUM_BUCKETS - 1)


class Book:
    """The tables that some matrices need, end to end; a trellis needs pairs, even integers first.

    `values`, `freqs` and `starts` hold the value, the frequency and the interval of every symbol.
    """

    def __init__(self, scales: Sequence[Scales], stride: int) -> None:
        kinds = sorted({kind for s in scales for kind in s.kinds()})
        tables = [build_table(e, b, stride, parity) for e, b in kinds for parity in range(stride)]
        self._stride = stride
        self._number_of = np.zeros((len(EXPONENTS), NUM_BUCKETS), dtype=np.int16)
        for k, kind in enumerate(kinds):
            self._number_of[kind] = k * stride
        self.values = np.concatenate([t.values for t in tables])
        self.freqs = np.concatenate([t.freqs for t in tables])
        # Every table has the same total, a power of two.
        totals = np.cumsum(self.freqs, dtype=np.uint32) - self.freqs
        self.starts = totals & ((1 << PROB_BITS) - 1)
        self._limits = np.array([t.limit for t in tables], dtype=np.int32)
        self._ends = np.cumsum([t.values.size for t in tables], dtype=np.int32)

    def find_tables(self, scales: Scales) -> np.ndarray:
        """The number (R, C) of every symbol's table; of a pair, that of the even integers."""
        return self._number_of[scales.exponent][scales.buckets()]

    def find_symbols(self, codes: np.ndarray, tables: np.ndarray) -> np.ndarray:
        """Places of codes in `values`, `freqs` and `starts`, given the numbers of their tables."""
        # Strides are 1 and 2, so that masks and shifts serve as remainders and quotients.
        stride, halving = self._stride, self._stride - 1
        codes = codes.astype(np.int32)
        tables = tables + (codes & halving)
        limits, escapes = self._limits[tables], self._ends[tables] - stride
        inside = escapes - 1 + (codes - limits >> halving)
        outside = escapes + ((codes & 2 * stride - 1) >> 1)
        return np.where(abs(codes) > limits, outside, inside)

    def fill_escapes(self, codes: np.ndarray, escapes: np.ndarray, tables: np.ndarray) -> None:
        """Replace marks in `codes` by the escapes, in C order; refuse escapes that need no mark."""
        marked = codes < -LARGEST_CODE
        if np.count_nonzero(marked) != escapes.size:
            raise ArtifactError(
                f"weight stream stores {escapes.size} escapes: "
                f"expected {np.count_nonzero(marked)} as its codes have"
            )
        marks = self.values[self.find_symbols(escapes, tables[marked])]
        # A mark itself would pass as an escape of every table.
        if np.any(marks != codes[marked]) or np.any(abs(escapes.astype(np.int32)) > LARGEST_CODE):
            raise ArtifactError(
                "weight stream is damaged: an escape that its table does not ask for"
            )
        codes[marked] = escapes


class Spread(NamedTuple):
    """The model of a line of indices in 0..95: a Gaussian around `center`, as wide as `bucket`."""

    center: int
    bucket: int

    def freqs(self) -> np.ndarray:
        """Frequencies (96,) of the indices."""
        return _build_spread(*self)


@cache
def _build_spread(center: int, bucket: int) -> np.ndarray:
    away = [abs(index - center) for index in range(NUM_BUCKETS)]
    return normalize_counts(np.array([_mass_of(0, bucket, n, 1) for n in away]))


def expect_shifts(steps: np.ndarray | None, num_indices: int) -> np.ndarray:
    """How far each index (N,) is expected to lie below the index of the middle log step.

    Codes are weights divided by steps: a step larger by one octave makes the codes narrower by one
    octave. Log steps count sixteenths of an octave and indices eighths, hence half as much.
    """
    if steps is None:
        return np.zeros(num_indices, dtype=np.int64)
    assert steps.shape == (num_indices,)
    return steps.astype(np.int64) - int(np.sort(steps)[num_indices // 2]) >> 1
