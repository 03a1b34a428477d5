"""GPTQ: what must hold of any solve, with and without a trellis, and what it gains."""

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from trellis_paths import is_legal, nearest_path
from underpar.errors import ArtifactError, RecipeError
from underpar.quant import gptq
from underpar.quant.gptq import (
    Inverse,
    Options,
    Solution,
    damp,
    factor_inverse,
    invert,
    round_to_nearest,
)
from underpar.quant.trellis import LARGEST_CODE

STEP = 12.85 / 31
SOLVERS = [
    Options(),
    Options(act_order=True),
    Options(num_states=8),
    Options(weigh_bits=True),
    Options(num_states=8, weigh_bits=True),
]
SOLVER_IDS = ["natural", "act_order", "trellis", "thrifty", "thrifty-trellis"]


def draw(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def hessian_of(num_cols: int, seed: int = 0, power: float = 1.0) -> Tensor:
    """Eigenvalues i^-power in a random basis, fp64."""
    basis = torch.linalg.qr(draw(num_cols, num_cols, seed=seed, dtype=torch.float64)).Q
    return (basis * torch.arange(1.0, num_cols + 1) ** -power) @ basis.mT


def loss_of(weight: Tensor, restored: Tensor, hessian: Tensor, damping: float = 0.01) -> float:
    damped = damp(hessian[None].double(), damping)[0][0]
    error = (weight - restored).double()
    return float(((error @ damped) * error).sum())


def two_cholesky_factor(hessian: Tensor) -> Tensor:
    """As in the paper: invert, then factor the inverse."""
    inverse = torch.cholesky_inverse(torch.linalg.cholesky(hessian))
    return torch.linalg.cholesky(inverse, upper=True)


def solve(weight: Tensor, hessian: Tensor, steps: Tensor, options: Options) -> Solution:
    return gptq.solve(weight, invert(hessian, options), steps, options)


def steps_of_shape(kind: str, rows: int, cols: int) -> Tensor:
    shape = {"rows": (rows, 1), "cols": (1, cols), "both": (rows, cols)}[kind]
    return STEP * torch.exp(0.2 * draw(*shape, seed=5))


# The step and its rounding.


def test_gaussian_rows_cost_what_theory_says() -> None:
    weight = draw(2048, 512, seed=1)
    steps = STEP * weight.std(dim=1, keepdim=True)
    codes = round_to_nearest(weight, steps, 31)
    shares = codes.unique(return_counts=True)[1] / codes.numel()
    assert abs(-(shares * shares.log2()).sum().item() - 3.328) < 0.003
    mse = ((codes * steps - weight) / weight.std(dim=1, keepdim=True)).square().mean().item()
    assert math.isclose(mse, 0.0143, rel_tol=0.01)


def test_ten_deviations_clip_nothing() -> None:
    for seed in range(10):
        codes = round_to_nearest(draw(1000, 1000, seed=seed), torch.tensor(10 / 31), 31)
        assert codes.abs().max() < 31


def test_rounding_is_half_to_even_and_clipped() -> None:
    weight = torch.tensor([[0.5, 1.5, -2.5, 9.0, -1e9]])
    assert round_to_nearest(weight, torch.ones(1, 1), 4).tolist() == [[0, 2, -2, 4, -4]]
    assert round_to_nearest(weight, torch.ones(1, 1))[0, 4] == -LARGEST_CODE


# The factor.


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-10), (torch.float32, 1e-5)])
@pytest.mark.parametrize("num_cols", [32, 512, pytest.param(2048, marks=pytest.mark.slow)])
def test_one_cholesky_gives_the_factor_of_two(
    num_cols: int, dtype: torch.dtype, tolerance: float
) -> None:
    hessian = damp(hessian_of(num_cols)[None], 0.01)[0]
    expected = two_cholesky_factor(hessian)
    factor = factor_inverse(hessian.to(dtype)).double()
    assert (factor - expected).norm() <= tolerance * expected.norm()
    assert torch.equal(factor, factor.triu())
    assert (factor.diagonal(dim1=-2, dim2=-1) > 0).all()


def test_a_hessian_that_is_none_is_refused() -> None:
    with pytest.raises(ArtifactError, match="not positive definite"):
        solve(draw(3, 2), torch.tensor([[1.0, 9.0], [9.0, 1.0]]), torch.ones(1, 1), Options())


