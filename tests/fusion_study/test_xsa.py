"""The candidates xsa and xsa_rewrite: exclusive self-attention with its gate in one pass."""

from collections.abc import Callable

import pytest
import torch

from agreement import assert_trains_the_same
from lever_stacks import randomized
from underpar.build.levers import resolve_levers
from underpar.errors import BenchError
from underpar.recipe import load_recipe

xsa = pytest.importorskip("benchmarks.fusion_study.xsa")
xsa_rewrite = pytest.importorskip("benchmarks.fusion_study.xsa_rewrite")
CANDIDATES = pytest.mark.parametrize("candidate", [xsa, xsa_rewrite], ids=["tiles", "rewrite"])


def test_tiles_compute_as_the_plain_version_does(interpreted: Callable[..., None]) -> None:
    interpreted(xsa.check, torch.device("cpu"))


def test_the_rewrite_computes_as_the_plain_version_does() -> None:
    xsa_rewrite.check(torch.device("cpu"))


def test_values_without_length_are_no_exception(interpreted: Callable[..., None]) -> None:
    interpreted(_compare_short_values)


def _compare_short_values() -> None:
    y, v, gate = torch.randn(3, 2, 4), torch.randn(3, 1, 4), torch.rand(3, 2)
    v[0], v[1] = 0.0, 1e-13
    inputs = [t.requires_grad_() for t in (y, v, gate)]
    for version in (xsa.gated_xsa, xsa_rewrite.rewritten):
        used = inputs if version is xsa.gated_xsa else [y, v]
        wanted = (xsa.plain if version is xsa.gated_xsa else xsa_rewrite.plain)(*used)
        ours = version(*used)
        torch.testing.assert_close(ours, wanted)
        upstream = torch.randn_like(ours)
        pairs = (torch.autograd.grad(out, used, upstream) for out in (ours, wanted))
        for got, want in zip(*pairs, strict=True):
            torch.testing.assert_close(got[2:], want[2:])
            assert got.isfinite().all()


@pytest.mark.slow
@CANDIDATES
def test_a_network_trains_the_same(candidate: object) -> None:
    assert_trains_the_same(candidate)


def test_the_operator_is_well_registered(interpreted: Callable[..., None]) -> None:
    interpreted(_check_registration)


def _check_registration() -> None:
    inputs = [torch.randn(5, heads, 8, requires_grad=True) for heads in (4, 2)]
    gate = torch.rand(5, 4, requires_grad=True)
    torch.library.opcheck(torch.ops.fusion_study.gated_xsa.default, (*inputs, gate))


def test_the_operator_does_not_break_the_graph() -> None:
    inputs = [torch.randn(5, heads, 8, requires_grad=True) for heads in (4, 2)]
    graphs = []

    def keep(graph: torch.fx.GraphModule, examples: object) -> Callable[..., object]:
        graphs.append(graph)
        return lambda *args: (torch.zeros(5, 4, 8),)

    run = torch.ops.fusion_study.gated_xsa
    compiled = torch.compile(lambda *args: 2.0 * run(*args), backend=keep, fullgraph=True)
    compiled(*inputs, torch.rand(5, 4, requires_grad=True))
    assert len(graphs) == 1 and run in [node.target for node in graphs[0].graph.nodes]


@CANDIDATES
def test_other_levers_are_refused(candidate: object) -> None:
    recipe = resolve_levers(load_recipe("pr2014+cpu", ["levers.xsa.strength=0.5"]))
    with pytest.raises(BenchError, match="strength 1"):
        candidate.apply(randomized(recipe), recipe)  # type: ignore[attr-defined]
