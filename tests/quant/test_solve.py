"""Schemes that need a calibration: what they store, and that it is close where errors cost."""

import numpy as np
import pytest
import torch

from underpar.errors import ArtifactError, RecipeError
from underpar.quant import trellis
from underpar.quant.allocate import Sensitivity
from underpar.quant.calibration import Calibration
from underpar.quant.rules import check_rules, quantize_model
from underpar.quant.schemes import dequantize, parse_scheme, quantize
from underpar.quant.solve import Solver

NAME = "blocks.0.attn.q.weight"
ROWS, COLS = 24, 48


@pytest.fixture(scope="module")
def inputs() -> torch.Tensor:
    """Correlated, with columns of unlike size."""
    generator = torch.Generator().manual_seed(0)
    draw = torch.randn(4096, COLS, generator=generator)
    mix = torch.randn(COLS, COLS, generator=generator) / (1 + torch.arange(COLS))[:, None]
    return draw @ mix


@pytest.fixture(scope="module")
def weight() -> np.ndarray:
    return np.random.default_rng(1).standard_normal((ROWS, COLS)).astype(np.float32)


@pytest.fixture(scope="module")
def solver(inputs: torch.Tensor) -> Solver:
    calibration = Calibration({NAME: inputs.T @ inputs}, {NAME: len(inputs)}, len(inputs))
    costs = Sensitivity(np.geomspace(1.0, 16.0, ROWS), np.ones(COLS))
    return Solver(calibration, {NAME: costs}, 0.4, torch.device("cpu"))


def loss_of(error: np.ndarray, inputs: torch.Tensor) -> float:
    return float((inputs @ torch.from_numpy(error).T).square().sum())


@pytest.mark.parametrize("scheme", ["grid1", "grid8", "grid4+columns"])
def test_grids_have_steps_by_what_errors_cost(
    scheme: str, weight: np.ndarray, solver: Solver
) -> None:
    tensor = solver.solve(NAME, weight, parse_scheme(scheme))
    assert tensor.codes is not None and str(tensor.scheme) == scheme
    # A row that costs 16 times as much is rounded four times as finely: two octaves.
    assert tensor.steps[0] - tensor.steps[-1] == 32
    assert (tensor.columns is None) == ("columns" not in scheme)
    if tensor.scheme.states > 1:
        assert trellis.is_legal(torch.from_numpy(tensor.codes), tensor.scheme.states)
    assert np.abs(dequantize(tensor) - weight).max() < 4


def test_feedback_costs_less_on_the_inputs_in_the_form_of_rounding(
    weight: np.ndarray, solver: Solver, inputs: torch.Tensor
) -> None:
    rounded = quantize(weight, parse_scheme("int6:12.85"))
    solved = solver.solve(NAME, weight, parse_scheme("gptq6:12.85"))
    assert solved.steps.tobytes() == rounded.steps.tobytes()
    assert solved.codes is not None and solved.codes.dtype == np.int8
    losses = [loss_of(dequantize(t) - weight, inputs) for t in (solved, rounded)]
    assert losses[0] < 0.8 * losses[1]


def test_what_cannot_be_solved_is_refused(weight: np.ndarray, solver: Solver) -> None:
    with pytest.raises(RecipeError, match=r"grid8.*needs a calibration"):
        quantize_model({NAME: weight}, ["* grid8"])
    # Before anything is trained.
    with pytest.raises(RecipeError, match=r"gptq6:12.*needs a calibration"):
        check_rules([NAME], ["* gptq6:12"])
    with pytest.raises(RecipeError, match="not calibrated"):
        quantize_model({"other": weight}, ["* grid8"], solver.solve)
    with pytest.raises(ArtifactError, match="NaN"):
        solver.solve(NAME, np.full_like(weight, np.nan), parse_scheme("grid1"))


@pytest.mark.parametrize("text", ["grid2", "grid", "gptq9:3", "gptq", "grid8+rows", "int6:1000"])
def test_unknown_schemes_are_refused(text: str) -> None:
    with pytest.raises(RecipeError, match="expected fp16"):
        parse_scheme(text)


@pytest.mark.parametrize("text", ["gptq6:12.85", "gptq7", "grid1", "grid64+columns", "int6:12"])
def test_a_scheme_is_what_it_says(text: str) -> None:
    assert str(parse_scheme(text)) == text
