"""The start of the projections: what nn.init.orthogonal_ draws, by another way."""

import pytest
import torch
from torch import Tensor, nn

from underpar.model.gpt import orthogonal_

SHAPES = [(96, 40), (40, 96), (64, 64), (7, 1), (1, 7)]


def draw(shape: tuple[int, int], seed: int = 0) -> Tensor:
    torch.manual_seed(seed)
    weight = torch.empty(shape)
    orthogonal_(weight)
    return weight


@pytest.mark.parametrize("shape", SHAPES)
def test_the_shorter_side_is_orthonormal(shape: tuple[int, int]) -> None:
    weight = draw(shape).double()
    gram = weight.T @ weight if shape[0] >= shape[1] else weight @ weight.T
    torch.testing.assert_close(gram, torch.eye(min(shape), dtype=torch.float64), rtol=0, atol=1e-6)


@pytest.mark.parametrize("shape", SHAPES)
def test_it_draws_what_torch_draws(shape: tuple[int, int]) -> None:
    torch.manual_seed(0)
    expected = nn.init.orthogonal_(torch.empty(shape))
    after = torch.get_rng_state()
    torch.testing.assert_close(draw(shape), expected, rtol=0, atol=1e-5)
    # Weights drawn after it are the same, too.
    assert torch.equal(torch.get_rng_state(), after)
    assert not torch.allclose(draw(shape, seed=1), expected, atol=1e-2)


def test_a_parameter_is_filled_in_place_and_in_its_own_precision() -> None:
    weight = nn.Parameter(torch.zeros(24, 8, dtype=torch.bfloat16))
    orthogonal_(weight)
    assert weight.dtype == torch.bfloat16 and weight.requires_grad and weight.grad_fn is None
    gram = (weight.T.double() @ weight.double()).detach()
    torch.testing.assert_close(gram, torch.eye(8, dtype=torch.float64), rtol=0, atol=2e-2)


def test_shapes_alone_need_no_numbers() -> None:
    for shape in SHAPES:
        weight = torch.empty(shape, device="meta")
        orthogonal_(weight)
        assert weight.is_meta and weight.shape == shape


def test_a_matrix_that_is_almost_singular_still_gives_a_start(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def two_equal_columns(tensor: torch.Tensor) -> torch.Tensor:
        torch.manual_seed(0)
        tensor.copy_(torch.randn(tensor.shape))
        tensor[:, 1] = tensor[:, 0]
        return tensor

    monkeypatch.setattr(torch.Tensor, "normal_", two_equal_columns)
    weight = torch.empty(12, 12)
    orthogonal_(weight)
    torch.testing.assert_close(weight @ weight.T, torch.eye(12), rtol=0, atol=1e-6)
