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
    constant_for,
    deviations,
    gaussian_bits,
    gaussian_error,
    predict,
    saving_bits,
    sd_clip,
    sensitivities,
    spread,
)
from underpar.quant.calibration import HEAD, Calibration
from underpar.quant.fisher import Fisher
from underpar.quant.rounding import round_tensor
from underpar.quant.schemes import parse_scheme

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
    own = Sensitivity(rows, columns)
    by_row, by_column = spread(own, constant, columns=True)
    costs = np.outer(by_row**2 * rows, by_column**2 * columns)
    np.testing.assert_allclose(costs, constant**2, rtol=1e-6)
    # Without columns: the same for the mean of each row; without rows: for that of the matrix.
    by_row, by_column = spread(own, constant)
    np.testing.assert_allclose(by_row**2 * rows * columns.mean(), constant**2, rtol=1e-6)
    assert (by_column == 1).all()
    by_row, by_column = spread(own, constant, rows=False)
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
    own = Sensitivity(rng.lognormal(size=30), rng.lognormal(size=40))
    exact = np.outer(*spread(own, 0.01, columns=True))
    steps = allocate(own, 0.01, columns=True)
    assert steps.rows.dtype == np.int16 and steps.values().dtype == np.float32
    assert np.abs(np.log2(steps.values() / exact)).max() <= 1 / 16 + 1e-6
    # What nothing reads is rounded as coarsely as can be stored, and not to infinity.
    coarse = allocate(Sensitivity(np.full(2, LEAST), np.full(3, LEAST)), 1.0).values()
    assert np.isfinite(coarse).all() and (coarse > 1e9).all()


def test_sd_clip_is_the_rule_of_the_schemes() -> None:
    weight = np.random.default_rng(1).standard_normal((20, 300)).astype(np.float32)
    weight *= np.exp2(np.arange(20) - 10)[:, None]
    expected = round_tensor(weight, parse_scheme("int6:12.85")).steps.astype(np.float32)
    ratios = sd_clip(weight, 12.85, 6).values()[:, 0] / expected
    assert np.abs(np.log2(ratios)).max() <= 1 / 32 + 1e-3
    zero = sd_clip(np.zeros((1, 9), dtype=np.float32), 12.85, 6).values()
    assert np.isfinite(zero).all() and (zero > 0).all()


def test_conditional_variances_are_what_later_columns_leave_unexplained() -> None:
    hessian = random_hessian(24, 200, 0)
    damping = 0.01 * hessian.double().diagonal().mean().expand(24)
    damped = hessian.double() + torch.diag(damping)
    found = conditional_variances(hessian, 0.01)
    for j in range(24):
        cross, later = damped[j, j + 1 :], damped[j + 1 :, j + 1 :]
        left = damped[j, j] - cross @ torch.linalg.solve(later, cross)
        assert found[j] == pytest.approx(float(left), rel=1e-9)
    inverse = torch.linalg.cholesky(torch.linalg.inv(damped), upper=True)
    np.testing.assert_allclose(found, inverse.diagonal().numpy() ** -2, rtol=1e-8)
    # Whatever the order, their product is the determinant.
    assert np.log(found).sum() == pytest.approx(float(torch.logdet(damped)), rel=1e-9)


def test_fewer_inputs_than_columns_and_dead_columns() -> None:
    hessian = random_hessian(16, 5, 1)
    hessian[3] = hessian[:, 3] = 0
    found = conditional_variances(hessian)
    assert np.isfinite(found).all() and (found > 0).all()
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
    found = sensitivities(Calibration(hessians, inputs, num_tokens=100), fisher)
    # A sum over three visits of each token, over tokens.
    np.testing.assert_allclose(found[names[0]].columns, conditional_variances(shared) / 100)
    assert found[names[0]].rows.tolist() == [1.0, 2.0]
    assert (found[names[1]].rows == LEAST).all()
    # Both roles of the embedding: the row's cost is that of the head plus that of the table.
    own = found[HEAD]
    mean = own.columns.mean()
    np.testing.assert_allclose(own.rows * mean, [mean, mean, mean + 3, mean, mean], rtol=1e-6)


