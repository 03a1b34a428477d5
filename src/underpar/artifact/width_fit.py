"""Choose the width of each row and column of a matrix of integers, for width_tables.py.

The fit minimizes the length of the codes under the tables that will be used, plus the length of the
widths themselves (a two-part code, Rissanen 1978). Differences between widths that are due to
chance are therefore not stored.
"""

from __future__ import annotations

from functools import cache
from itertools import product

import numpy as np

from underpar.artifact.frequencies import PROB_BITS
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
# Lengths are whole multiples of 2^-16 bit, so that their sums are exact in any order.
_UNITS_PER_BIT = 1 << 16
# Lines that are counted together.
_LINES_AT_ONCE = 64


def fit(
    codes: np.ndarray, stride: int, shifts: tuple[np.ndarray, np.ndarray]
) -> tuple[Scales, float]:
    """The scales with which codes (R, C) and scales together are about shortest; and that length.

    The length is in bits. `shifts` are the expected shifts of rows (R,) and columns (C,).
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
    """The spread with which the indices (N,) are about shortest, and the shifts that were added.

    These are `shifts`, or zeros if the indices are shorter without them.
    """
    plain, shifted = _fit_spread(indices), _fit_spread((indices + shifts) % NUM_BUCKETS)
    return (plain[1], 0 * shifts) if plain[0] <= shifted[0] else (shifted[1], shifts)


def _fit_spread(indices: np.ndarray) -> tuple[float, Spread]:
    costs = _price_tables(1)[0]
    mean = int(indices.sum()) // indices.size
    candidates = []
    for center in (mean, min(mean + 1, NUM_BUCKETS - 1)):
        counts = np.bincount(abs(indices - center))
        units = costs[:, : counts.size] @ counts
        candidates.append((float(units.min()), Spread(center, int(units.argmin()))))
    return min(candidates)


def _alternate(
    magnitudes: np.ndarray,
    rows: np.ndarray,
    prices: np.ndarray,
    shifts: tuple[np.ndarray, np.ndarray],
) -> tuple[tuple[np.ndarray, np.ndarray], float]:
    """Fit columns to the rows, then rows to the columns; also returns the whole length in units."""
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
    # Lines are taken in groups of similar size: each has few of all pairs of shift and magnitude.
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
    """The cheapest index (N,) of each line of units (N, 96), and the total with the indices."""
    indices = units.argmin(axis=1)
    for _ in range(3):
        priced = units + _price_indices(indices, shifts)
        indices = priced.argmin(axis=1)
    return indices, float(priced.min(axis=1).sum())


def _price_indices(indices: np.ndarray, shifts: np.ndarray) -> np.ndarray:
    """Units (N, 96) that each index would take for each line, under the spread of `indices`."""
    spread, used = fit_line(indices, shifts)
    places = np.arange(NUM_BUCKETS) + used[:, None]
    units: np.ndarray = _to_units(spread.freqs())[places % NUM_BUCKETS]
    return units


@cache
def _price_tables(stride: int) -> np.ndarray:
    """Units (exponents, 96, M) of each magnitude; the last one is an escape in every table."""
    kinds = [*product(range(len(EXPONENTS)), range(NUM_BUCKETS), range(stride))]
    tables = [build_table(exponent, bucket, stride, z) for exponent, bucket, z in kinds]
    prices = np.empty((len(EXPONENTS), NUM_BUCKETS, max(t.limit for t in tables) + 2))
    for (exponent, bucket, parity), table in zip(kinds, tables, strict=True):
        units = _to_units(table.freqs)
        price = prices[exponent, bucket, parity::stride]
        price[:] = units[-1] + _ESCAPE_BITS * _UNITS_PER_BIT
        # The integer in the middle is 0, or the first above 0 in a table of odd integers.
        positive = units[(units.size - stride) // 2 : units.size - stride]
        price[: positive.size] = positive
    return prices


def _to_units(freqs: np.ndarray) -> np.ndarray:
    return np.rint(_UNITS_PER_BIT * (PROB_BITS - np.log2(freqs)))
