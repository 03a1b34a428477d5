"""Quantization: the scale rule's invariants."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from underpar.errors import ArtifactError, RecipeError
from underpar.quant.schemes import Scheme, dequantize, parse_scheme, quantize

WEIGHTS = hnp.arrays(
    np.float32,
    hnp.array_shapes(min_dims=1, max_dims=2, max_side=9),
    elements=st.floats(-100, 100, width=32),
)
SCHEMES = st.sampled_from(["fp16", "int8", "int6", "int6:12.85", "int2", "int5:6"])


@settings(max_examples=200, deadline=None)
@given(WEIGHTS, SCHEMES)
def test_dequantizing_is_finite_and_repeats(weight: np.ndarray, text: str) -> None:
    scheme = parse_scheme(text)
    tensor = quantize(weight, scheme)
    restored = dequantize(tensor)
    assert restored.shape == weight.shape
    assert np.isfinite(restored).all()
    if tensor.codes is not None:
        assert (tensor.steps > 0).all()
        assert np.abs(tensor.codes.astype(int)).max() <= scheme.limit


@pytest.mark.parametrize("text", ["int8", "int6:12.85"])
def test_zero_and_constant_rows(text: str) -> None:
    weight = np.array([[0.0] * 5, [1.0] * 5], dtype=np.float32)
    tensor = quantize(weight, parse_scheme(text))
    assert (dequantize(tensor)[0] == 0).all()
    assert (tensor.steps > 0).all()


def test_the_largest_value_survives_without_sigmas() -> None:
    weight = np.random.default_rng(0).standard_normal((6, 50)).astype(np.float32)
    error = np.abs(dequantize(quantize(weight, Scheme(8))) - weight).max(axis=1)
    assert (error <= np.abs(weight).max(axis=1) / 127 * 0.51).all()


@pytest.mark.parametrize("power", [-3, 4])
def test_a_power_of_two_leaves_the_codes(power: int) -> None:
    weight = np.random.default_rng(1).standard_normal((4, 64)).astype(np.float32)
    scheme = parse_scheme("int6:12.85")
    ours, scaled = quantize(weight, scheme), quantize(weight * 2.0**power, scheme)
    np.testing.assert_array_equal(ours.codes, scaled.codes)


def test_entropy_and_error_of_gaussian_rows() -> None:
    weight = np.random.default_rng(2).standard_normal((256, 4096)).astype(np.float32)
    tensor = quantize(weight, parse_scheme("int6:12.85"))
    assert tensor.codes is not None
    share = np.bincount(tensor.codes.reshape(-1).astype(int) + 31) / tensor.codes.size
    share = share[share > 0]
    assert -(share * np.log2(share)).sum() == pytest.approx(3.328, abs=0.003)
    assert ((dequantize(tensor) - weight) ** 2).mean() == pytest.approx(0.0143, rel=0.01)
    assert np.abs(tensor.codes.astype(int)).max() < 31


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_diverged_run_cannot_be_packed(bad: float) -> None:
    with pytest.raises(ArtifactError, match="NaN or infinite"):
        quantize(np.array([[1.0, bad]], dtype=np.float32), Scheme(6))


def test_halves_that_overflow_are_refused() -> None:
    with pytest.raises(ArtifactError, match="too large for fp16"):
        quantize(np.array([1e6], dtype=np.float32), Scheme())


@pytest.mark.parametrize("text", ["int9", "int1", "int", "float", "int6:x", "int6:-1", "int6:inf"])
def test_unknown_schemes_are_named(text: str) -> None:
    with pytest.raises(RecipeError, match=text):
        parse_scheme(text)


@pytest.mark.parametrize("text", ["fp16", "int6", "int7:14", "int6:12.85", "int6:12.8512345"])
def test_schemes_print_as_they_are_read(text: str) -> None:
    assert str(parse_scheme(text)) == text
