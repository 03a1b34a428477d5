"""Allocation: the same cost of an error everywhere, and predictions that hold for Gaussians."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from underpar.quant.allocate import (
    LEAST,
    Layout,
    Sensitivity,
    Steps,
    allocate,
    conditional_variances,
    deviations,
    gaussian_bits,
    rate_curve,
    sensitivities,
    spread,
)
from underpar.quant.calibration import HEAD, Calibration
from underpar.quant.fisher import Fisher
from underpar.quant.logsteps import to_index

POSITIVE = st.floats(1e-12, 1e6)
VECTORS = hnp.arrays(np.float64, st.integers(1, 12), elements=POSITIVE)


def random_hessian(num_columns: int, num_inputs: int, seed: int) -> torch.Tensor:
    source = torch.Generator().manual_seed(seed)
    spectrum = torch.arange(1, num_columns + 1).double().rsqrt()
    basis = torch.linalg.qr(torch.randn(num_columns, num_columns, generator=source).double()).Q
    x = torch.randn(num_inputs, num_columns, generator=source).double() * spectrum @ basis
    return (x.T @ x).float()


@settings(max_examples=60, deadline=None)
@given(VECTORS, VECTORS, st.floats(1e-6, 1e3))
def test_step_squared_times_cost_is_the_same_everywhere(
    rows: np.ndarray, columns: np.ndarray, constant: float
) -> None:
    sensitivity = Sensitivity(rows, columns)
    by_row, by_column = spread(sensitivity, constant, columns=True)
    costs = np.outer(by_row**2 * rows, by_column**2 * columns)
    np.testing.assert_allclose(costs, constant**2, rtol=1e-6)
    # Without columns: the same for the mean of each row; without rows: for that of the matrix.
    by_row, by_column = spread(sensitivity, constant)
    np.testing.assert_allclose(by_row**2 * rows * columns.mean(), constant**2, rtol=1e-6)
    assert (by_column == 1).all()
    by_row, by_column = spread(sensitivity, constant, rows=False)
    np.testing.assert_allclose(by_row**2 * rows.mean() * columns.mean(), constant**2, rtol=1e-6)
    assert len(set(by_row)) == 1 and (by_column == 1).all()


@pytest.mark.parametrize("columns", [False, True])
@pytest.mark.parametrize("rows", [False, True])
def test_equal_sensitivities_give_one_step(rows: bool, columns: bool) -> None:
    steps = allocate(Sensitivity(np.ones(5), np.ones(7)), 0.125, rows, columns)
    assert np.array_equal(np.broadcast_to(steps.values(), (5, 7)), np.full((5, 7), 0.125))
    assert (steps.columns is not None) == columns


def test_log_steps_are_near_the_exact_ones() -> None:
    rng = np.random.default_rng(0)
    sensitivity = Sensitivity(rng.lognormal(size=30), rng.lognormal(size=40))
    exact = np.outer(*spread(sensitivity, 0.01, columns=True))
    steps = allocate(sensitivity, 0.01, columns=True)
    assert steps.rows.dtype == np.int16 and steps.values().dtype == np.float32
    assert np.abs(np.log2(steps.values() / exact)).max() <= 1 / 16 + 1e-6
    # What nothing reads is rounded as coarsely as can be stored, and not to infinity.
    coarse = allocate(Sensitivity(np.full(2, LEAST), np.full(3, LEAST)), 1.0).values()
    assert np.isfinite(coarse).all() and (coarse > 1e9).all()


def test_conditional_variances_are_what_later_columns_leave_unexplained() -> None:
    hessian = random_hessian(24, 200, 0)
    damping = 0.01 * hessian.double().diagonal().mean().expand(24)
    damped = hessian.double() + torch.diag(damping)
    variances = conditional_variances(hessian, 0.01)
    for j in range(24):
        cross, later = damped[j, j + 1 :], damped[j + 1 :, j + 1 :]
        left = damped[j, j] - cross @ torch.linalg.solve(later, cross)
        assert variances[j] == pytest.approx(float(left), rel=1e-9)
    inverse = torch.linalg.cholesky(torch.linalg.inv(damped), upper=True)
    np.testing.assert_allclose(variances, inverse.diagonal().numpy() ** -2, rtol=1e-8)
    # Whatever the order, their product is the determinant.
    assert np.log(variances).sum() == pytest.approx(float(torch.logdet(damped)), rel=1e-9)


def test_fewer_inputs_than_columns_and_dead_columns() -> None:
    hessian = random_hessian(16, 5, 1)
    hessian[3] = hessian[:, 3] = 0
    variances = conditional_variances(hessian)
    assert np.isfinite(variances).all() and (variances > 0).all()
    assert (conditional_variances(torch.zeros(4, 4)) > 0).all()


def test_sensitivities_are_in_nats_a_token() -> None:
    shared, head = random_hessian(8, 300, 2), random_hessian(6, 100, 3)
    names = ("blocks.0.attn.q.weight", "blocks.0.attn.k.weight")
    hessians = {**dict.fromkeys(names, shared), HEAD: head}
    inputs = {names[0]: 300, names[1]: 300, HEAD: 100}
    fisher = Fisher(
        {names[0]: torch.tensor([1.0, 2.0]), names[1]: torch.zeros(3), HEAD: torch.ones(5)},
        lookup=torch.tensor([0.0, 0.0, 3.0, 0.0, 0.0]),
        num_tokens=7,
    )
    by_name = sensitivities(Calibration(hessians, inputs, num_tokens=100), fisher)
    # A sum over three visits of each token, over tokens.
    np.testing.assert_allclose(by_name[names[0]].columns, conditional_variances(shared) / 100)
    assert by_name[names[0]].rows.tolist() == [1.0, 2.0]
    assert (by_name[names[1]].rows == LEAST).all()
    # Both roles of the embedding: the row's cost is that of the head plus that of the table.
    of_head = by_name[HEAD]
    mean = of_head.columns.mean()
    np.testing.assert_allclose(of_head.rows * mean, [mean, mean, mean + 3, mean, mean], rtol=1e-6)


@pytest.mark.parametrize(
    # From a table of exact sums: k / R of the published recipes.
    ("ratio", "bits"),
    [(4 / 31, 5.002), (12.85 / 31, 3.328), (25 / 31, 2.396), (14 / 63, 4.220)],
)
def test_rates_of_gaussians(ratio: float, bits: float) -> None:
    assert gaussian_bits(ratio) == pytest.approx(bits, abs=5e-4)


@pytest.mark.parametrize("ratio", [0.1, 0.3, 0.499, 0.501, 0.999, 1.001, 1.7, 3.0, 8.0])
def test_rates_at_every_step(ratio: float) -> None:
    """Against a sum over fine slices of the Gaussian."""
    fine = np.linspace(-10, 10, 2_000_001)
    weight = np.exp(-(fine**2) / 2)
    weight /= weight.sum()
    codes = np.rint(fine / ratio).astype(np.int64)
    probs = np.bincount(codes - codes[0], weights=weight)
    probs = probs[probs > 0]
    assert gaussian_bits(ratio) == pytest.approx(-(probs @ np.log2(probs)), abs=2e-3)


def test_no_step_no_rate() -> None:
    assert gaussian_bits(np.array([64.0, np.inf])).max() < 1e-200
    fine = gaussian_bits(np.array([1e-3, 5e-4]))
    assert fine[1] - fine[0] == pytest.approx(1, abs=1e-5)


def coded_bits(weight: np.ndarray, codes: np.ndarray, steps: Steps) -> float:
    """What a coder spends that knows every deviation: the codes' improbability."""
    ratio = np.broadcast_to(steps.values(), weight.shape) / deviations(weight)
    edges = torch.from_numpy(ratio / math.sqrt(2))
    magnitudes = torch.from_numpy(codes).abs()
    low, high = (magnitudes - 0.5) * edges, (magnitudes + 0.5) * edges
    probs = (torch.special.erfc(low) - torch.special.erfc(high)) / 2
    return float(-probs.log2().sum())