@pytest.mark.parametrize(
    ("ratio", "bits", "error"),
    [
        # From a table of exact sums: k / R of the published recipes.
        (4 / 31, 5.002, 0.00139),
        (12.85 / 31, 3.328, 0.01432),
        (25 / 31, 2.396, 0.0542),
        (14 / 63, 4.220, 0.00412),
    ],
)
def test_rates_and_errors_of_gaussians(ratio: float, bits: float, error: float) -> None:
    assert gaussian_bits(ratio) == pytest.approx(bits, abs=5e-4)
    assert gaussian_error(ratio) == pytest.approx(error, rel=4e-3)


@pytest.mark.parametrize("ratio", [0.01, 0.3, 0.499, 0.501, 0.999, 1.001, 1.7, 3.0, 8.0])
def test_rates_and_errors_at_every_rate(ratio: float) -> None:
    """Against a sum over fine slices of the Gaussian."""
    fine = np.linspace(-10, 10, 2_000_001)
    weight = np.exp(-(fine**2) / 2)
    weight /= weight.sum()
    codes = np.rint(fine / ratio).astype(np.int64)
    error = float(weight @ (fine - codes * ratio) ** 2)
    assert gaussian_error(ratio) == pytest.approx(error, rel=2e-3)
    if ratio > 0.1:
        probs = np.bincount(codes - codes[0], weights=weight)
        probs = probs[probs > 0]
        assert gaussian_bits(ratio) == pytest.approx(-(probs @ np.log2(probs)), abs=2e-3)


def test_no_step_no_rate() -> None:
    assert gaussian_bits(np.array([64.0, np.inf])).max() < 1e-200
    assert gaussian_error(np.array([64.0, np.inf])).tolist() == [1.0, 1.0]
    fine = gaussian_bits(np.array([1e-3, 5e-4]))
    assert fine[1] - fine[0] == pytest.approx(1, abs=1e-5)


def coded_bits(weight: np.ndarray, steps: Steps) -> float:
    """What a coder spends that knows every deviation: the codes' improbability."""
    ratio = np.broadcast_to(steps.values(), weight.shape) / deviations(weight)
    codes = torch.from_numpy(np.rint(weight / steps.values()))
    edges = torch.from_numpy(ratio / math.sqrt(2))
    low, high = (codes.abs() - 0.5) * edges, (codes.abs() + 0.5) * edges
    probs = (torch.special.erfc(low) - torch.special.erfc(high)) / 2
    return float(-probs.log2().sum())


@pytest.mark.parametrize("constant", [0.003, 0.03, 0.2])
def test_predicted_rate_and_loss_of_gaussian_weights(constant: float) -> None:
    rng = np.random.default_rng(4)
    own = Sensitivity(rng.lognormal(sigma=1.0, size=300), rng.lognormal(sigma=0.5, size=400))
    spreads = np.outer(rng.lognormal(sigma=0.7, size=300), rng.lognormal(sigma=0.3, size=400))
    weight = (0.05 * spreads * rng.standard_normal((300, 400))).astype(np.float32)
    steps = allocate(own, constant, columns=True)
    found = predict(weight, steps, own)
    assert found.rate_bits == pytest.approx(coded_bits(weight, steps), rel=0.01)
    error = weight - np.rint(weight / steps.values()) * steps.values()
    loss = own.rows @ error.astype(np.float64) ** 2 @ own.columns / 2
    assert found.loss_nats == pytest.approx(loss, rel=0.03)
    if constant == 0.003:
        assert found.loss_nats == pytest.approx(constant**2 / 24 * weight.size, rel=0.02)


