"""The candidate block_epilogue: streams, their factors and their norm in one pass."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch

from agreement import assert_trains_the_same
from lever_stacks import randomized
from underpar.build.levers import resolve_levers
from underpar.errors import BenchError
from underpar.recipe import load_recipe

block_epilogue = pytest.importorskip("benchmarks.fusion_study.block_epilogue")
FEW_LAYERS = ("model.num_layers=3", "levers.loop=false", "levers.lanes=false")
PLAIN_SKIPS = ("levers.unet.gates=false", "levers.lanes=false", "levers.norm_scale=false")


def test_tiles_compute_as_the_plain_version_does(interpreted: Callable[..., None]) -> None:
    interpreted(block_epilogue.check, torch.device("cpu"))


@pytest.mark.parametrize("name", list(block_epilogue.OPERATORS))
def test_narrow_streams_are_held_to_their_precision(
    name: str, interpreted: Callable[..., None]
) -> None:
    interpreted(_check_narrow, name)


def _check_narrow(name: str) -> None:
    operator = block_epilogue.OPERATORS[name]

    def inputs(device: torch.device, tokens: int) -> tuple[Any, ...]:
        factors, scale, *streams = operator.inputs(device, tokens)
        factors = factors.detach().bfloat16().float().requires_grad_()
        return factors, scale, *(z.detach().bfloat16().requires_grad_() for z in streams)

    replace(operator, inputs=inputs).check(torch.device("cpu"))


@pytest.mark.slow
@pytest.mark.parametrize("overrides", [(), PLAIN_SKIPS], ids=["gated", "plain"])
def test_a_network_trains_the_same(overrides: tuple[str, ...]) -> None:
    assert_trains_the_same(block_epilogue, overrides=overrides)


@pytest.mark.slow
def test_a_network_of_tiles_trains_the_same(interpreted: Callable[..., None]) -> None:
    interpreted(_train_interpreted)


def _train_interpreted() -> None:
    assert_trains_the_same(block_epilogue, overrides=FEW_LAYERS)


@pytest.mark.parametrize("num_streams", [1, 2, 3])
def test_the_operator_is_well_registered(
    num_streams: int, interpreted: Callable[..., None]
) -> None:
    interpreted(partial(_check_registration, num_streams))


def _check_registration(num_streams: int) -> None:
    streams = [torch.randn(5, 8, requires_grad=True) for _ in range(num_streams)]
    factors = torch.randn(num_streams, 8, requires_grad=True)
    args = (streams, factors, torch.tensor(0.5))
    torch.library.opcheck(torch.ops.fusion_study.mix_norm.default, args)


def test_a_lever_that_it_does_not_know_is_refused() -> None:
    recipe = resolve_levers(load_recipe("baseline+cpu", ["levers.layer_scale=true"]))
    with pytest.raises(BenchError, match="layer_scale"):
        block_epilogue.apply(randomized(recipe), recipe)