@pytest.mark.parametrize("place", range(3))
def test_nan_is_refused(place: int) -> None:
    inputs = [draw(3, 2), torch.eye(2), torch.ones(3, 1)]
    inputs[place][0, 0] = torch.nan
    with pytest.raises(ArtifactError, match="NaN"):
        solve(inputs[0], inputs[1], inputs[2], Options())


def test_a_step_of_zero_is_refused() -> None:
    with pytest.raises(ArtifactError, match="not above 0"):
        solve(draw(3, 2), torch.eye(2), torch.zeros(3, 1), Options())


# The solve.


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 2**32 - 1), st.booleans(), st.sampled_from(["rows", "cols", "both"]))
def test_a_diagonal_hessian_rounds_to_nearest(seed: int, act_order: bool, kind: str) -> None:
    weight, steps = draw(9, 40, seed=seed), steps_of_shape(kind, 9, 40)
    nearest = round_to_nearest(weight, steps)
    options = Options(act_order=act_order, block=16)
    for diagonal in (torch.full((40,), 3.7), draw(40, seed=seed + 1).square() + 0.01):
        assert torch.equal(solve(weight, diagonal.diag(), steps, options).codes, nearest)


def test_a_white_hessian_gives_the_plain_trellis() -> None:
    weight = draw(50, 300, dtype=torch.float64)
    hessian = 2.5 * torch.eye(300, dtype=torch.float64)
    solution = solve(weight, hessian, torch.full((1, 1), 0.2), Options(num_states=8))
    expected = nearest_path(weight / torch.tensor(0.2).double(), 8)
    assert torch.equal(solution.codes, expected)


@pytest.mark.parametrize("seed", range(10))
def test_less_loss_than_nearest(seed: int) -> None:
    weight, steps = draw(64, 96, seed=seed), torch.full((64, 1), STEP)
    inputs = draw(400, 96, seed=seed + 100) @ draw(96, 96, seed=seed + 200)
    hessian = inputs.T @ inputs
    nearest = loss_of(weight, round_to_nearest(weight, steps) * steps, hessian)
    for options in SOLVERS[:2]:
        codes = solve(weight, hessian, steps, options).codes
        assert loss_of(weight, codes * steps, hessian) < nearest


@pytest.mark.parametrize("options", SOLVERS, ids=SOLVER_IDS)
@pytest.mark.parametrize("kind", ["rows", "cols", "both"])
def test_the_errors_sum_to_the_loss(options: Options, kind: str) -> None:
    weight, hessian, steps = draw(80, 200), hessian_of(200).float(), steps_of_shape(kind, 80, 200)
    solution = solve(weight, hessian, steps, options)
    restored = solution.codes * steps
    assert math.isclose(solution.loss.item(), loss_of(weight, restored, hessian), rel_tol=1e-4)
    # With a trellis only every other integer may be used: it is set against steps twice as wide.
    wide = 2 * steps if options.num_states > 1 else steps
    nearest = round_to_nearest(weight, wide) * wide
    assert solution.loss.item() < 0.8 * loss_of(weight, nearest, hessian)


@pytest.mark.parametrize("options", SOLVERS, ids=SOLVER_IDS)
def test_the_block_only_schedules(options: Options) -> None:
    weight, hessian = draw(60, 200, dtype=torch.float64), hessian_of(200)
    steps = torch.full((60, 1), STEP)
    whole, *others = (replace(options, block=block) for block in (200, 32, 128, 1))
    expected = solve(weight, hessian, steps, whole)
    single = solve(weight.float(), hessian.float(), steps, whole)
    for other in others:
        assert torch.equal(solve(weight, hessian, steps, other).codes, expected.codes)
        solution = solve(weight.float(), hessian.float(), steps, other)
        assert (solution.codes == single.codes).float().mean() >= 0.999


def test_columns_may_come_in_any_order() -> None:
    weight, hessian = draw(40, 90), hessian_of(90).float()
    order = torch.randperm(90, generator=torch.Generator().manual_seed(2))
    steps, options = steps_of_shape("cols", 40, 90), Options(act_order=True)
    solution = solve(weight[:, order], hessian[order][:, order], steps[:, order], options)
    assert torch.equal(solution.codes, solve(weight, hessian, steps, options).codes[:, order])


