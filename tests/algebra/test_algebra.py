"""Networks that were rewritten by algebra train as before."""

from collections.abc import Sequence
from importlib import import_module
from typing import Any

import pytest
import torch
from functorch.compile import min_cut_rematerialization_partition
from torch import Tensor, fx
from torch._functorch.aot_autograd import aot_module_simplified
from torch._inductor.decomposition import select_decomp_table
from torch._inductor.fx_passes import post_grad
from torch._inductor.virtualized import V

from agreement import assert_trains_the_same, gradients, network_of
from lever_stacks import batch_of
from underpar.build.levers import resolve_levers
from underpar.compile.regions import Sharing
from underpar.compile.rewrites import REWRITES
from underpar.compile.traced_run import TracedRun
from underpar.errors import BenchError
from underpar.model.gpt import GPT
from underpar.model.network import EAGER
from underpar.recipe import load_recipe
from underpar.train.step import mean_loss

NAMES = ("one_projection", "late_sums", "sums_apart")
candidate = import_module("benchmarks.algebra.one_projection")


@pytest.mark.parametrize("name", NAMES)
def test_a_network_trains_the_same(name: str) -> None:
    assert_trains_the_same(import_module(f"benchmarks.algebra.{name}"))


@pytest.mark.parametrize("name", NAMES)
def test_the_baseline_trains_the_same(name: str) -> None:
    assert_trains_the_same(import_module(f"benchmarks.algebra.{name}"), "baseline+cpu")


def test_the_other_gate_and_no_gate_train_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    assert_trains_the_same(candidate, "baseline+cpu", ["levers.attn_out_gate=true"])
    monkeypatch.setattr(candidate, "GATES", False)
    assert_trains_the_same(candidate)


def test_a_second_gate_is_refused() -> None:
    recipe = resolve_levers(load_recipe("pr2014+cpu", ["levers.attn_out_gate=true"]))
    with pytest.raises(BenchError, match="one gate"):
        candidate.apply(network_of(recipe), recipe)


def test_gradients_of_the_first_embedding_are_summed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    late_sums = import_module("benchmarks.algebra.late_sums")
    sums: list[int] = []
    plain_sum = late_sums._sum

    def counted(tensors: list[Tensor]) -> Tensor:
        sums.append(len(tensors))
        return plain_sum(tensors)

    monkeypatch.setattr(late_sums, "_sum", counted)
    recipe = resolve_levers(load_recipe("pr2014+cpu"))
    network = network_of(recipe)
    late_sums.apply(network, recipe)
    gradients(network, EAGER, 1.0)
    # Nothing after the last block reads it.
    assert sums == [len(network.plan)]


def summands_of(network: GPT, monkeypatch: pytest.MonkeyPatch) -> int:
    """Products with a summand in forward graphs, as inductor makes them in bf16 on a GPU."""
    monkeypatch.setattr(post_grad, "is_gpu", lambda device: True)
    found = 0

    def forward(graph: fx.GraphModule, examples: Sequence[Any]) -> fx.GraphModule:
        nonlocal found
        post_grad.post_grad_passes(graph, False)
        found += sum(node.target is torch.ops.aten.addmm.default for node in graph.graph.nodes)
        return graph

    def compiler(graph: fx.GraphModule, examples: list[Any]) -> Any:
        with V.set_fake_mode(examples[0].fake_mode):
            return aot_module_simplified(
                graph,
                examples,
                fw_compiler=forward,
                bw_compiler=lambda graph, examples: graph,
                partition_fn=min_cut_rematerialization_partition,
                decompositions=select_decomp_table(),
            )

    run = TracedRun(Sharing(compiler), REWRITES[:2])
    # No product is computed: bf16 ones crash some CPUs.
    with run.trace_only(), torch.autocast("cpu", dtype=torch.bfloat16):
        mean_loss(network, batch_of([9, 30], 128), run)
    return found


def test_sums_apart_leave_no_product_with_a_summand(monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = resolve_levers(load_recipe("pr2014+cpu"))
    network = network_of(recipe)
    # Attention and MLP, with and without a skip.
    assert summands_of(network, monkeypatch) == 4
    import_module("benchmarks.algebra.sums_apart").apply(network, recipe)
    assert summands_of(network, monkeypatch) == 0
