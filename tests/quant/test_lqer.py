"""Low-rank corrections: the closest product, what is stored of it, and which matrices get one."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from underpar.artifact.array_encoder import encode
from underpar.artifact.frequencies import normalize_counts
from underpar.errors import RecipeError
from underpar.quant.allocate import Sensitivity
from underpar.quant.calibration import Calibration
from underpar.quant.gptq import damp, factor_inverse
from underpar.quant.logsteps import from_index
from underpar.quant.lowrank import Factor, LowRank
from underpar.quant.lqer import (
    Norm,
    Settings,
    correct,
    correct_error,
    factorize,
    fit_left,
    round_factor,
    stored_bytes,
)
from underpar.quant.rounding import round_tensor
from underpar.quant.schemes import QuantizedModel, QuantizedTensor, dequantize, parse_scheme

CPU = torch.device("cpu")
PLAIN = Settings(tensors=9, weighted=False)
WEIGHTED = Settings(tensors=9)
Weights = dict[str, np.ndarray]
SHAPES = [(24, 40), (40, 24), (32, 32), (1, 5), (5, 1)]


def draw(*shape: int, seed: int = 0) -> Tensor:
    source = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=source, dtype=torch.float64)


def hessian_of(num_cols: int, seed: int = 0) -> Tensor:
    """Of inputs with a mean of their own, and eigenvalues that fall off."""
    inputs = draw(4 * num_cols, num_cols, seed=seed) / (1 + torch.arange(num_cols))
    inputs = inputs @ torch.linalg.qr(draw(num_cols, num_cols, seed=seed + 1)).Q + 0.3
    return inputs.T @ inputs


def norm_of(rows: int, cols: int, seed: int = 0) -> Norm:
    damped = damp(hessian_of(cols, seed)[None], 0.01)[0]
    return Norm(draw(rows, seed=seed + 2).exp(), factor_inverse(damped)[0])


def case_of(weights: Weights) -> tuple[QuantizedModel, Weights, Calibration]:
    """Rounded matrices, what they were, and a calibration of both."""
    tensors = {name: round_tensor(w, parse_scheme("int4:6")) for name, w in weights.items()}
    cols = {name: w.shape[1] for name, w in weights.items()}
    hessians = {name: hessian_of(cols[name], seed).float() for seed, name in enumerate(cols)}
    return tensors, weights, Calibration(hessians, dict.fromkeys(weights, 1), 1)


def weights_of(**shapes: tuple[int, int]) -> Weights:
    return {n: draw(*shapes[n], seed=seed).float().numpy() for seed, n in enumerate(shapes)}


def cost_of(
    tensor: QuantizedTensor, weight: np.ndarray, hessian: Tensor, weighted: bool = True
) -> float:
    """tr(D H D^T) with the damped Hessian, or the squared error."""
    error = torch.from_numpy(weight - dequantize(tensor)).double()
    damped = damp(hessian.double()[None], 0.01)[0][0]
    return float(((error @ damped) * error).sum() if weighted else error.square().sum())


def corrected(tensors: QuantizedModel) -> set[str]:
    return {name for name, tensor in tensors.items() if tensor.correction is not None}


@pytest.mark.parametrize("shape", SHAPES)
def test_all_of_the_rank_gives_the_weight_back(shape: tuple[int, int]) -> None:
    weight, norm = draw(*shape), norm_of(*shape)
    rounded = torch.from_numpy(
        dequantize(round_tensor(weight.float().numpy(), parse_scheme("int4")))
    )
    error = weight - rounded.double()
    left, basis = factorize(norm.whiten(error), norm.rows, rank=min(shape))
    torch.testing.assert_close(rounded + left @ (basis @ norm.inverse), weight, rtol=0, atol=1e-6)


@pytest.mark.parametrize("shape", SHAPES)
def test_factors_are_the_closest_of_their_rank(shape: tuple[int, int]) -> None:
    norm = norm_of(*shape)
    error = draw(*shape, seed=7)
    white = norm.whiten(error)
    # Whatever costs are counted in.
    norm = replace(norm, rows=1e-18 * norm.rows)
    values = 1e9 * torch.linalg.svdvals(norm.rows.sqrt()[:, None] * white)
    for rank in range(1, min(shape) + 3):
        left, basis = factorize(white, norm.rows, rank)
        assert left.shape[1] == len(basis) == min(rank, *shape)
        rest = 1e18 * norm.cost(error - left @ (basis @ norm.inverse))
        assert rest == pytest.approx(float(values[rank:].square().sum()), rel=1e-6, abs=1e-8)
        # No column of the left factor outweighs another.
        weights = norm.rows @ left.square() / norm.rows.sum()
        torch.testing.assert_close(weights, torch.ones_like(weights), rtol=1e-5, atol=0)


def test_whitened_squares_are_the_cost() -> None:
    norm, error = norm_of(6, 9), draw(6, 9)
    hessian = torch.linalg.inv(norm.inverse.T @ norm.inverse)
    expected = sum(float(g * e @ hessian @ e) for g, e in zip(norm.rows, error, strict=True))
    assert norm.cost(error) == pytest.approx(expected, rel=1e-8)


@pytest.mark.parametrize("seed", range(4))
def test_fitting_the_left_factor_again_never_hurts(seed: int) -> None:
    norm, error = norm_of(30, 48, seed), draw(30, 48, seed=seed)
    white = norm.whiten(error)
    left, basis = factorize(white, norm.rows, rank=3)
    by_rank = Norm(torch.ones(3, dtype=torch.float64), norm.inverse)
    right = round_factor(basis @ norm.inverse, by_rank, bits=3, group=16)
    rounded = torch.from_numpy(right.values()).double()
    refitted = fit_left(white, norm.whiten(rounded))
    assert norm.cost(error - refitted @ rounded) < norm.cost(error - left @ rounded)


def test_two_bits_leave_no_more_than_the_best_ternary_step() -> None:
    values = draw(8192, 4)
    norm = Norm(torch.ones(8192, dtype=torch.float64), torch.eye(4, dtype=torch.float64))
    factor = round_factor(values, norm, bits=2, group=values.numel())
    rest = torch.from_numpy(factor.values()).double() - values
    # 59 % with the largest value as the yardstick, 19 % with the best of three levels.
    assert float(rest.square().sum() / values.square().sum()) < 0.19
    assert set(np.unique(factor.codes)) == {-2, -1, 0, 1}


def test_errors_of_a_factor_are_fed_back() -> None:
    norm, values = norm_of(4, 96), draw(4, 96, seed=3)
    factor = round_factor(values, norm, bits=4, group=32)
    steps = torch.from_numpy(np.repeat(2.0 ** (factor.steps / 16), 32)).view_as(values)
    nearest = (values / steps).round().clamp(-8, 7) * steps
    restored = torch.from_numpy(factor.values()).double()
    assert norm.cost(values - restored) < 0.8 * norm.cost(values - nearest)


@given(
    st.tuples(st.integers(1, 12), st.integers(1, 40)),
    st.integers(1, 8),
    st.booleans(),
    st.booleans(),
    st.integers(0, 99),
)
@settings(deadline=None, max_examples=40)
def test_what_is_stored_fits_and_no_error_grows(
    shape: tuple[int, int], rank: int, symmetric: bool, weighted: bool, seed: int
) -> None:
    weight = draw(*shape, seed=seed).float().numpy()
    tensors, weights, calibration = case_of({"a": weight})
    options = Settings(1, rank, 2, 4, group=16, symmetric=symmetric, weighted=weighted)
    corrected = correct(tensors, weights, calibration, None, options, CPU)["a"]
    before = cost_of(tensors["a"], weight, calibration.hessians["a"], weighted)
    assert cost_of(corrected, weight, calibration.hessians["a"], weighted) <= before
    # Whether it was kept or not.
    norm = norm_of(*shape, seed=seed)
    error = torch.from_numpy(weight - dequantize(tensors["a"])).double()
    correction = correct_error(error, norm, options)
    kept, left, right = min(rank, *shape), correction.left, correction.right
    assert left.codes.shape == (shape[0], kept) and right.codes.shape == (kept, shape[1])
    assert left.codes.min() >= -2 and left.codes.max() <= 1
    assert right.codes.min() >= -8 and right.codes.max() <= 7
    assert len(left.steps) == (shape[0] if symmetric else 1)
    assert len(right.steps) == (kept if symmetric else -(-kept * shape[1] // 16))
    for factor in (left, right):
        assert factor.codes.dtype == np.int8 and factor.steps.dtype == np.int16
        assert np.abs(factor.steps).max() <= 512
    assert correction.product().shape == shape


def test_the_weighted_form_costs_less_where_it_counts() -> None:
    tensors, weights, calibration = case_of(weights_of(a=(96, 64), b=(64, 128)))
    by_form = {
        options.weighted: correct(tensors, weights, calibration, None, options, CPU)
        for options in (PLAIN, WEIGHTED)
    }
    assert corrected(by_form[True]) == {"a", "b"}
    for name, hessian in calibration.hessians.items():
        costs = [cost_of(by_form[w][name], weights[name], hessian) for w in (True, False)]
        assert costs[0] < 0.7 * costs[1]


def test_costly_rows_come_first() -> None:
    tensors, weights, calibration = case_of(weights_of(a=(96, 64)))
    rows = np.where(np.arange(96) < 8, 100.0, 0.01)
    costs = {"a": Sensitivity(rows, np.ones(64))}
    hessian = damp(calibration.hessians["a"].double()[None], 0.01)[0][0]
    errors = []
    for sensitivity in (costs, None):
        options = replace(WEIGHTED, left_bits=6)
        tensor = correct(tensors, weights, calibration, sensitivity, options, CPU)["a"]
        error = torch.from_numpy(weights["a"] - dequantize(tensor)).double()
        errors.append(float(((error @ hessian) * error).sum(1) @ torch.from_numpy(rows)))
    assert errors[0] < 0.6 * errors[1]


def test_the_best_few_by_loss_a_byte_are_corrected() -> None:
    tensors, weights, calibration = case_of(weights_of(a=(64, 64), b=(64, 64), c=(64, 64)))
    costs = {
        n: Sensitivity(np.full(64, g), np.ones(64)) for n, g in zip("abc", (1, 9, 3), strict=True)
    }
    for number, expected in ((0, set()), (1, {"b"}), (2, {"b", "c"}), (9, {"a", "b", "c"})):
        options = Settings(tensors=number)
        result = correct(tensors, weights, calibration, costs, options, CPU)
        assert corrected(result) == expected
        assert all(result[n] is tensors[n] for n in tensors.keys() - expected)
        assert list(result) == list(tensors)


@pytest.mark.parametrize("shape", [(48, 96), (96, 48), (64, 64)])
def test_published_corrections_are_singular_vectors_rounded_from_their_largest_value(
    shape: tuple[int, int],
) -> None:
    """PR 1797: A = U S in 2 bits with one step, B = V^T in 4 bits with one step per 32 entries."""
    tensors, weights, calibration = case_of(weights_of(a=shape))
    options = Settings(tensors=1, group=32, published=True)
    tensor = correct(tensors, weights, calibration, None, options, CPU)["a"]
    assert tensor.correction is not None
    left, right = tensor.correction.left, tensor.correction.right
    u, s, v = np.linalg.svd((weights["a"] - dequantize(tensors["a"])).astype(np.float64))
    a, b = u[:, :4] * s[:4], v[:4]
    # Singular vectors have no sign of their own.
    signs = np.sign((right.values() * b).sum(1))
    a, b = a * signs, b * signs[:, None]
    steps = np.abs(a).max() / 1.5, np.abs(b).reshape(-1, 32).max(1) / 7.5
    assert from_index(left.steps) == pytest.approx(steps[0], rel=0.022)
    assert from_index(right.steps) == pytest.approx(steps[1], rel=0.022)
    codes = np.clip(np.rint(a / from_index(left.steps)), -2, 1)
    assert (codes == left.codes).mean() > 0.99
    codes = np.clip(np.rint(b.reshape(-1, 32) / from_index(right.steps)[:, None]), -8, 7)
    assert (codes.reshape(b.shape) == right.codes).mean() > 0.99


def test_published_corrections_go_to_the_largest_errors() -> None:
    tensors, weights, calibration = case_of(weights_of(a=(64, 64), b=(96, 64), c=(64, 64)))
    # Even where no error costs anything, and finer steps would gain more.
    costs = {n: Sensitivity(np.full(len(w), 1e-9), np.ones(64)) for n, w in weights.items()}
    norms = {n: np.linalg.norm(weights[n] - dequantize(t)) for n, t in tensors.items()}
    largest = sorted(norms, key=lambda name: -norms[name])
    for number in (0, 1, 2, 3, 9):
        options = Settings(tensors=number, published=True)
        result = correct(tensors, weights, calibration, costs, options, CPU)
        assert corrected(result) == set(largest[:number])


def test_published_corrections_of_no_error_are_zero() -> None:
    weights = weights_of(a=(32, 48))
    tensors = {"a": round_tensor(weights["a"], parse_scheme("int8"))}
    exact = {"a": dequantize(tensors["a"])}
    calibration = Calibration({"a": torch.eye(48)}, {"a": 1}, 1)
    options = Settings(tensors=1, published=True, symmetric=True)
    tensor = correct(tensors, exact, calibration, None, options, CPU)["a"]
    assert tensor.correction is not None and not tensor.correction.left.codes.any()
    assert np.array_equal(dequantize(tensor), exact["a"])


def test_white_errors_are_left_to_finer_steps() -> None:
    weights = weights_of(a=(128, 128))
    tensors = {"a": round_tensor(weights["a"], parse_scheme("int4:6"))}
    calibration = Calibration({"a": torch.eye(128)}, {"a": 1}, 1)
    assert not corrected(correct(tensors, weights, calibration, None, WEIGHTED, CPU))


def test_twice_the_same_and_over_an_older_correction() -> None:
    tensors, weights, calibration = case_of(weights_of(a=(64, 64)))
    first = correct(tensors, weights, calibration, None, WEIGHTED, CPU)["a"].correction
    zero = Factor(np.zeros((64, 1), dtype=np.int8), np.zeros(1, dtype=np.int16), 64)
    older = LowRank(zero, Factor(zero.codes.T, zero.steps, 64))
    tensors = {"a": replace(tensors["a"], correction=older)}
    again = correct(tensors, weights, calibration, None, WEIGHTED, CPU)["a"].correction
    assert first is not None and again is not None
    for factor, other in ((first.left, again.left), (first.right, again.right)):
        assert np.array_equal(factor.codes, other.codes) and np.array_equal(
            factor.steps, other.steps
        )


def test_what_meets_no_input_is_not_chased() -> None:
    tensors, weights, calibration = case_of(weights_of(a=(64, 48)))
    hessian = calibration.hessians["a"]
    hessian[5], hessian[:, 5] = 0, 0
    weights["a"][:, 5] = 100.0
    fitted = correct(tensors, weights, calibration, None, WEIGHTED, CPU)["a"].correction
    assert fitted is not None
    assert not fitted.product()[:, 5].any() and fitted.product()[:, 4].any()


def test_only_calibrated_matrices_of_rows_are_corrected() -> None:
    weights = weights_of(a=(64, 64), b=(64, 64), c=(64, 64), d=(64, 64))
    tensors, _, calibration = case_of(weights)
    tensors["a"] = round_tensor(weights["a"], parse_scheme("fp16"))
    tensors["b"] = round_tensor(weights["b"], parse_scheme("ternary:16"))
    del calibration.hessians["c"]  # type: ignore[attr-defined]
    assert corrected(correct(tensors, weights, calibration, None, WEIGHTED, CPU)) == {"d"}


def test_bytes_are_those_of_a_coder() -> None:
    correction = correct_error(draw(512, 256), norm_of(512, 256), WEIGHTED)
    expected = 0
    for factor in (correction.left, correction.right):
        symbols = factor.codes.reshape(-1).astype(np.int64) - int(factor.codes.min())
        freqs = normalize_counts(np.bincount(symbols))
        expected += len(encode(symbols, freqs)) + 2 * len(freqs) + len(factor.steps)
    assert stored_bytes(correction) == pytest.approx(expected, rel=0.03)


@pytest.mark.parametrize(
    "change", [{"tensors": -1}, {"rank": 0}, {"group": 0}, {"left_bits": 1}, {"right_bits": 9}]
)
def test_bad_settings_are_refused(change: dict[str, int]) -> None:
    with pytest.raises(RecipeError, match=r"LQER .*expected"):
        Settings(**change)  # type: ignore[arg-type]