@pytest.mark.parametrize("options", SOLVERS, ids=SOLVER_IDS)
def test_scales_do_not_matter(options: Options) -> None:
    weight, hessian, steps = draw(20, 64), hessian_of(64).float(), torch.full((20, 1), STEP)
    expected = solve(weight, hessian, steps, options)
    solution = solve(weight / 8, hessian * 2.0**-20, steps / 8, options)
    assert torch.equal(solution.codes, expected.codes)
    assert math.isclose(solution.loss.item() * 2.0**26, expected.loss.item(), rel_tol=1e-6)


@pytest.mark.parametrize("options", SOLVERS[:2], ids=SOLVER_IDS[:2])
def test_a_column_without_input_is_zero_and_harmless(options: Options) -> None:
    live = torch.arange(50) != 17
    weight, steps = draw(30, 50), torch.full((30, 1), STEP)
    hessian = torch.zeros(50, 50)
    hessian[live.outer(live)] = 1e-3 * hessian_of(49).float().flatten()
    actual = solve(weight, hessian, steps, options).codes
    without = solve(weight[:, live], hessian[live][:, live], steps, options).codes
    assert (actual[:, ~live] == 0).all()
    assert torch.equal(actual[:, live], without)


@pytest.mark.parametrize("options", SOLVERS, ids=SOLVER_IDS)
def test_few_samples_and_no_inputs(options: Options) -> None:
    weight, steps = draw(10, 60), torch.full((10, 1), STEP)
    inputs = draw(7, 60, seed=3)
    solution = solve(weight, inputs.T @ inputs, steps, options)
    assert solution.loss.isfinite()
    assert solution.codes.abs().max() < 40
    silent = solve(weight, torch.zeros(60, 60), steps, options)
    assert silent.loss.isfinite()
    assert silent.codes.abs().max() <= 2 * (options.num_states > 1)


@pytest.mark.parametrize("options", SOLVERS, ids=SOLVER_IDS)
def test_a_bank_is_solved_as_its_matrices(options: Options) -> None:
    weight, steps = draw(3, 20, 50, dtype=torch.float64), steps_of_shape("rows", 20, 50)
    hessian = torch.stack([hessian_of(50, seed) for seed in range(3)])
    bank = solve(weight, hessian, steps.expand(3, 20, 1), options)
    assert bank.loss.shape == (3,)
    for i in range(3):
        alone = solve(weight[i], hessian[i], steps, options)
        assert torch.equal(bank.codes[i], alone.codes)
        assert torch.isclose(bank.loss[i], alone.loss)


@pytest.mark.parametrize("num_states", [1, 4, 8, 16, 64])
@pytest.mark.parametrize("limit", [2, 3, 4, 5, 31])
def test_integers_stay_within_their_limit(num_states: int, limit: int) -> None:
    weight, hessian = 3 * draw(30, 40), hessian_of(40).float()
    options = Options(limit=limit, num_states=num_states)
    codes = solve(weight, hessian, torch.full((1, 1), STEP), options).codes
    assert codes.dtype == torch.int16
    assert codes.abs().max() <= limit
    assert is_legal(codes.numpy(), num_states)


def test_columns_may_have_limits_of_their_own() -> None:
    weight, hessian, steps = 3 * draw(30, 40), hessian_of(40).float(), torch.full((1, 1), STEP)
    options = Options(act_order=True, limit=5)
    inverse = invert(hessian, options)
    expected = gptq.solve(weight, inverse, steps, options)
    same = gptq.solve(weight, inverse, steps, options, torch.full((40,), 5))
    assert torch.equal(same.codes, expected.codes) and torch.equal(same.loss, expected.loss)
    limits = torch.where(torch.arange(40) % 3 == 0, 9, 2)
    codes = gptq.solve(weight, inverse, steps, options, limits).codes
    assert torch.equal(codes.abs().amax(dim=0), limits.to(torch.int16))


def test_a_factor_serves_many_solves() -> None:
    hessians = torch.stack([hessian_of(30, seed) for seed in range(2)])
    inverses = [invert(hessian, Options(act_order=True)) for hessian in hessians]
    together, stacked = invert(hessians, Options(act_order=True)), Inverse.stack(inverses)
    for part in ("factor", "order", "dead"):
        assert torch.equal(getattr(stacked, part), getattr(together, part))


