"""The clipping search: never worse than the row's largest value, safe on odd rows."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from underpar.errors import ArtifactError
from underpar.quant.clip_search import QUANTILES, search_steps
from underpar.quant.gptq import round_to_nearest


def draw(seed: int, rows: int = 6, cols: int = 700) -> torch.Tensor:
    return torch.randn(rows, cols, generator=torch.Generator().manual_seed(seed))


def row_errors(weight: torch.Tensor, steps: torch.Tensor, limit: int) -> torch.Tensor:
    restored = round_to_nearest(weight, steps, limit) * steps
    return (restored - weight).square().sum(dim=1)


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 2**32 - 1), st.sampled_from([1, 3, 15, 31]))
def test_each_row_gets_the_best_quantile(seed: int, limit: int) -> None:
    weight = draw(seed)
    steps = search_steps(weight, limit)
    assert steps.shape == (6, 1)
    tried = [weight.abs().quantile(q, dim=1, keepdim=True) / limit for q in QUANTILES]
    errors = torch.stack([row_errors(weight, t, limit) for t in tried])
    assert torch.allclose(row_errors(weight, steps, limit), errors.amin(dim=0), rtol=1e-4)


def test_an_outlier_is_clipped_in_its_own_row_only() -> None:
    weight = draw(0, cols=4000)
    weight[2, 5] = 9.0
    steps = search_steps(weight, 3)[:, 0]
    largest = weight.abs().amax(dim=1) / 3
    assert steps[2] < 0.6 * largest[2]
    assert torch.equal(search_steps(weight, 3, [1.0])[:, 0], largest)


def test_zero_and_constant_rows() -> None:
    weight = torch.tensor([[0.0] * 5, [1.0] * 5, [-2.5] * 5])
    steps = search_steps(weight, 31)
    assert (steps > 0).all()
    restored = round_to_nearest(weight, steps, 31) * steps
    assert (restored[0] == 0).all()
    assert torch.allclose(restored, weight, rtol=1e-6)


@settings(max_examples=20, deadline=None)
@given(st.integers(-6, 20))
def test_a_power_of_two_scales_the_steps(octaves: int) -> None:
    weight = draw(3)
    assert torch.equal(
        search_steps(weight * 2.0**octaves, 31), search_steps(weight, 31) * 2.0**octaves
    )


def test_nan_is_refused() -> None:
    with pytest.raises(ArtifactError, match="NaN"):
        search_steps(torch.tensor([[1.0, torch.nan]]), 31)
