"""Tables and widths behind the weight coder: the constants are right, the fit is near the best."""

import hashlib
from itertools import product

import numpy as np
import pytest
from scipy.special import gamma, gammaincc

from underpar.artifact import width_fit, width_tables
from underpar.artifact.frequencies import PROB_BITS, TOTAL
from underpar.quant.trellis import LARGEST_CODE

# SHA-256 of all tables: a change of any one breaks every artifact that was written.
PINNED = "533727d60825a092be9275d4ce119031a985aa32bde7eefcd61871bbe5e6e36f"
KINDS = [
    (exponent, bucket, stride, parity)
    for exponent, bucket in product(
        range(len(width_tables.EXPONENTS)), range(width_tables.NUM_BUCKETS)
    )
    for stride in (1, 2)
    for parity in range(stride)
]


def fit(codes: np.ndarray, stride: int) -> tuple[width_tables.Scales, float]:
    """The fit for codes whose log steps are not known."""
    shifts = np.zeros(codes.shape[0], dtype=int), np.zeros(codes.shape[1], dtype=int)
    return width_fit.fit(codes, stride, shifts)


def mass_above(exponent: int, bucket: int, edge: np.ndarray) -> np.ndarray:
    beta = width_tables.EXPONENTS[exponent]
    width = 2 ** ((bucket - 36) / 8) * np.sqrt(gamma(1 / beta) / gamma(3 / beta))
    return gammaincc(1 / beta, (edge / width) ** beta) / 2


def test_constants_are_those_of_the_densities() -> None:
    for exponent, tail in enumerate(width_tables.TAILS):
        exact = mass_above(exponent, 36, np.arange(len(tail)) / 8)
        assert np.array_equal(np.rint(exact * 2**30), tail)
    assert np.array_equal(np.rint(2.0 ** (30 - np.arange(8) / 8)), width_tables.INVERSE_OCTAVE)


@pytest.mark.parametrize(("exponent", "units"), [(0, 0.07), (1, 0.25), (2, 1.5), (3, 6.2)])
def test_interpolation_stays_within_frequency_units(exponent: int, units: float) -> None:
    for bucket in range(0, width_tables.NUM_BUCKETS, 5):
        half_edges = np.arange(2 + int(18 * 2 ** ((bucket - 36) / 8)))
        exact = mass_above(exponent, bucket, half_edges / 2)
        masses = [width_tables.mass_above(exponent, bucket, h) for h in half_edges.tolist()]
        assert np.abs(np.array(masses) / 2**30 - exact).max() * TOTAL <= units


def test_tables_are_whole_and_even() -> None:
    for exponent, bucket, stride, parity in KINDS:
        table = width_tables.build_table(exponent, bucket, stride, parity)
        codes = table.values[:-stride]
        assert table.freqs.sum() == TOTAL
        assert table.freqs.min() >= 1
        assert np.array_equal(codes, np.arange(-table.limit, table.limit + 1, stride))
        assert np.all((codes - parity) % stride == 0)
        assert table.values[-stride:].max() < -LARGEST_CODE
        freqs = table.freqs[:-stride].astype(int)
        # Equal counts may differ by the unit that is left over.
        assert np.abs(freqs - freqs[::-1]).max() <= 1


def test_tables_are_the_same_on_every_machine() -> None:
    digest = hashlib.sha256()
    for kind in KINDS:
        table = width_tables.build_table(*kind)
        digest.update(table.values.astype("<i2").tobytes() + table.freqs.astype("<u4").tobytes())
    for center, bucket in product(
        range(0, width_tables.NUM_BUCKETS, 8), range(width_tables.NUM_BUCKETS)
    ):
        digest.update(width_tables.Spread(center, bucket).freqs().astype("<u4").tobytes())
    assert digest.hexdigest() == PINNED


@pytest.mark.parametrize("exponent", range(len(width_tables.EXPONENTS)))
def test_fit_finds_the_exponent(exponent: int) -> None:
    rng = np.random.default_rng(exponent)
    beta = width_tables.EXPONENTS[exponent]
    samples = rng.gamma(1 / beta, size=(256, 256)) ** (1 / beta)
    samples *= rng.choice([-1, 1], size=samples.shape) * 3 / samples.std()
    assert fit(np.rint(samples).astype(np.int16), 1)[0].exponent == exponent


def test_heavy_tails_pay() -> None:
    codes = np.rint(np.random.default_rng(0).laplace(size=(256, 512)) * 1.8).astype(np.int16)
    scales, bits = fit(codes, 1)
    _, counts = np.unique(codes, return_counts=True)
    entropy_bits = np.sum(counts * np.log2(codes.size / counts))
    assert width_tables.EXPONENTS[scales.exponent] == 1.2
    assert bits <= 1.004 * entropy_bits
    gaussian = width_tables.Scales(0, scales.rows, scales.columns)
    book = width_tables.Book([gaussian], 1)
    places = book.find_symbols(codes, book.find_tables(gaussian))
    gaussian_bits = np.sum(PROB_BITS - np.log2(book.freqs[places]))
    assert bits <= 0.98 * gaussian_bits


def test_fit_finds_rows_and_columns() -> None:
    rng = np.random.default_rng(2)
    rows, columns = rng.integers(30, 60, size=600), rng.integers(-6, 7, size=400)
    widths = 2 ** ((rows[:, None] + columns - 36) / 8)
    codes = np.rint(rng.standard_normal(widths.shape) * widths).astype(np.int16)
    scales, _ = fit(codes, 1)
    sums = scales.rows[:, None] + scales.columns
    assert np.abs(sums - rows[:, None] - columns).max() <= 3
    assert np.mean(sums == rows[:, None] + columns) >= 0.5


def test_widths_that_differ_by_chance_cost_nothing() -> None:
    # Halfway between two buckets it would pay to choose either.
    width = 2 ** (10 / 8)
    codes = np.rint(np.random.default_rng(3).normal(size=(512, 256)) * width).astype(np.int16)
    scales, bits = fit(codes, 1)
    assert not scales.columns.any()
    _, counts = np.unique(codes, return_counts=True)
    assert bits <= 1.001 * np.sum(counts * np.log2(codes.size / counts))


@pytest.mark.parametrize(
    ("center", "spread", "extra_bits"),
    [(0, 0.0, 0.01), (95, 0.0, 0.01), (47, 0.3, 0.02), (47, 4.0, 0.02), (47, 16.0, 0.03)],
)
def test_spread_of_indices_is_near_their_entropy(
    center: int, spread: float, extra_bits: float
) -> None:
    noise = np.rint(np.random.default_rng(4).normal(size=8192) * spread).astype(np.int64)
    indices = np.clip(center + noise, 0, width_tables.NUM_BUCKETS - 1)
    freqs = width_fit.fit_line(indices, 0 * indices)[0].freqs()
    assert freqs.sum() == TOTAL
    bits = np.mean(PROB_BITS - np.log2(freqs[indices]))
    _, counts = np.unique(indices, return_counts=True)
    assert bits <= np.sum(counts * np.log2(indices.size / counts)) / indices.size + extra_bits
