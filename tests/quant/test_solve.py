"""Schemes that need a calibration: what they store, and that it is close where errors cost."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from trellis_paths import is_legal
from underpar.errors import ArtifactError, RecipeError
from underpar.quant import gptq, solve
from underpar.quant.allocate import Sensitivity
from underpar.quant.calibration import Calibration
from underpar.quant.logsteps import from_index, to_index
from underpar.quant.rounding import round_tensor
from underpar.quant.rules import quantize_model
from underpar.quant.schemes import QuantizedTensor, dequantize, parse_scheme, steps_of
from underpar.quant.solve import Solver

CPU = torch.device("cpu")
NAME = "blocks.0.attn.q.weight"
KEYS = ["blocks.0.attn.k.weight", "blocks.0.attn.v.weight", "blocks.1.attn.k.weight"]
ROWS, COLS = 24, 48


def draw_inputs(seed: int) -> torch.Tensor:
    """Correlated, with columns of unlike size."""
    generator = torch.Generator().manual_seed(seed)
    draw = torch.randn(4096, COLS, generator=generator)
    mix = torch.randn(COLS, COLS, generator=generator) / (1 + torch.arange(COLS))[:, None]
    return draw @ mix


@pytest.fixture(scope="module")
def inputs() -> torch.Tensor:
    return draw_inputs(0)


@pytest.fixture(scope="module")
def weight() -> np.ndarray:
    return np.random.default_rng(1).standard_normal((ROWS, COLS)).astype(np.float32)


@pytest.fixture(scope="module")
def weights(weight: np.ndarray) -> dict[str, np.ndarray]:
    """One matrix, and three of another shape."""
    rng = np.random.default_rng(2)
    others = {name: rng.standard_normal((8, COLS)).astype(np.float32) for name in KEYS}
    return {NAME: weight, **others}


@pytest.fixture
def solver(inputs: torch.Tensor, weights: dict[str, np.ndarray]) -> Solver:
    """The first block's matrices share a Hessian."""
    shared, other = (x.T @ x for x in (inputs, draw_inputs(1)))
    hessians = dict.fromkeys(weights, shared) | {KEYS[-1]: other}
    calibration = Calibration(hessians, dict.fromkeys(weights, len(inputs)), len(inputs))
    costs = {
        name: Sensitivity(np.geomspace(1.0, 16.0, len(matrix)), np.ones(COLS))
        for name, matrix in weights.items()
    }
    return Solver(calibration, costs, 0.4, CPU)


def solve_one(solver: Solver, weight: np.ndarray, scheme: str) -> QuantizedTensor:
    return solver.solve({NAME: weight}, {NAME: parse_scheme(scheme)})[NAME]


def loss_of(error: np.ndarray, inputs: torch.Tensor) -> float:
    return float((inputs @ torch.from_numpy(error).T).square().sum())


@pytest.mark.parametrize("scheme", ["grid1", "grid8", "grid4+columns"])
def test_grids_have_steps_by_what_errors_cost(
    scheme: str, weight: np.ndarray, solver: Solver
) -> None:
    tensor = solve_one(solver, weight, scheme)
    assert tensor.codes is not None and tensor.codes.dtype == np.int16
    assert str(tensor.scheme) == scheme
    # A row that costs 16 times as much is rounded four times as finely: two octaves.
    assert tensor.steps[0] - tensor.steps[-1] == 32
    assert (tensor.columns is None) == ("columns" not in scheme)
    if tensor.scheme.states > 1:
        assert is_legal(tensor.codes, tensor.scheme.states)
    assert np.abs(dequantize(tensor) - weight).max() < 4


def test_feedback_costs_less_on_the_inputs_in_the_form_of_rounding(
    weight: np.ndarray, solver: Solver, inputs: torch.Tensor
) -> None:
    rounded = round_tensor(weight, parse_scheme("int6:12.85"))
    solved = solve_one(solver, weight, "gptq6:12.85")
    assert solved.steps.tobytes() == rounded.steps.tobytes()
    assert solved.codes is not None and solved.codes.dtype == np.int8
    losses = [loss_of(dequantize(t) - weight, inputs) for t in (solved, rounded)]
    assert losses[0] < 0.8 * losses[1]


