"""The candidate ema_update: update, decay and average of weights in one pass."""

from collections.abc import Callable
from functools import partial

import pytest
import torch

from agreement import gradients, network_of
from underpar.build.levers import resolve_levers
from underpar.model.network import EAGER
from underpar.recipe import load_recipe
from underpar.train.optim import Optimizer

ema_update = pytest.importorskip("benchmarks.fusion_study.ema_update")


def test_tiles_compute_as_the_plain_version_does(interpreted: Callable[..., None]) -> None:
    interpreted(ema_update.check, torch.device("cpu"))


@pytest.mark.parametrize("num_averages", [0, 2])
def test_the_operator_is_well_registered(
    num_averages: int, interpreted: Callable[..., None]
) -> None:
    interpreted(partial(_check_registration, num_averages))


def _check_registration(num_averages: int) -> None:
    weights, averages = ([torch.randn(3, 4) for _ in range(n)] for n in (2, num_averages))
    args = (torch.randn(2, 3, 4), weights, averages, [0.9, 0.1, 0.5])
    torch.library.opcheck(torch.ops.fusion_study.update.default, args)


def test_an_optimizer_takes_the_same_steps(interpreted: Callable[..., None]) -> None:
    _take_steps()
    interpreted(_take_steps)


def _take_steps() -> None:
    overrides = ["model.num_layers=2", "train.newton_schulz=polar"]
    recipe = resolve_levers(load_recipe("baseline+cpu", overrides))
    networks = [network_of(recipe) for _ in range(2)]
    optimizers = [Optimizer(network, recipe.train) for network in networks]
    ema_update.apply_optimizer(optimizers[1], recipe)
    before = [p.detach().clone() for p in networks[0].parameters()]
    for _ in range(3):
        for network, optimizer in zip(networks, optimizers, strict=True):
            gradients(network, EAGER, 1.0)
            optimizer.step(1.0, 0.9)
    pairs = list(zip(*(network.parameters() for network in networks), strict=True))
    for plain, ours in pairs:
        torch.testing.assert_close(ours, plain, rtol=1e-4, atol=1e-5)
    assert not any(torch.equal(old, plain) for old, (plain, _) in zip(before, pairs, strict=True))