def loss_nats(weight: np.ndarray, steps: Steps, sensitivity: Sensitivity) -> float:
    """What rounding to nearest costs."""
    error = weight - np.rint(weight / steps.values()) * steps.values()
    return float(sensitivity.rows @ error.astype(np.float64) ** 2 @ sensitivity.columns / 2)


@pytest.mark.parametrize("constant", [0.003, 0.03])
def test_rate_and_loss_of_gaussian_weights(constant: float) -> None:
    rng = np.random.default_rng(4)
    sensitivity = Sensitivity(
        rng.lognormal(sigma=1.0, size=300), rng.lognormal(sigma=0.5, size=400)
    )
    spreads = np.outer(rng.lognormal(sigma=0.7, size=300), rng.lognormal(sigma=0.3, size=400))
    weight = (0.05 * spreads * rng.standard_normal((300, 400))).astype(np.float32)
    steps = allocate(sensitivity, constant, columns=True)
    # Weights are divided by more than their step before they are rounded (see gptq).
    ratios = steps.values() / deviations(weight)
    codes = np.rint(weight / steps.values() / (1 + ratios**2 / 12))
    curve = rate_curve({"m": weight}, {"m": sensitivity}, {"m": Layout(columns=True)})
    assert curve.bits(constant) == pytest.approx(coded_bits(weight, codes, steps), rel=0.01)
    if constant == 0.003:
        expected = constant**2 / 24 * weight.size
        assert loss_nats(weight, steps, sensitivity) == pytest.approx(expected, rel=0.03)


