"""The candidate mlp: products whose epilogues are the activation and its gradient."""

from collections.abc import Callable

import pytest
import torch

from agreement import assert_trains_the_same
from lever_stacks import randomized
from underpar.build.levers import resolve_levers
from underpar.errors import BenchError
from underpar.recipe import load_recipe

mlp = pytest.importorskip("benchmarks.fusion_study.mlp")


@pytest.mark.parametrize("name", list(mlp.OPERATORS))
def test_tiles_compute_as_the_plain_version_does(
    name: str, interpreted: Callable[..., None]
) -> None:
    interpreted(_check, name)


def _check(name: str) -> None:
    mlp.OPERATORS[name].check(torch.device("cpu"))


@pytest.mark.slow
@pytest.mark.parametrize("overrides", [(), ("levers.leaky_square=false",)], ids=["leaky", "plain"])
def test_a_network_trains_the_same(overrides: tuple[str, ...]) -> None:
    assert_trains_the_same(mlp, overrides=overrides)


def test_the_operator_is_well_registered(interpreted: Callable[..., None]) -> None:
    interpreted(_check_registration)


def _check_registration() -> None:
    shapes = ((5, 16), (32, 16), (16, 32))
    x, up, down = (torch.randn(shape, requires_grad=True) for shape in shapes)
    args = (x, torch.ones(()), up, down, 0.5, mlp.BEST)
    torch.library.opcheck(torch.ops.fusion_study.mlp.default, args)


def test_another_activation_is_refused() -> None:
    recipe = resolve_levers(load_recipe("baseline+cpu", ["levers.mlp_gate=true"]))
    network = randomized(recipe)
    mlp.apply(network, recipe)
    network.levers["other"] = torch.nn.Module()
    network.levers["other"].activate = torch.relu
    with pytest.raises(BenchError, match="leaky_square"):
        mlp.apply(network, recipe)