def test_bits_are_weighed_in_grids_alone(weight: np.ndarray, solver: Solver) -> None:
    coarse = replace(solver, constant=2.0)
    heedless = replace(coarse, weigh_bits=False)
    for scheme, differs in (("grid1", True), ("grid8", True), ("gptq6:12.85", False)):
        thrifty, plain = (solve_one(s, weight, scheme).codes for s in (coarse, heedless))
        assert thrifty is not None and plain is not None
        assert (np.abs(thrifty).sum() < np.abs(plain).sum()) == differs
        assert np.array_equal(thrifty, plain) != differs


@pytest.mark.parametrize("scheme", ["grid1", "grid8+columns", "gptq6:12.85", "gptq6:12.85+awq"])
def test_a_batch_is_solved_as_its_matrices(
    scheme: str, solver: Solver, weights: dict[str, np.ndarray]
) -> None:
    solver = replace(solver, protected={KEYS[1]: np.arange(COLS) < 16})
    schemes = dict.fromkeys(weights, parse_scheme(scheme))
    alone = solver.solve(weights, schemes)
    solver = replace(solver, batch_bytes=1 << 30)
    assert sorted(map(len, solver.plan_batches(weights, schemes))) == [1, 3]
    done: list[str] = []
    together = solver.solve(weights, schemes, done.append)
    assert sorted(done) == sorted(weights)
    assert list(together) == list(weights)
    for name, tensor in together.items():
        # Bit for bit, in fp32.
        assert np.array_equal(tensor.codes, alone[name].codes)
        assert np.array_equal(steps_of(tensor), steps_of(alone[name]))


@pytest.mark.parametrize(("matrices", "sizes"), [(0, [1, 1, 1]), (2, [2, 1]), (9, [3])])
def test_the_memory_of_a_batch_is_bounded(
    matrices: int, sizes: list[int], solver: Solver, weights: dict[str, np.ndarray]
) -> None:
    scheme = parse_scheme("grid8")
    per_matrix = 8 * COLS * (solve.WEIGHT_BYTES + 8 * solve.STATE_BYTES)
    solver = replace(solver, batch_bytes=matrices * per_matrix)
    batches = solver.plan_batches(weights, dict.fromkeys(KEYS, scheme))
    assert [len(batch) for batch in batches] == sizes


def test_a_hessian_is_factored_once(
    solver: Solver, weights: dict[str, np.ndarray], monkeypatch: pytest.MonkeyPatch
) -> None:
    orders: list[bool] = []
    original = gptq.invert

    def count(hessian: torch.Tensor, options: gptq.Options) -> gptq.Inverse:
        orders.append(options.act_order)
        return original(hessian, options)

    monkeypatch.setattr(gptq, "invert", count)
    schemes = dict.fromkeys(weights, parse_scheme("grid4"))
    coarse = solver.solve(weights, schemes)
    fine = replace(solver, constant=0.1).solve(weights, schemes)
    assert orders == [False, False]
    assert all((fine[name].steps < coarse[name].steps).all() for name in weights)
    solver.solve(weights, dict.fromkeys(weights, parse_scheme("gptq6:12.85")))
    assert orders == [False, False, True, True]
    # What the factor depends on is not shared.
    damped = replace(solver, damping=0.1).solve(weights, schemes)
    assert orders == [False, False, True, True, False, False]
    assert any(not np.array_equal(damped[name].codes, coarse[name].codes) for name in weights)


# Steps of a byte.


