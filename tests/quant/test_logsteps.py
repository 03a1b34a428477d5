"""Log steps: a grid of sixteenths of an octave that is the same on every machine."""

from decimal import Decimal, localcontext

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from underpar.errors import ArtifactError
from underpar.quant.logsteps import LARGEST_INDEX, MANTISSAS, from_index, from_indices, to_index

EVERY_INDEX = np.arange(-LARGEST_INDEX, LARGEST_INDEX + 1)
STEPS = st.floats(2.0**-32, 2.0**32, width=32)


def test_mantissas_are_the_nearest_floats() -> None:
    assert MANTISSAS.dtype == np.float32
    with localcontext() as context:
        context.prec = 50
        for i, mantissa in enumerate(MANTISSAS):
            exact = Decimal(2) ** (Decimal(i) / 16)
            neighbours = (np.nextafter(mantissa, np.float32(side)) for side in (0, 3))
            apart = [abs(Decimal(float(m)) - exact) for m in (mantissa, *neighbours)]
            assert apart[0] == min(apart)


def test_steps_are_these_bits() -> None:
    steps = from_index(np.array([-512, -129, -3, 0, 5, 16, 47, 512]))
    bits = [0x2F800000, 0x3B75257D, 0x3F60CCDF, 0x3F800000]
    bits += [0x3F9EF532, 0x40000000, 0x40F5257D, 0x4F800000]
    assert steps.view(np.uint32).tolist() == bits


def test_round_trip_and_monotone() -> None:
    steps = from_index(EVERY_INDEX)
    assert steps.dtype == np.float32
    assert (np.diff(steps) > 0).all()
    indices = to_index(steps)
    assert indices.dtype == np.int16
    assert np.array_equal(indices, EVERY_INDEX)


@settings(max_examples=300, deadline=None)
@given(STEPS)
def test_the_nearest_index_is_within_half_a_sixteenth(step: float) -> None:
    ratio = float(from_index(to_index(np.array([step])))[0]) / step
    assert 2 ** (-1 / 32) * (1 - 1e-7) <= ratio <= 2 ** (1 / 32) * (1 + 1e-7)


@settings(max_examples=200, deadline=None)
@given(st.floats(2.0**-8, 2.0**8), st.integers(-20, 20))
def test_a_power_of_two_moves_by_octaves(step: float, octaves: int) -> None:
    moved = to_index(np.array([step * 2.0**octaves]))
    assert moved[0] == to_index(np.array([step]))[0] + 16 * octaves


def test_extremes_stay_on_the_grid() -> None:
    steps = from_index(to_index(np.array([0.0, 1e-300, 1e300])))
    assert steps.tolist() == [2.0**-32, 2.0**-32, 2.0**32]


@settings(max_examples=50, deadline=None)
@given(st.integers(0, 2**32 - 1))
def test_rows_and_columns_add(seed: int) -> None:
    rng = np.random.default_rng(seed)
    rows, cols = rng.integers(-512, 513, 5), rng.integers(-512, 513, 7)
    steps = from_indices(rows.astype(np.int16), cols.astype(np.int16))
    assert steps.shape == (5, 7)
    assert steps.dtype == np.float32
    assert np.isfinite(steps * np.float32(32767)).all()
    assert steps.min() >= np.finfo(np.float32).tiny
    exact = np.exp2((rows[:, None] + cols) / 16.0)
    assert np.allclose(steps, exact, rtol=1e-7, atol=0)
    assert np.array_equal(from_indices(rows, np.zeros(1, int))[:, 0], from_index(rows))


@pytest.mark.parametrize("bad", [-1.0, np.nan, np.inf])
def test_steps_that_are_none_are_refused(bad: float) -> None:
    with pytest.raises(ArtifactError, match="a step is"):
        to_index(np.array([1.0, bad]))


@pytest.mark.parametrize("bad", [1025, -1025, 2**40])
def test_indices_off_the_grid_are_refused(bad: int) -> None:
    with pytest.raises(ArtifactError, match=f"log step {bad} "):
        from_index(np.array([0, bad]))
