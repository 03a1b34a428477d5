"""The width of each row and column of a matrix of integers, for the tables of bells.py.

The fit weighs code lengths under the very tables against those of the scales themselves (a two-part
code, Rissanen 1978), so that widths which differ by chance cost nothing.
"""

from __future__ import annotations

from functools import cache
from itertools import product

import numpy as np

from underpar.artifact.streams import PROB_BITS
from underpar.artifact.width_tables import (
    COLUMN_BIAS,
    EXPONENTS,
    NUM_BUCKETS,
    Scales,
    Spread,
    build_table,
    clip_buckets,
)

# An escape is its symbol and 16 plain bits.
_ESCAPE_BITS = 16
# Lengths are whole multiples of 2^-16 bit: their sums are exact, whatever the order.
_UNITS_PER_BIT = 1 << 16
# Lines that are counted together.
_LINES_AT_ONCE = 64


def fit(
    codes: np.ndarray, stride: int, shifts: tuple[np.ndarray, np.ndarray]
) -> tuple[Scales, float]:
    """Scales for codes (R, C), and the length in bits of both together, which is about least.

    `shifts` are those that rows (R,) and columns (C,) are expected to have.
    """
    prices = _price_tables(stride)
    magnitudes = np.minimum(abs(codes.astype(np.int64)), prices.shape[2] - 1)
    flat = np.zeros(codes.shape[1], dtype=np.int64)
    rows, _ = _choose_indices(_price_lines(magnitudes, flat, prices[0]), shifts[0])
    draft, _ = _alternate(magnitudes, rows, prices[0], shifts)
    keys = clip_buckets(draft[0][:, None] + draft[1]) * prices.shape[2] + magnitudes
    counts = np.bincount(keys.reshape(-1), minlength=prices[0].size).reshape(prices[0].shape)
    exponent = int((prices * counts).sum(axis=(1, 2)).argmin())
    fitted, units = _alternate(magnitudes, draft[0], prices[exponent], shifts)
    lines = _price_lines(magnitudes, flat, prices[exponent])
    rows, units_flat = _choose_indices(lines, shifts[0])
    if units_flat <= units:
        fitted, units = (rows, flat), units_flat
    return Scales(exponent, *fitted), units / _UNITS_PER_BIT


def fit_line(indices: np.ndarray, shifts: np.ndarray) -> tuple[Spread, np.ndarray]:
    """The spread under which the indices (N,) are about shortest, shifted or not, and by what."""
    plain, shifted = _fit_spread(indices), _fit_spread((indices + shifts) % NUM_BUCKETS)
    return (plain[1], 0 * shifts) if plain[0] <= shifted[0] else (shifted[1], shifts)


def _fit_spread(indices: np.ndarray) -> tuple[float, Spread]:
    costs = _price_tables(1)[0]
    mean = int(indices.sum()) // indices.size
    found = []
    for center in (mean, min(mean + 1, NUM_BUCKETS - 1)):
        counts = np.bincount(abs(indices - center))
        units = costs[:, : counts.size] @ counts
        found.append((float(units.min()), Spread(center, int(units.argmin()))))
    return min(found)


def _alternate(
    magnitudes: np.ndarray,
    rows: np.ndarray,
    prices: np.ndarray,
    shifts: tuple[np.ndarray, np.ndarray],
) -> tuple[tuple[np.ndarray, np.ndarray], float]:
    """Columns fitted to the rows, then rows to the columns; and the length of all in units."""
    lines = _price_lines(magnitudes.T, rows - COLUMN_BIAS, prices)
    columns, _ = _choose_indices(lines, shifts[1])
    column_prices = _price_indices(columns, shifts[1])
    column_units = np.take_along_axis(column_prices, columns[:, None], axis=1).sum()
    columns -= COLUMN_BIAS
    rows, units = _choose_indices(_price_lines(magnitudes, columns, prices), shifts[0])
    return (rows, columns), units + float(column_units)


def _price_lines(lines: np.ndarray, shifts: np.ndarray, prices: np.ndarray) -> np.ndarray:
    """Units (N, 96) of each line of magnitudes (N, M) at each index, with shifts (M,) added."""
    width = int(lines.max()) + 1
    values, group = np.unique(shifts, return_inverse=True)
    buckets = clip_buckets(np.arange(NUM_BUCKETS)[:, None] + values)
    priced = prices[buckets, :width].reshape(NUM_BUCKETS, -1).T  # (groups * width, 96)
    units = np.empty((len(lines), NUM_BUCKETS))
    # Of all pairs of shift and magnitude lines of one size have few.
    for chosen in np.array_split(lines.max(axis=1).argsort(), -(-len(lines) // _LINES_AT_ONCE)):
        pairs = lines[chosen] + group * width
        used = np.zeros(len(priced), dtype=bool)
        used[pairs] = True
        keys = (np.cumsum(used) - 1)[pairs]
        num_used = int(used.sum())
        keys += np.arange(len(keys))[:, None] * num_used
        counts = np.bincount(keys.reshape(-1), minlength=len(keys) * num_used)
        units[chosen] = counts.reshape(-1, num_used).astype(np.float64) @ priced[used]
    return units


def _choose_indices(units: np.ndarray, shifts: np.ndarray) -> tuple[np.ndarray, float]:
    """The index (N,) for each line of units (N, 96) and the total, indices included."""
    indices = units.argmin(axis=1)
    for _ in range(3):
        priced = units + _price_indices(indices, shifts)
        indices = priced.argmin(axis=1)
    return indices, float(priced.min(axis=1).sum())


def _price_indices(indices: np.ndarray, shifts: np.ndarray) -> np.ndarray:
    """Units (N, 96) of each index of each line under the spread of these."""
    spread, used = fit_line(indices, shifts)
    places = np.arange(NUM_BUCKETS) + used[:, None]
    units: np.ndarray = _to_units(spread.freqs())[places % NUM_BUCKETS]
    return units


@cache
def _price_tables(stride: int) -> np.ndarray:
    """Units (exponents, 96, M) of each magnitude; the last magnitude is an escape everywhere."""
    kinds = [*product(range(len(EXPONENTS)), range(NUM_BUCKETS), range(stride))]
    tables = [build_table(exponent, bucket, stride, z) for exponent, bucket, z in kinds]
    prices = np.empty((len(EXPONENTS), NUM_BUCKETS, max(t.limit for t in tables) + 2))
    for (exponent, bucket, parity), table in zip(kinds, tables, strict=True):
        units = _to_units(table.freqs)
        price = prices[exponent, bucket, parity::stride]
        price[:] = units[-1] + _ESCAPE_BITS * _UNITS_PER_BIT
        # The middle of the integers is 0 or, of an odd table, the first above it.
        positive = units[(units.size - stride) // 2 : units.size - stride]
        price[: positive.size] = positive
    return prices


def _to_units(freqs: np.ndarray) -> np.ndarray:
    return np.rint(_UNITS_PER_BIT * (PROB_BITS - np.log2(freqs)))