def test_log_steps_are_chosen_before_the_solve(
    weight: np.ndarray, solver: Solver, inputs: torch.Tensor
) -> None:
    plain, logs = (solve_one(solver, weight, s) for s in ("gptq6:12.85", "gptq6:12.85+log"))
    assert logs.steps.dtype == np.int16 and plain.codes is not None
    # A log step is 2^(1/32) from the fp16 step at most.
    assert np.abs(np.log2(steps_of(logs) / steps_of(plain))).max() <= 1 / 32 + 1e-3
    # PR 1894 puts the 8-bit steps in the place of the others after the solve.
    late = QuantizedTensor(weight.shape, logs.scheme, logs.steps, plain.codes)
    losses = [loss_of(dequantize(t) - weight, inputs) for t in (plain, logs, late)]
    assert losses[1] == pytest.approx(losses[0], rel=0.1)
    assert losses[1] < 0.9 * losses[2]


# Steps by the importance of rows.


def test_rows_that_meet_large_inputs_have_wider_steps(weight: np.ndarray, solver: Solver) -> None:
    plain, tensor = (solve_one(solver, weight, s) for s in ("gptq6:12.85", "gptq6:12.85+hq"))
    squares = solver.calibration.hessians[NAME].diagonal().numpy()
    squares = squares + 0.01 * squares.mean()
    importance = (np.abs(weight) * squares / squares.mean()).mean(1)
    factors = 1 + 0.175 * (importance / importance.mean() - 1)
    assert factors.max() > 1.02 > 0.98 > factors.min()
    assert (steps_of(tensor) / steps_of(plain))[:, 0] == pytest.approx(factors, rel=2e-3)
    twice = solve_one(replace(solver, factor=2.0), weight, "gptq6:12.85+hq")
    assert steps_of(twice) == pytest.approx(2 * steps_of(tensor), rel=2e-3)


def test_rows_of_zeros_have_no_importance(solver: Solver) -> None:
    tensor = solve_one(solver, np.zeros((ROWS, COLS), np.float32), "gptq6:12.85+hq")
    assert not dequantize(tensor).any()


# The best of a few clipping points.


@pytest.mark.parametrize("scheme", ["gptq4+clip", "gptq4+clip+log"])
def test_the_closest_of_five_solutions_is_taken(solver: Solver, scheme: str) -> None:
    rng = np.random.default_rng(6)
    weight = (3 * rng.standard_normal((ROWS, COLS))).astype(np.float32)
    weight[:, 3] *= 8
    parsed = parse_scheme(scheme)
    hessian = solver.calibration.hessians[NAME]
    options = gptq.Options(act_order=True, limit=7)
    inverse = gptq.invert(hessian, options)
    errors = []
    for quantile in (0.999, 0.9995, 0.9999, 0.99999, 1.0):
        reach = np.maximum(np.quantile(np.abs(weight), quantile, axis=1), 1.0)
        steps = (reach / 7).astype(np.float32)
        steps = from_index(to_index(steps)) if parsed.log else steps.astype(np.float16)
        steps = steps.astype(np.float32)[:, None]
        codes = gptq.solve(torch.from_numpy(weight), inverse, torch.from_numpy(steps), options)
        errors.append(float(np.square(codes.codes.numpy() * steps - weight).mean()))
    tensor = solve_one(solver, weight, scheme)
    chosen = float(np.square(dequantize(tensor) - weight).mean())
    assert min(errors) < 0.99 * max(errors)
    assert chosen == pytest.approx(min(errors), rel=1e-3)


def test_small_weights_have_the_least_step(weight: np.ndarray, solver: Solver) -> None:
    tensor = solve_one(solver, 0.1 * weight, "gptq6+clip")
    assert tensor.steps.tolist() == [np.float16(1 / 31)] * ROWS
    wider = solve_one(replace(solver, factor=1.5), 0.1 * weight, "gptq6+clip")
    assert wider.steps.tolist() == [np.float16(1.5 / 31)] * ROWS


# Columns with finer steps.


