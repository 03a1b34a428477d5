"""Other forms of a network train as the plain network does, and stand back if they do not fit."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, fx
from torch._dynamo.backends.debugging import aot_eager

from agreement import network_of
from lever_stacks import MODEL, batch_of, groups_of, stack_with
from underpar.build.levers import plug_levers, resolve_levers
from underpar.compile.regions import Sharing
from underpar.compile.rewrites import (
    FOLDED_SCALES,
    FUSED_SKIPS,
    LINEAR_LOSS,
    REWRITES,
    Choice,
    choose_rewrites,
)
from underpar.compile.traced_run import TracedRun
from underpar.core.runtime import Runtime
from underpar.data.batch import Batch
from underpar.errors import UnderparError
from underpar.model.network import EAGER, Eager, Network
from underpar.recipe import Recipe, list_recipes, load_recipe
from underpar.train.step import mean_loss

ALL = frozenset(REWRITES)
# Loops off and on, first and last context.
ENDS = (0.0, 1.0)


class Gpu(Runtime):
    """A GPU with bf16, on a machine without one."""

    @property
    def dtype(self) -> torch.dtype:
        return torch.bfloat16


GPU = Gpu(torch.device("cuda"), compiled=True)
CPU = Runtime(torch.device("cpu"), compiled=True)


class Graphs:
    """Runs graphs as they are, and counts their operations."""

    def __init__(self) -> None:
        self.sizes: list[int] = []

    def __call__(self, graph: fx.GraphModule, examples: list[Any]) -> Any:
        self.sizes.append(len(graph.graph.nodes))
        return graph


def loss_and_gradients(
    network: Network, run: Eager, batch: Batch, levers: Sequence[Any] = ()
) -> dict[str, Tensor]:
    network.zero_grad(set_to_none=True)
    loss = mean_loss(network, batch, run, levers)
    loss.backward()
    found = {n: p.grad for n, p in network.named_parameters() if p.grad is not None}
    return {"loss": loss.detach()} | found


def assert_trains_the_same(network: Network, run: Eager, levers: Sequence[Any] = ()) -> None:
    batch = batch_of([9, 30, 50], 128, words=network.spec.vocab_size)
    for progress in ENDS:
        network.set_progress(progress)
        wanted = loss_and_gradients(network, EAGER, batch, levers)
        assert len(wanted) > 5
        # While it is traced, and from the graph.
        for _ in range(2):
            ours = loss_and_gradients(network, run, batch, levers)
            torch.testing.assert_close(ours, wanted, rtol=1e-4, atol=1e-5)


def recipe_of(name: str, *overrides: str) -> Recipe:
    return resolve_levers(load_recipe(name, list(overrides)))


def loss_levers(recipe: Recipe) -> list[Any]:
    levers = plug_levers(recipe, "train").values()
    return [lever for lever in levers if hasattr(lever, "weigh") or hasattr(lever, "more_targets")]


# Recipes that learn the cap or have none, on a GPU too.
NO_CONSTANT_CAP = ("demo", "hnet-m1", "hnet-m1-fixed", "hnet-m2")


# Overlays change no network.
OVERLAYS = ("cpu", "gpu-24gb", "gpu-16gb", "one-gpu")


@pytest.mark.parametrize("name", [name for name in list_recipes() if name not in OVERLAYS])
def test_every_recipe_trains_the_same(name: str) -> None:
    recipe = recipe_of(f"{name}+cpu")
    network, levers = network_of(recipe), loss_levers(recipe)
    choice = choose_rewrites("auto", network, GPU, levers)
    assert choice.refused.keys() == ({LINEAR_LOSS} if name in NO_CONSTANT_CAP else set())
    assert choice.names == ALL - choice.refused.keys()
    assert_trains_the_same(network, TracedRun(Sharing(Graphs()), choice.names), levers)


@pytest.mark.parametrize("name", REWRITES)
def test_each_alone_trains_the_same(name: str) -> None:
    network = network_of(recipe_of("h200-300s+cpu"))
    assert_trains_the_same(network, TracedRun(Sharing(Graphs()), [name]))


@pytest.mark.slow
def test_all_train_the_same_as_a_compiler_takes_them() -> None:
    network = network_of(recipe_of("h200-300s+cpu"))
    assert_trains_the_same(network, TracedRun(Sharing(aot_eager), ALL))


STACKS = [*groups_of([case for case in MODEL if case != "mudd"]), ("mudd",)]


@pytest.mark.parametrize("cases", STACKS, ids="+".join)
def test_every_lever_trains_the_same(cases: tuple[str, ...]) -> None:
    network = network_of(stack_with(*cases))
    names = choose_rewrites("auto", network, GPU).names
    assert FUSED_SKIPS in names
    assert_trains_the_same(network, TracedRun(Sharing(Graphs()), names))


def test_visits_with_skips_are_one_region() -> None:
    network = network_of(recipe_of("pr2014+cpu"))
    network.set_progress(1.0)
    apart, together = Graphs(), Graphs()
    batch = batch_of([9, 30], 128)
    mean_loss(network, batch, TracedRun(Sharing(apart)))
    mean_loss(network, batch, TracedRun(Sharing(together), [FUSED_SKIPS]))
    # The smallest graph of the plain network is the skip alone.
    assert min(apart.sizes) < min(together.sizes)
    # Blocks and lanes, each with and without a skip, and where the lanes open.
    assert (len(apart.sizes), len(together.sizes)) == (5, 7)


def test_no_logits_are_stored() -> None:
    network = network_of(recipe_of("h200-300s+cpu"))
    batch = batch_of([9, 30], 128)
    shapes = []
    for rewrites in ((), (LINEAR_LOSS,)):
        kept: list[tuple[int, ...]] = []

        def keep(tensor: Tensor, kept: list[tuple[int, ...]] = kept) -> Tensor:
            kept.append(tuple(tensor.shape))
            return tensor

        run = TracedRun(Sharing(Graphs()), rewrites)
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            mean_loss(network, batch, run)
        shapes.append(kept)
    logits = (len(batch.inputs), network.spec.vocab_size)
    assert logits in shapes[0] and logits not in shapes[1]


@pytest.mark.parametrize(
    ("lever", "name", "reason"),
    [
        ("recur_lora", FOLDED_SCALES, "levers at the seam 'adjust' act before the scale"),
        ("mlp_gate", FOLDED_SCALES, "levers at the seam 'mlp_out' act before the scale"),
        ("recur_lora", LINEAR_LOSS, "levers at the seam 'adjust' change logits"),
        ("softcap", LINEAR_LOSS, "the soft cap of a lever is no constant"),
        ("asym_softcap", LINEAR_LOSS, "the soft cap of a lever is no constant"),
        ("logit_rescale", LINEAR_LOSS, "the soft cap of a lever is no constant"),
    ],
)
def test_a_rewrite_stands_back_for_levers(lever: str, name: str, reason: str) -> None:
    network = network_of(stack_with(lever))
    choice = choose_rewrites("auto", network, GPU)
    assert choice.refused[name] == reason and name not in choice.names
    assert f"trains without {name}: {reason}" in choice.notes()
    with pytest.raises(UnderparError, match=f"rewrite '{name}' does not fit: {reason}"):
        choose_rewrites(f"{FUSED_SKIPS},{name}", network, GPU)


@pytest.mark.parametrize("lever", ["softcap", "asym_softcap"])
def test_a_frozen_cap_is_a_constant_until_it_is_another(lever: str) -> None:
    network = network_of(recipe_of("cpu", f"levers.{lever}.train=false"))
    assert choose_rewrites("auto", network, GPU) == Choice(ALL)
    with torch.no_grad():
        next(iter(network.levers[lever].parameters())).add_(1.0)
    assert LINEAR_LOSS in choose_rewrites("auto", network, GPU).refused


def test_levers_of_the_loss_need_logits() -> None:
    recipe = recipe_of("cpu", "levers.multi_token=true")
    network = network_of(recipe)
    choice = choose_rewrites("auto", network, GPU, loss_levers(recipe))
    assert choice.refused == {LINEAR_LOSS: "levers change the loss of each token"}


def test_a_cpu_is_told_nothing() -> None:
    network = network_of(recipe_of("cpu"))
    assert choose_rewrites("auto", network, CPU) == Choice(frozenset({FOLDED_SCALES, FUSED_SKIPS}))
    assert choose_rewrites("auto", network, Runtime(torch.device("cpu"))) == Choice()
    assert choose_rewrites("none", network, GPU) == Choice()
    with pytest.raises(UnderparError, match="linear_loss' does not fit: runs on CUDA only"):
        choose_rewrites(LINEAR_LOSS, network, CPU)
    with pytest.raises(UnderparError, match="no rewrite 'fused_skip'; did you mean 'fused_skips'"):
        choose_rewrites("fused_skip", network, GPU)
    with pytest.raises(UnderparError, match="the network is not compiled"):
        choose_rewrites(FUSED_SKIPS, network, Runtime(torch.device("cpu")))
