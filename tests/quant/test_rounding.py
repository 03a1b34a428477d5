"""Rounding to nearest: the invariants of the scale rule, for every scheme that needs no inputs."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from underpar.errors import ArtifactError, RecipeError
from underpar.quant.clip_search import search_steps
from underpar.quant.rounding import as_rows, round_tensor
from underpar.quant.schemes import Scheme, dequantize, parse_scheme, steps_of

WEIGHTS = hnp.arrays(
    np.float32,
    hnp.array_shapes(min_dims=1, max_dims=3, max_side=7),
    elements=st.floats(-100, 100, width=32),
)
SCHEMES = st.sampled_from(
    [
        *("fp16", "int8", "int6", "int6:12.85", "int8/0", "int5:6/1", "clip6", "clip2"),
        *("ternary:1", "int6:12.85+log", "int8/0+log", "clip6+log"),
    ]
)


@settings(max_examples=200, deadline=None)
@given(WEIGHTS, SCHEMES)
def test_dequantizing_is_finite_and_repeats(weight: np.ndarray, text: str) -> None:
    scheme = parse_scheme(text)
    tensor = round_tensor(weight, scheme)
    restored = dequantize(tensor)
    assert restored.shape == weight.shape and restored.dtype == np.float32
    assert np.isfinite(restored).all()
    assert dequantize(round_tensor(weight, scheme)).tobytes() == restored.tobytes()
    assert tensor.steps.dtype == (np.int16 if scheme.log else np.float16)
    if tensor.codes is not None:
        assert (steps_of(tensor) > 0).all()
        assert np.abs(tensor.codes.astype(int)).max() <= scheme.limit
    # What is stored is as much as the scheme says.
    assert len(tensor.steps) == scheme.num_halves(weight.shape) + scheme.num_indices(weight.shape)


@pytest.mark.parametrize("text", ["int8", "int6:12.85", "clip6", "ternary:5"])
def test_zero_and_constant_rows(text: str) -> None:
    weight = np.array([[0.0] * 5, [1.0] * 5], dtype=np.float32)
    tensor = round_tensor(weight, parse_scheme(text))
    restored = dequantize(tensor)
    assert (restored[0] == 0).all() and np.isfinite(restored).all()
    assert (tensor.steps > 0).all()
    if text != "int6:12.85":
        # A constant row has no deviation, but a largest value and a mean magnitude.
        assert np.allclose(restored[1], 1, rtol=1e-3)


def test_the_largest_value_survives_without_sigmas() -> None:
    weight = np.random.default_rng(0).standard_normal((6, 50)).astype(np.float32)
    error = np.abs(dequantize(round_tensor(weight, Scheme(8))) - weight).max(axis=1)
    assert (error <= np.abs(weight).max(axis=1) / 127 * 0.51).all()


@pytest.mark.parametrize("power", [-3, 4])
@pytest.mark.parametrize("text", ["int6:12.85", "clip6", "ternary:16"])
def test_a_power_of_two_leaves_the_codes(power: int, text: str) -> None:
    weight = np.random.default_rng(1).standard_normal((4, 64)).astype(np.float32)
    scheme = parse_scheme(text)
    ours, scaled = round_tensor(weight, scheme), round_tensor(weight * 2.0**power, scheme)
    np.testing.assert_array_equal(ours.codes, scaled.codes)


def test_entropy_and_error_of_gaussian_rows() -> None:
    weight = np.random.default_rng(2).standard_normal((256, 4096)).astype(np.float32)
    tensor = round_tensor(weight, parse_scheme("int6:12.85"))
    assert tensor.codes is not None
    share = np.bincount(tensor.codes.reshape(-1).astype(int) + 31) / tensor.codes.size
    share = share[share > 0]
    assert -(share * np.log2(share)).sum() == pytest.approx(3.328, abs=0.003)
    assert ((dequantize(tensor) - weight) ** 2).mean() == pytest.approx(0.0143, rel=0.01)
    assert np.abs(tensor.codes.astype(int)).max() < 31


def test_clipping_takes_the_steps_of_the_search() -> None:
    weight = np.random.default_rng(3).standard_normal((6, 800)).astype(np.float32)
    weight[2, 5] = 30.0
    tensor = round_tensor(weight, parse_scheme("clip4"))
    expected = search_steps(torch.from_numpy(weight), 7).numpy()[:, 0].astype(np.float16)
    assert tensor.steps.tobytes() == expected.tobytes()
    # An outlier is clipped: its row is closer than with a step from its largest value.
    errors = [
        ((dequantize(t) - weight)[2] ** 2).sum() for t in (tensor, round_tensor(weight, Scheme(4)))
    ]
    assert errors[0] < errors[1]


def test_ternary_runs_have_a_step_each() -> None:
    weight = np.random.default_rng(4).standard_normal((3, 12)).astype(np.float32)
    weight[1] *= 100
    tensor = round_tensor(weight, parse_scheme("ternary:4"))
    assert tensor.codes is not None and tensor.codes.shape == (9, 4)
    assert set(tensor.codes.flat) == {-1, 0, 1}
    runs = weight.reshape(9, 4)
    np.testing.assert_allclose(tensor.steps, np.abs(runs).mean(axis=1), rtol=1e-3)
    steps = tensor.steps.astype(np.float32)[:, None]
    expected = np.sign(runs) * (np.abs(runs) > steps / 2) * steps
    assert np.array_equal(dequantize(tensor), expected.reshape(3, 12))


@pytest.mark.parametrize("shape", [(4, 6), (6,), (2, 3, 6), ()])
def test_runs_must_fill_rows(shape: tuple[int, ...]) -> None:
    weight = np.ones(shape, dtype=np.float32)
    with pytest.raises(RecipeError, match=r"ternary:4.*not whole runs of 4.*divisor"):
        round_tensor(weight, parse_scheme("ternary:4"))
    group = 3 if shape else 1
    assert dequantize(round_tensor(weight, parse_scheme(f"ternary:{group}"))).shape == shape


@pytest.mark.parametrize(
    ("shape", "scheme", "rows"),
    [
        ((4, 6), "int8", (4, 6)),
        ((6,), "int8", (1, 6)),
        ((), "int8", (1, 1)),
        ((11, 8, 12), "int8", (88, 12)),
        ((11, 8, 12), "int8/1", (11, 96)),
        ((11, 8, 12), "int8/0", (1, 1056)),
        ((6,), "int8/0", (1, 6)),
        ((2, 3, 6), "ternary:2", (18, 2)),
    ],
)
def test_any_tensor_has_rows(shape: tuple[int, ...], scheme: str, rows: tuple[int, int]) -> None:
    assert as_rows(np.ones(shape), parse_scheme(scheme)).shape == rows


def test_a_gate_has_a_step_per_head() -> None:
    """PR 2014: symmetric int8, the step of a row from its largest value."""
    gate = np.random.default_rng(5).standard_normal((11, 8, 12)).astype(np.float32)
    gate[3, 2] *= 1000
    tensor = round_tensor(gate, parse_scheme("int8"))
    largest = np.abs(gate).max(axis=-1).reshape(-1)
    assert tensor.steps.tobytes() == (largest / 127).astype(np.float16).tobytes()
    error = np.abs(dequantize(tensor) - gate).reshape(88, 12)
    # A head with large values does not coarsen the other heads of its layer.
    assert (error <= largest[:, None] / 127 * 0.51).all()


@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("text", ["fp16", "int6", "clip6", "ternary:2"])
def test_a_diverged_run_cannot_be_packed(bad: float, text: str) -> None:
    with pytest.raises(ArtifactError, match="NaN or infinite"):
        round_tensor(np.array([[1.0, bad]], dtype=np.float32), parse_scheme(text))


def test_halves_that_overflow_are_refused() -> None:
    with pytest.raises(ArtifactError, match="too large for fp16"):
        round_tensor(np.array([1e6], dtype=np.float32), Scheme())
