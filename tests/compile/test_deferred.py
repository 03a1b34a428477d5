"""Passes that only trace: nothing is computed, and kernels wait for their first use."""

from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import Any

import pytest
import torch
from torch import Tensor, fx
from torch._dynamo.backends.debugging import aot_eager

from lever_stacks import batch_of, randomized
from underpar.compile.deferred import LazyKernel, kernels_later, outputs_like
from underpar.compile.regions import Sharing, inductor
from underpar.compile.traced_run import TracedRun
from underpar.recipe import load_recipe
from underpar.train.step import mean_loss


@pytest.fixture(autouse=True)
def fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def test_a_trace_only_pass_traces_everything_and_computes_nothing() -> None:
    runs = []

    def compiler(graph: fx.GraphModule, inputs: list[Any]) -> Any:
        run = aot_eager(graph, inputs)
        return lambda *args: (runs.append(1), run(*args))[1]

    sizes = ["model.num_layers=3", "levers.smear=true", "levers.unet=true"]
    model, run = randomized(load_recipe("cpu", sizes)).train(), TracedRun(Sharing(compiler))
    batch = batch_of([9, 30], model.spec.context)
    with run.trace_only():
        shadow = mean_loss(model, batch, run)
    num_graphs = run.num_graphs
    assert not runs and num_graphs > 2 and shadow.shape == () and shadow.requires_grad
    loss, plain = mean_loss(model, batch, run), mean_loss(model, batch)
    # Embedding, three visits, one of them with a skip before it, the end.
    assert len(runs) == 6 and run.num_graphs == num_graphs
    torch.testing.assert_close(loss, plain, rtol=0, atol=1e-5)
    grads = [torch.autograd.grad(x, model.embedding.weight)[0] for x in (loss, plain)]
    torch.testing.assert_close(*grads, rtol=0, atol=1e-5)


def trace(function: Callable[..., Any], *args: Any) -> fx.GraphModule:
    """The graph that a compiler is given."""
    graphs = []

    def compiler(graph: fx.GraphModule, inputs: list[Any]) -> Any:
        graphs.append(graph)
        return graph

    torch.compile(function, backend=compiler, fullgraph=True, dynamic=False)(*args)
    (graph,) = graphs
    return graph


def test_what_a_graph_passes_through_stays_itself() -> None:
    def function(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        return (x @ y).to(torch.float64), (x + 1).detach().T

    x, y = torch.ones(2, 3, requires_grad=True), torch.ones(3, 4)
    graph = trace(function, x, y)
    product, turned = outputs_like(graph, (x, y))
    assert (product.shape, product.dtype, product.requires_grad) == ((2, 4), torch.float64, True)
    assert (turned.shape, turned.stride(), turned.requires_grad) == ((3, 2), (1, 3), False)
    assert type(product) is Tensor
    end = graph.graph.output_node()
    end.args = ((graph.graph.find_nodes(op="placeholder")[0], *end.args[0], 3),)
    same, *rest, number = outputs_like(graph, (x, y))
    assert same is x and number == 3 and len(rest) == 2


def test_sizes_that_differ_are_those_of_the_pass() -> None:
    def function(x: Tensor, y: Tensor) -> Tensor:
        return torch.cat([x, y]).repeat(2, 1)

    x, y = torch.ones(5, 3), torch.ones(7, 3)
    torch._dynamo.mark_dynamic(x, 0)
    graph = trace(function, x, y)
    for num in (5, 9):
        args = [num, torch.ones(num, 3), y]
        (output,) = outputs_like(graph, args)
        assert output.shape == (2 * (num + 7), 3) and output.stride() == (3, 1)


def test_a_kernel_is_waited_for_when_it_is_asked() -> None:
    future: Future[Any] = Future()
    scope: dict[str, Any] = {}
    scope["kernel"] = kernel = LazyKernel(future, scope, "kernel")
    future.set_result(max)
    assert kernel(1, 2) == 2 and scope["kernel"] is max
    assert kernel.__name__ == "max"


@pytest.mark.slow
def test_inductor_computes_the_same_with_kernels_that_come_later() -> None:
    def function(x: Tensor) -> Tensor:
        return (x.sin() * x).cumsum(0).sum()

    run = torch.compile(function, fullgraph=True, backend=Sharing(inductor))
    x = torch.linspace(0, 3, 1000, requires_grad=True)
    with kernels_later():
        value = run(x)
    (grad,) = torch.autograd.grad(value, x)
    (wanted,) = torch.autograd.grad(function(x), x)
    torch.testing.assert_close(value, function(x), rtol=1e-5, atol=0)
    torch.testing.assert_close(grad, wanted, rtol=1e-4, atol=1e-4)
