"""The candidate linear_loss: the loss of the head without the logits of all tokens."""

from collections.abc import Callable

import pytest
import torch

from agreement import assert_trains_the_same
from lever_stacks import randomized
from underpar.build.levers import resolve_levers
from underpar.errors import BenchError
from underpar.recipe import load_recipe

linear_loss = pytest.importorskip("benchmarks.fusion_study.linear_loss")


def test_tiles_compute_as_the_reference_does(
    interpreted: Callable[..., None],
) -> None:
    interpreted(linear_loss.check, torch.device("cpu"))


def test_a_network_trains_the_same() -> None:
    assert_trains_the_same(linear_loss)


def test_the_operator_is_well_registered() -> None:
    x, weight = (torch.randn(n, 8, requires_grad=True) for n in (5, 11))
    targets = torch.randint(11, (5,))
    torch.library.opcheck(torch.ops.fusion_study.linear_loss.default, (x, weight, targets, 30.0, 2))


def test_a_head_that_does_more_is_refused() -> None:
    learned = resolve_levers(load_recipe("baseline+cpu", ["levers.softcap=true"]))
    with pytest.raises(BenchError, match="train = false"):
        linear_loss.apply(randomized(learned), learned)
