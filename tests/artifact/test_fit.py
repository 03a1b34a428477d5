"""Fitting to the cap: few rounds, never over, loud where it cannot be."""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from underpar.artifact.fit import CLOSE, CLOSE_BYTES, MOST_BITS, MOST_ROUNDS, Round, fit_to_cap
from underpar.artifact.pack import Artifact, pack
from underpar.errors import ArtifactError
from underpar.quant.allocate import Layout, RateCurve, Sensitivity, allocate, rate_curve
from underpar.quant.schemes import QuantizedTensor, parse_scheme
from underpar.recipe import Recipe

CAP = 1_600_000


def gaussian_curve(num_weights: int) -> RateCurve:
    return RateCurve(np.linspace(-3, 3, 61), np.full(61, num_weights // 61))


@settings(max_examples=60, deadline=None)
@given(st.floats(0.95, 1.05), st.floats(0.97, 1.03), st.integers(20_000, 100_000))
def test_three_rounds_from_a_wrong_start(start: float, slope: float, offset: int) -> None:
    """The guess is 5 % off, the coder 3 % off the prediction."""
    curve = gaussian_curve(3_600_000)
    tried: list[float] = []

    def make(constant: float) -> tuple[float, int]:
        tried.append(constant)
        return constant, round(slope * curve.bits(constant) / 8 + offset)

    fitted = fit_to_cap(make, curve, CAP, start * offset)
    assert len(fitted.rounds) == len(tried) <= 3
    assert fitted.made == fitted.best.constant == tried[-1]
    assert CAP * (1 - CLOSE) <= fitted.best.total_bytes <= CAP
    assert CAP - fitted.best.total_bytes <= 2_000


def test_what_is_over_the_cap_is_never_taken() -> None:
    curve = gaussian_curve(3_600_000)
    sizes = iter([CAP + 1, CAP + 1, CAP - 7_000, CAP + 1, CAP + 1])
    seen: list[Round] = []
    fitted = fit_to_cap(lambda c: (c, next(sizes)), curve, CAP, 1_000, seen.append)
    assert fitted.best.total_bytes == CAP - 7_000
    assert tuple(seen) == fitted.rounds and len(seen) == MOST_ROUNDS
    with pytest.raises(ArtifactError, match=rf"{CAP} bytes \({CAP + 1} at best\)"):
        fit_to_cap(lambda c: (c, CAP + 1), curve, CAP, 1_000)
    with pytest.raises(ArtifactError, match="no room for weights"):
        fit_to_cap(lambda c: (c, 0), curve, CAP, 2 * CAP)


@pytest.mark.parametrize("cap", [CAP // 2, 4 * CAP])
def test_steps_never_get_finer_than_the_least_constant(cap: int) -> None:
    curve = gaussian_curve(3_600_000)
    fitted = fit_to_cap(lambda c: (c, round(curve.bits(c) / 8)), curve, cap, 0, least=0.5)
    finest = round(curve.bits(0.5) / 8)
    assert CAP // 2 < finest < 4 * CAP
    assert (fitted.made == 0.5) == (finest <= cap)
    assert fitted.best.total_bytes <= min(finest, cap)


def test_a_wrong_guess_does_not_widen_what_fits() -> None:
    curve = gaussian_curve(3_600_000)
    size = round(curve.bits(1.0) / 8)
    fitted = fit_to_cap(
        lambda c: (c, round(curve.bits(c) / 8)), curve, size + 5_000, 400_000, least=1.0
    )
    assert fitted.rounds[0].constant > 1 and fitted.made == 1


def test_a_small_model_does_not_fill_its_cap() -> None:
    curve = gaussian_curve(10_000)
    fitted = fit_to_cap(lambda c: (c, round(curve.bits(c) / 8)), curve, CAP, 0)
    assert len(fitted.rounds) == 1
    weights = int(curve.counts.sum())
    assert fitted.best.total_bytes == pytest.approx(weights * MOST_BITS / 8, rel=0.001)


def rounded(weights: dict[str, np.ndarray], costs: dict[str, Sensitivity], constant: float) -> int:
    """Bytes of matrices rounded to the nearest points of their grids, really packed."""
    tensors = {}
    for name, weight in weights.items():
        steps = allocate(costs[name], constant, columns=True)
        codes = np.rint(weight / steps.values()).astype(np.int16)
        scheme = parse_scheme("grid1+columns")
        tensors[name] = QuantizedTensor(weight.shape, scheme, steps.rows, codes, steps.columns)
    return len(pack(Artifact(Recipe(), b"tokenizer", tensors)))


@pytest.fixture(scope="module")
def matrices() -> tuple[dict[str, np.ndarray], dict[str, Sensitivity]]:
    rng = np.random.default_rng(0)
    shapes = {"a": (200, 128), "b": (64, 300)}
    weights = {
        n: (0.02 * rng.standard_normal(shape)).astype(np.float32) for n, shape in shapes.items()
    }
    costs = {
        n: Sensitivity(rng.lognormal(sigma=0.7, size=s[0]), rng.lognormal(sigma=0.3, size=s[1]))
        for n, s in shapes.items()
    }
    return weights, costs


def test_coarser_steps_never_take_more(
    matrices: tuple[dict[str, np.ndarray], dict[str, Sensitivity]],
) -> None:
    sizes = [rounded(*matrices, 0.004 * 1.02**i) for i in range(25)]
    assert all(after <= before + 200 for before, after in pairwise(sizes))
    assert sizes[-1] < sizes[0] - 2_000


def test_real_matrices_fill_their_cap(
    matrices: tuple[dict[str, np.ndarray], dict[str, Sensitivity]],
) -> None:
    weights, costs = matrices
    curve = rate_curve(weights, costs, dict.fromkeys(weights, Layout(columns=True)))
    cap = 20_000
    fitted = fit_to_cap(lambda c: (c, rounded(weights, costs, c)), curve, cap, 3_000)
    assert len(fitted.rounds) <= 4
    assert cap - CLOSE_BYTES <= fitted.best.total_bytes <= cap