def test_a_gradient_is_not_followed() -> None:
    weight = torch.nn.Parameter(draw(4, 8))
    assert not solve(weight, torch.eye(8), torch.ones(1, 1), Options()).loss.requires_grad


@pytest.mark.parametrize(
    "wrong",
    [{"act_order": True, "num_states": 8}, {"damping": 0.0}, {"block": 0}, {"limit": -1}],
)
def test_options_that_do_not_fit_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(RecipeError, match=next(iter(wrong))):
        Options(**wrong)  # type: ignore[arg-type]


# What it gains.


def rate_bits(codes: Tensor, by_parity: bool) -> float:
    total = 0.0
    for group in (codes[codes % 2 == 0], codes[codes % 2 == 1]) if by_parity else (codes,):
        counts = group.unique(return_counts=True)[1]
        total -= float((counts * (counts / counts.sum()).log2()).sum())
    return total / codes.numel()


def test_gains_on_a_falling_spectrum() -> None:
    weight, hessian = draw(256, 256), hessian_of(256).float()
    steps = torch.full((256, 1), STEP)
    nearest = loss_of(weight, round_to_nearest(weight, steps) * steps, hessian)
    scalar = solve(weight, hessian, steps, Options())
    coded = solve(weight, hessian, steps / 2, Options(num_states=8))
    assert scalar.loss.item() < 0.8 * nearest
    assert abs(rate_bits(coded.codes, True) - rate_bits(scalar.codes, False)) < 0.01
    assert coded.loss.item() < 0.81 * scalar.loss.item()


def test_weighing_bits_costs_less_of_both() -> None:
    weight, hessian, steps = draw(256, 256), hessian_of(256).float(), torch.full((256, 1), 1.5)
    for num_states in (1, 8):
        plain = solve(weight, hessian, steps / min(num_states, 2), Options(num_states=num_states))
        options = Options(num_states=num_states, weigh_bits=True)
        thrifty = solve(weight, hessian, 0.9 * steps / min(num_states, 2), options)
        assert rate_bits(thrifty.codes, num_states > 1) < rate_bits(plain.codes, num_states > 1)
        assert thrifty.loss.item() < 0.95 * plain.loss.item()


@pytest.mark.parametrize("num_states", [1, 8])
def test_only_coarse_rows_mind_their_bits(num_states: int) -> None:
    weight, hessian = draw(60, 200), hessian_of(200, power=1.5).float()
    steps = torch.full((60, 1), 0.01)
    steps[:20] = 8.0
    plain, thrifty = (
        solve(weight, hessian, steps, Options(num_states=num_states, weigh_bits=weigh)).codes
        for weigh in (False, True)
    )
    # Feedback gives coarse rows integers that are not worth their bits.
    assert 10 * thrifty[:20].count_nonzero() < plain[:20].count_nonzero()
    assert (plain[20:] == thrifty[20:]).float().mean() > (0.97 if num_states == 1 else 0.85)
    assert (plain[20:] - thrifty[20:]).abs().max() <= 4


@pytest.mark.parametrize("num_states", [1, 8])
def test_empty_rows_and_columns_stay_empty_where_bits_are_weighed(num_states: int) -> None:
    weight = draw(12, 40)
    weight[3], weight[:, 5] = 0, 0
    options = Options(num_states=num_states, weigh_bits=True)
    solution = solve(weight, hessian_of(40).float(), torch.full((1, 1), STEP), options)
    assert solution.loss.isfinite()
    assert not solution.codes[3].any() and solution.codes.any()
    silent = solve(torch.zeros(4, 40), hessian_of(40).float(), torch.ones(1, 1), options)
    assert not silent.codes.any() and silent.loss == 0


@pytest.mark.gpu
@pytest.mark.parametrize("options", SOLVERS, ids=SOLVER_IDS)
def test_devices_agree(options: Options) -> None:
    weight, hessian, steps = draw(256, 512), hessian_of(512).float(), torch.full((1, 1), STEP)
    here = solve(weight, hessian, steps, options)
    there = solve(weight.cuda(), hessian.cuda(), steps.cuda(), options)
    assert (here.codes == there.codes.cpu()).float().mean() >= 0.999
    assert math.isclose(here.loss.item(), there.loss.item(), rel_tol=1e-3)
