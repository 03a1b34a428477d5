"""Which columns are protected: one ranking over the whole model, in aligned groups."""

import numpy as np
import pytest
import torch

from underpar.errors import RecipeError
from underpar.quant.awq import choose
from underpar.quant.calibration import Calibration

NAMES = ["a", "b"]


@pytest.fixture
def weights() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    return {"a": rng.standard_normal((5, 12)), "b": rng.standard_normal((7, 10))}


@pytest.fixture
def calibration() -> Calibration:
    """Inputs of size 1, but of size 3 in columns 4 ... 7 of b; b has half as many."""
    b = torch.eye(10)
    b[range(4, 8), range(4, 8)] = 9.0
    return Calibration({"a": 200 * torch.eye(12), "b": 100 * b}, {"a": 200, "b": 100}, 200)


def saliencies(weights: dict[str, np.ndarray], calibration: Calibration) -> dict[str, np.ndarray]:
    return {
        name: calibration.rms(name).numpy() * np.abs(weights[name]).mean(axis=0) for name in NAMES
    }


def test_the_best_group_of_the_model_is_protected(
    weights: dict[str, np.ndarray], calibration: Calibration
) -> None:
    chosen = choose(weights, calibration, NAMES, 1, 4)
    assert not chosen["a"].any()
    assert np.flatnonzero(chosen["b"]).tolist() == [4, 5, 6, 7]
    assert chosen["b"].dtype == bool and chosen["b"].shape == (10,)
    # Large weights count as large inputs do.
    weights["a"][:, 8:] *= 10
    chosen = choose(weights, calibration, NAMES, 1, 4)
    assert np.flatnonzero(chosen["a"]).tolist() == [8, 9, 10, 11] and not chosen["b"].any()


@pytest.mark.parametrize("num_groups", range(8))
def test_groups_are_taken_by_their_sum(
    num_groups: int, weights: dict[str, np.ndarray], calibration: Calibration
) -> None:
    chosen = choose(weights, calibration, NAMES, num_groups, 4)
    computed = saliencies(weights, calibration)
    sums = {
        (n, i): computed[n][i : i + 4].sum() for n in NAMES for i in range(0, len(computed[n]), 4)
    }
    best = sorted(sums, key=lambda group: -sums[group])[:num_groups]
    assert {(n, i) for n, i in sums if chosen[n][i]} == set(best)
    # Groups are whole; the last one of b has two columns.
    assert all(len(set(chosen[n][i : i + 4])) == 1 for n, i in sums)


def test_only_named_matrices_take_part(
    weights: dict[str, np.ndarray], calibration: Calibration
) -> None:
    chosen = choose(weights, calibration, ["a"], 1, 4)
    assert list(chosen) == ["a"] and chosen["a"].sum() == 4
    assert choose(weights, calibration, [], 1, 4) == {}


def test_of_equals_the_first_is_taken() -> None:
    weights = {"a": np.ones((2, 8))}
    calibration = Calibration({"a": torch.eye(8)}, {"a": 1}, 1)
    assert np.flatnonzero(choose(weights, calibration, ["a"], 1, 4)["a"]).tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize(("num_groups", "group_columns"), [(-1, 4), (1, 0)])
def test_odd_settings_are_refused(
    num_groups: int, group_columns: int, weights: dict[str, np.ndarray], calibration: Calibration
) -> None:
    with pytest.raises(RecipeError, match="awq_groups"):
        choose(weights, calibration, NAMES, num_groups, group_columns)
