"""The candidate mlp: products whose epilogues are the activation and its gradient."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F

from agreement import assert_trains_the_same
from lever_stacks import randomized
from underpar.build.levers import resolve_levers
from underpar.errors import BenchError
from underpar.lab.closeness import require_close
from underpar.recipe import load_recipe

mlp = pytest.importorskip("benchmarks.fusion_study.mlp")


@pytest.mark.parametrize("name", list(mlp.OPERATORS))
def test_tiles_compute_as_the_plain_version_does(
    name: str, interpreted: Callable[..., None]
) -> None:
    interpreted(_check, name)


def _check(name: str) -> None:
    mlp.OPERATORS[name].check(torch.device("cpu"))


def test_variants_that_round_h_are_compared_with_a_square_of_rounded_values() -> None:
    torch.manual_seed(0)
    dim, hidden, slope, kind = 512, 2048, 0.5, torch.bfloat16
    x, up, down = torch.randn(32, dim), torch.randn(hidden, dim), torch.randn(dim, hidden)
    x, up, down = (t.to(kind).float() for t in (x, up / dim**0.5, down / hidden**0.5))

    def with_h(round_h: bool) -> torch.Tensor:
        """As the kernels of v2 and v3: sums in fp32, and bf16 where a tensor is stored."""
        h = F.rms_norm(x, (dim,)).to(kind).float() @ up.T
        h = h.to(kind).float() if round_h else h
        return (F.leaky_relu(h, slope).square().to(kind).float() @ down.T).to(kind)

    exact = [t.double() for t in (x, up, down)]
    for name, round_h in (("mlp.v2", True), ("mlp.v3", False)):
        wanted = mlp.OPERATORS[name].plain(*exact, slope, kind)
        require_close(name, [with_h(round_h)], [wanted], kind, num_outputs=1)
        with pytest.raises(BenchError, match=name):
            require_close(name, [with_h(not round_h)], [wanted], kind, num_outputs=1)


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