@pytest.mark.parametrize("step", [0.05, 0.4145, 1.5])
def test_predicted_rate_is_the_entropy_of_the_integers(step: float) -> None:
    weight = np.random.default_rng(5).standard_normal((400, 500)).astype(np.float32)
    own = Sensitivity(np.ones(400), np.ones(500))
    steps = allocate(own, step)
    counts = np.unique(np.rint(weight / steps.values()), return_counts=True)[1] / weight.size
    entropy = -(counts @ np.log2(counts)) * weight.size
    assert predict(weight, steps, own).rate_bits == pytest.approx(entropy, rel=0.01)


def test_zero_rows_cost_nothing() -> None:
    weight = np.random.default_rng(6).standard_normal((4, 50))
    half = weight.copy()
    half[::2] = 0
    own, steps = Sensitivity(np.ones(4), np.ones(50)), Steps(np.zeros(4, dtype=np.int16))
    assert np.isfinite(deviations(half)).all() and (deviations(half)[::2] == 0).all()
    found = predict(half, steps, own)
    alone = predict(weight[1::2], Steps(steps.rows[1::2]), Sensitivity(np.ones(2), np.ones(50)))
    assert found.rate_bits == pytest.approx(alone.rate_bits)
    assert found.loss_nats == pytest.approx(alone.loss_nats)
    nothing = predict(np.zeros((4, 50)), steps, own)
    assert nothing.rate_bits < 1e-200 and nothing.loss_nats == 0


@settings(max_examples=30, deadline=None)
@given(st.floats(0.05, 8.0), st.booleans(), st.booleans())
def test_a_constant_for_every_rate(bits: float, rows: bool, columns: bool) -> None:
    rng = np.random.default_rng(7)
    weights = {"a": rng.standard_normal((20, 30)), "b": 0.01 * rng.standard_normal((10, 15))}
    weights["b"][0] = 0
    own = {
        name: Sensitivity(rng.lognormal(size=len(w)), rng.lognormal(size=w.shape[1]))
        for name, w in weights.items()
    }
    wanted = bits * sum(w.size for w in weights.values())
    constant = constant_for(weights, own, wanted, Layout(rows, columns))
    total = 0.0
    for name, weight in weights.items():
        steps = np.outer(*spread(own[name], constant, rows, columns))
        scales = deviations(weight)
        ratios = steps[scales > 0] / scales[scales > 0]
        total += gaussian_bits(ratios * (1 + ratios**2 / 12)).sum()
    assert total == pytest.approx(wanted, rel=0.01)


def test_sensitivity_beats_deviation_at_equal_rate() -> None:
    """By what the ratio of means says, at high rates."""
    rng = np.random.default_rng(8)
    own = Sensitivity(rng.lognormal(sigma=1.0, size=200), rng.lognormal(sigma=0.8, size=300))
    weight = rng.standard_normal((200, 300))
    plain = sd_clip(weight, 4.0, 6)
    before = predict(weight, plain, own)
    costs = plain.values().astype(np.float64) ** 2 * np.outer(own.rows, own.columns)
    constant = math.sqrt(24 * before.loss_nats / weight.size)
    for columns in (False, True):
        after = predict(weight, allocate(own, constant, columns=columns), own)
        assert after.loss_nats == pytest.approx(before.loss_nats, rel=0.02)
        varying = costs if columns else costs.mean(axis=1)
        saved = (before.rate_bits - after.rate_bits) / weight.size
        assert saved == pytest.approx(saving_bits(varying), abs=0.02)


def test_savings() -> None:
    assert saving_bits(np.full(9, 3.7)) == pytest.approx(0, abs=1e-12)
    assert saving_bits([1.0, 4.0]) == pytest.approx(math.log2(2.5 / 2) / 2)
    # Zipf over 8192 tokens: 0.9 bits a weight of the embedding.
    assert saving_bits(1 / np.arange(1, 8193)) == pytest.approx(0.9, abs=0.05)