def test_without_protected_columns_the_solve_is_the_plain_one(
    weight: np.ndarray, solver: Solver
) -> None:
    plain = solve_one(solver, weight, "gptq6:12.85")
    for none in ({}, {NAME: np.zeros(COLS, dtype=bool)}):
        tensor = solve_one(replace(solver, protected=none), weight, "gptq6:12.85+awq")
        assert np.array_equal(tensor.codes, plain.codes)
        assert tensor.columns is not None and not tensor.columns.any()
        assert dequantize(tensor).tobytes() == dequantize(plain).tobytes()


def test_protected_columns_are_an_octave_finer(weight: np.ndarray, solver: Solver) -> None:
    chosen = np.arange(COLS) // 16 == 1
    weight = weight.copy()
    weight[:, chosen] *= 40
    # Inputs that know nothing of one another: every column is rounded to nearest.
    white = replace(solver.calibration, hessians={NAME: torch.eye(COLS)})
    protecting = replace(solver, calibration=white, protected={NAME: chosen})
    tensor, plain = (solve_one(protecting, weight, s) for s in ("gptq4:0.2+awq", "gptq4:0.2"))
    assert tensor.codes is not None and plain.codes is not None and tensor.columns is not None
    assert np.array_equal(tensor.columns, np.where(chosen, -16, 0))
    assert np.array_equal(steps_of(tensor), steps_of(plain) * np.where(chosen, 0.5, 1))
    assert np.array_equal(tensor.codes[:, ~chosen], plain.codes[:, ~chosen])
    finer = np.rint(weight / steps_of(tensor))[:, chosen].clip(-127, 127)
    assert np.array_equal(tensor.codes[:, chosen], finer)
    assert np.abs(plain.codes).max() == 7 and np.abs(tensor.codes).max() == 127


def test_protecting_columns_costs_less_on_the_inputs(
    weight: np.ndarray, solver: Solver, inputs: torch.Tensor
) -> None:
    chosen = inputs.square().sum(0).argsort(descending=True).numpy()[:16]
    protected = np.isin(np.arange(COLS), chosen)
    tensors = (
        solve_one(replace(solver, protected={NAME: mask}), weight, "gptq6:12.85+awq")
        for mask in (protected, np.zeros_like(protected))
    )
    finer, plain = (loss_of(dequantize(t) - weight, inputs) for t in tensors)
    assert finer < plain


# What is refused.


def test_what_cannot_be_solved_is_refused(weight: np.ndarray, solver: Solver) -> None:
    with pytest.raises(RecipeError, match="not calibrated"):
        quantize_model({"other": weight}, ["* grid8"], solver.solve)
    with pytest.raises(ArtifactError, match=r"attn\.q.*NaN"):
        solve_one(solver, np.full_like(weight, np.nan), "grid1")


def test_a_model_is_solved_at_once_beside_what_needs_no_inputs(
    weights: dict[str, np.ndarray], solver: Solver
) -> None:
    rules = ["*.q.weight grid8", "*.k.weight gptq6:12", "* int8"]
    tensors = quantize_model(weights, rules, solver.solve)
    assert list(tensors) == sorted(weights)
    kinds = {name: str(tensor.scheme) for name, tensor in tensors.items()}
    assert kinds[NAME] == "grid8" and kinds[KEYS[1]] == "int8" and kinds[KEYS[2]] == "gptq6:12"
    assert np.array_equal(tensors[NAME].codes, solve_one(solver, weights[NAME], "grid8").codes)


@pytest.mark.gpu
@pytest.mark.parametrize("scheme", ["grid8+columns", "gptq6:12.85+awq"])
def test_devices_agree_on_a_model(
    scheme: str, solver: Solver, weights: dict[str, np.ndarray]
) -> None:
    schemes = dict.fromkeys(weights, parse_scheme(scheme))
    here = solver.solve(weights, schemes)
    there = replace(solver, device=torch.device("cuda")).solve(weights, schemes)
    for name in weights:
        assert np.mean(here[name].codes == there[name].codes) >= 0.999
