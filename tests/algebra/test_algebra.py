"""Networks that were rewritten by algebra train as before."""

from importlib import import_module

import pytest
import torch

from agreement import assert_trains_the_same, network_of
from lever_stacks import batch_of
from underpar.build.levers import resolve_levers
from underpar.compile.regions import Sharing, TracedRun
from underpar.errors import BenchError
from underpar.recipe import load_recipe
from underpar.train.step import mean_loss

NAMES = ("folded_scales", "fused_skips", "one_projection")


@pytest.mark.parametrize("name", NAMES)
def test_a_network_trains_the_same(name: str) -> None:
    assert_trains_the_same(import_module(f"benchmarks.algebra.{name}"))


@pytest.mark.parametrize("name", NAMES)
def test_the_baseline_trains_the_same(name: str) -> None:
    assert_trains_the_same(import_module(f"benchmarks.algebra.{name}"), "baseline+cpu")


def test_the_other_gate_and_no_gate_train_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    candidate = import_module("benchmarks.algebra.one_projection")
    assert_trains_the_same(candidate, "baseline+cpu", ["levers.attn_out_gate=true"])
    monkeypatch.setattr(candidate, "GATES", False)
    assert_trains_the_same(candidate)


def test_skips_need_no_region_of_their_own() -> None:
    recipe = resolve_levers(load_recipe("pr2014+cpu"))
    plain, fused = network_of(recipe), network_of(recipe)
    import_module("benchmarks.algebra.fused_skips").apply(fused, recipe)
    counts = []
    for network in (plain, fused):
        # Each graph keeps the number of the operations that it runs.
        graphs: list[int] = []

        def keep(graph: torch.fx.GraphModule, examples: object, to: list[int] = graphs) -> object:
            to.append(len(graph.graph.nodes))
            return graph

        mean_loss(network, batch_of([9, 30], 128), TracedRun(Sharing(keep)))
        counts.append(sorted(graphs))
    # The smallest graph of the plain network is the skip alone.
    assert min(counts[0]) < min(counts[1])


@pytest.mark.parametrize(
    ("name", "lever", "word"),
    [
        ("folded_scales", "mlp_gate", "mlp_out"),
        ("one_projection", "attn_out_gate", "one gate"),
    ],
)
def test_levers_that_a_candidate_does_not_know_are_refused(
    name: str, lever: str, word: str
) -> None:
    recipe = resolve_levers(load_recipe("pr2014+cpu", [f"levers.{lever}=true"]))
    with pytest.raises(BenchError, match=word):
        import_module(f"benchmarks.algebra.{name}").apply(network_of(recipe), recipe)