@pytest.mark.parametrize("step", [0.05, 0.4145])
def test_the_predicted_rate_is_the_entropy_of_the_integers(step: float) -> None:
    weight = np.random.default_rng(5).standard_normal((400, 500)).astype(np.float32)
    sensitivity = Sensitivity(np.ones(400), np.ones(500))
    codes = np.rint(weight / allocate(sensitivity, step).values() / (1 + step**2 / 12))
    counts = np.unique(codes, return_counts=True)[1] / weight.size
    entropy = -(counts @ np.log2(counts)) * weight.size
    curve = rate_curve({"m": weight}, {"m": sensitivity}, {"m": Layout()})
    assert curve.bits(step) == pytest.approx(entropy, rel=0.01)


def test_zero_rows_cost_nothing() -> None:
    weight = np.random.default_rng(6).standard_normal((4, 50))
    half = weight.copy()
    half[::2] = 0
    assert np.isfinite(deviations(half)).all() and (deviations(half)[::2] == 0).all()

    def bits(matrix: np.ndarray) -> float:
        sensitivity = Sensitivity(np.ones(len(matrix)), np.ones(50))
        return rate_curve({"m": matrix}, {"m": sensitivity}, {"m": Layout()}).bits(1.0)

    assert bits(half) == pytest.approx(bits(weight[1::2]))
    assert bits(np.zeros((4, 50))) == 0


@settings(max_examples=30, deadline=None)
@given(st.floats(0.05, 8.0), st.booleans(), st.booleans())
def test_a_constant_for_every_rate(bits: float, rows: bool, columns: bool) -> None:
    rng = np.random.default_rng(7)
    weights = {"a": rng.standard_normal((20, 30)), "b": 0.01 * rng.standard_normal((10, 15))}
    weights["b"][0] = 0
    by_name = {
        name: Sensitivity(rng.lognormal(size=len(w)), rng.lognormal(size=w.shape[1]))
        for name, w in weights.items()
    }
    wanted = bits * sum(w.size for w in weights.values())
    layouts = dict.fromkeys(weights, Layout(rows, columns))
    constant = rate_curve(weights, by_name, layouts).constant_for(wanted)
    total = 0.0
    for name, weight in weights.items():
        steps = np.outer(*spread(by_name[name], constant, rows, columns))
        scales = deviations(weight)
        ratios = steps[scales > 0] / scales[scales > 0]
        total += gaussian_bits(ratios * (1 + ratios**2 / 12)).sum()
    assert total == pytest.approx(wanted, rel=0.01)


def test_sensitivity_beats_deviation_at_equal_loss() -> None:
    """At high rates the saved bits follow from the means of what the steps cost."""
    rng = np.random.default_rng(8)
    sensitivity = Sensitivity(
        rng.lognormal(sigma=1.0, size=200), rng.lognormal(sigma=0.8, size=300)
    )
    weight = rng.standard_normal((200, 300))
    # Steps in proportion to each row's deviation, as the scheme int6:4 has them (PR 1394).
    plain = Steps(to_index(4.0 * weight.std(axis=1, ddof=1) / 31))
    before = loss_nats(weight, plain, sensitivity)
    bits_before = coded_bits(weight, np.rint(weight / plain.values()), plain)
    costs = plain.values().astype(np.float64) ** 2 * np.outer(sensitivity.rows, sensitivity.columns)
    constant = math.sqrt(24 * before / weight.size)
    for columns in (False, True):
        steps = allocate(sensitivity, constant, columns=columns)
        assert loss_nats(weight, steps, sensitivity) == pytest.approx(before, rel=0.04)
        varying = costs if columns else costs.mean(axis=1)
        expected = (np.log2(varying.mean()) - np.log2(varying).mean()) / 2
        saved = bits_before - coded_bits(weight, np.rint(weight / steps.values()), steps)
        assert saved / weight.size == pytest.approx(expected, abs=0.03)
