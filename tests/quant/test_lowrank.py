"""What two stored factors add to a matrix: their groups, their order of sums, and no library's."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as nps

from underpar.errors import ArtifactError
from underpar.quant.logsteps import from_index
from underpar.quant.lowrank import Factor, LowRank
from underpar.quant.schemes import QuantizedTensor, dequantize, parse_scheme


def test_groups_run_on_over_the_ends_of_rows() -> None:
    codes = np.arange(1, 7, dtype=np.int8).reshape(2, 3)
    factor = Factor(codes, np.array([0, 16], dtype=np.int16), group=4)
    assert factor.values().tolist() == [[1, 2, 3], [4, 10, 12]]
    assert factor.values().dtype == np.float32


@given(st.data(), st.integers(1, 5), st.integers(1, 4), st.integers(1, 6))
@settings(deadline=None, max_examples=40)
def test_the_product_is_that_of_the_values(
    data: st.DataObject, rows: int, rank: int, cols: int
) -> None:
    factors = []
    for shape in ((rows, rank), (rank, cols)):
        codes = data.draw(nps.arrays(np.int8, shape))
        group = data.draw(st.integers(1, 2 * codes.size))
        num_steps = -(-codes.size // group)
        steps = data.draw(nps.arrays(np.int16, num_steps, elements=st.integers(-512, 512)))
        factors.append(Factor(codes, steps, group))
        each = np.array([from_index(steps[place // group]) for place in range(codes.size)])
        assert np.array_equal(factors[-1].values().reshape(-1), codes.reshape(-1) * each)
    computed = LowRank(*factors).product()
    left, right = (factor.values().astype(np.float64) for factor in factors)
    # Relative to the terms, which may cancel.
    size = np.abs(left) @ np.abs(right)
    assert computed.dtype == np.float32
    assert (np.abs(computed - left @ right) <= 1e-6 * size).all()


def test_sums_are_taken_one_rank_at_a_time() -> None:
    ones = np.ones((1, 3), dtype=np.int8)
    large = Factor(ones, np.array([24 * 16, 0, 0], dtype=np.int16), group=1)
    unit = Factor(ones.T, np.zeros(1, dtype=np.int16), group=3)
    # 2^24 + 1 is no fp32 number, so 2^24 + 1 + 1 stays there; the other way round it does not.
    assert LowRank(large, unit).product().item() == 2.0**24
    reverse = Factor(ones, large.steps[::-1], group=1)
    assert LowRank(reverse, unit).product().item() == 2.0**24 + 2


def test_a_correction_is_added_to_the_rounded_weight() -> None:
    codes = np.array([[1, -2], [3, 0]], dtype=np.int8)
    steps = np.array([0.5, 2.0], dtype=np.float16)
    plain = QuantizedTensor((2, 2), parse_scheme("int4"), steps, codes)
    one = np.zeros(1, dtype=np.int16)
    left = Factor(np.array([[1], [-2]], dtype=np.int8), one, 2)
    right = Factor(np.array([[3, 4]], dtype=np.int8), one, 64)
    corrected = QuantizedTensor((2, 2), plain.scheme, steps, codes, None, LowRank(left, right))
    assert (dequantize(corrected) - dequantize(plain)).tolist() == [[3, 4], [-6, -8]]


def test_a_step_out_of_reach_is_refused() -> None:
    with pytest.raises(ArtifactError, match="2000 is not within 1024"):
        Factor(np.ones((1, 1), dtype=np.int8), np.array([2000], dtype=np.int16), 1).values()
