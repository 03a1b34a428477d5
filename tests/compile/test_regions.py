"""The compiled loss: the plain one's values and gradients, from few graphs that are never stale."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, fx
from torch._dynamo.backends.debugging import aot_eager
from torch.utils.checkpoint import checkpoint

from lever_stacks import batch_of, randomized
from underpar.compile.regions import DynamoBranches, Sharing, take_rows_out
from underpar.compile.traced_run import TracedRun
from underpar.model.gpt import GPT
from underpar.model.network import EAGER, Eager
from underpar.recipe import load_recipe
from underpar.train.step import mean_loss

SLOW = pytest.mark.slow
RECIPES = ["baseline", "pr2014", *(pytest.param(n, marks=SLOW) for n in ("pr1894", "pr1219"))]
# As many tokens in another number of pieces.
CUTS = ([25, 60], [10, 20, 30, 23])
# Off and on, where there is a loop.
ENDS = (0.0, 1.0)


class Compiler:
    """Traces as inductor does, computes as torch does, and counts what it is given."""

    def __init__(self) -> None:
        self.num_graphs = 0

    def __call__(self, graph: fx.GraphModule, inputs: list[Any]) -> Any:
        self.num_graphs += 1
        return aot_eager(graph, inputs)


@pytest.fixture(scope="module")
def compiler() -> Compiler:
    """In the place of inductor."""
    return Compiler()


@pytest.fixture(autouse=True)
def fresh_compiler(compiler: Compiler) -> Iterator[None]:
    torch._dynamo.reset()
    compiler.num_graphs = 0
    yield
    torch._dynamo.reset()


def take_passes(run: Eager, model: GPT, *batches: list[int]) -> dict[str, Tensor]:
    """The sums over micro-batches of the loss and of every gradient that is there, by name."""
    model.zero_grad(set_to_none=True)
    total = torch.zeros(())
    for lengths in batches:
        loss = mean_loss(model, batch_of(lengths, 128), run)
        loss.backward()
        total += loss.detach()
    grads = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return {"loss": total, **grads}


def assert_same(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> None:
    # Sums in another order; gradients go up to 0.4 here.
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=2e-6)


def assert_plain(run: Eager, model: GPT) -> float:
    """The loss of a step, once it and its gradients are known to be those without a compiler."""
    actual = take_passes(run, model, *CUTS)
    assert_same(actual, take_passes(EAGER, model, *CUTS))
    return float(actual["loss"])


@dataclass(frozen=True)
class Pass:
    """A batch through a model, and how many graphs there were after it."""

    progress: float
    actual: dict[str, Tensor]
    expected: dict[str, Tensor]
    num_visits: int
    num_graphs: int


@pytest.fixture(scope="module", params=RECIPES)
def passes(request: pytest.FixtureRequest, compiler: Compiler) -> tuple[str, list[Pass]]:
    """A published recipe, loops off and on, with two batches each."""
    # A window that cuts something off.
    sets = ["levers.window.size=32"] if request.param == "pr1219" else []
    model = randomized(load_recipe(f"{request.param}+cpu", sets)).train()
    torch._dynamo.reset()
    compiler.num_graphs = 0
    run = TracedRun(Sharing(compiler))
    made = []
    for p in ENDS:
        model.set_progress(p)
        for lengths in CUTS:
            actual = take_passes(run, model, lengths)
            expected = take_passes(EAGER, model, lengths)
            made.append(Pass(p, actual, expected, len(model.plan), compiler.num_graphs))
    return request.param, made


def test_loss_and_gradients_are_the_plain_ones(passes: tuple[str, list[Pass]]) -> None:
    for made in passes[1]:
        assert len(made.actual) > 20
        assert_same(made.actual, made.expected)


def test_layers_share_graphs(passes: tuple[str, list[Pass]]) -> None:
    name, made = passes
    for each in made:
        assert 3 <= each.num_graphs < each.num_visits
    # Embedding, loss, and: one kind of layer; two kinds and skips.
    expected = {"baseline": 3, "pr2014": 5}.get(name)
    assert made[0].num_graphs == expected or expected is None


def test_other_pieces_compile_nothing_new(passes: tuple[str, list[Pass]]) -> None:
    for p in ENDS:
        first, second = (each for each in passes[1] if each.progress == p)
        assert first.num_graphs == second.num_graphs
        assert not torch.equal(first.actual["loss"], second.actual["loss"])


def test_a_loop_switched_on_compiles_nothing_new_in_pr2014(
    passes: tuple[str, list[Pass]],
) -> None:
    name, made = passes
    off, on = made[0], made[-1]
    assert (on.num_visits > off.num_visits) == (name in ("pr2014", "pr1894"))
    # A loop of PR 1894 has weights for each repeated visit.
    assert (on.num_graphs > off.num_graphs) == (name == "pr1894")


def test_branches_apart_are_few_graphs_and_the_plain_loss(compiler: Compiler) -> None:
    model, run = randomized(load_recipe("pr2014+cpu")).train(), DynamoBranches(Sharing(compiler))
    for p in ENDS:
        model.set_progress(p)
        assert_plain(run, model)
        # Attention, MLP and loss: what else levers do around them is not compiled.
        assert compiler.num_graphs == 3


def small_model() -> GPT:
    """Two layers, each with its row of a stacked weight."""
    return randomized(load_recipe("cpu", ["model.num_layers=2", "levers.x0_mix=true"])).train()


def test_weights_that_moved_are_seen(compiler: Compiler) -> None:
    model, run = small_model(), TracedRun(Sharing(compiler))
    losses = [assert_plain(run, model)]
    rows = model.levers["x0_mix"].get_parameter("weight")
    with torch.no_grad():
        rows.add_(0.5)
    losses.append(assert_plain(run, model))
    # Other memory under the same name, as a checkpoint may bring it.
    rows.data = rows.data + 0.5
    losses.append(assert_plain(run, model))
    assert len(set(losses)) == 3


def test_two_losses_share_nothing(compiler: Compiler) -> None:
    one, other = small_model(), small_model()
    with torch.no_grad():
        other.embedding.weight.mul_(0.5)
    first, second = TracedRun(Sharing(compiler)), TracedRun(Sharing(compiler))
    losses = [assert_plain(first, one)]
    # Embedding, layers and loss, once for each.
    assert compiler.num_graphs == 3
    losses.append(assert_plain(second, other))
    assert compiler.num_graphs == 6
    # Each goes on as it began, and takes the other's model with its own graphs.
    assert assert_plain(first, one) == losses[0] != losses[1]
    assert assert_plain(first, other) == losses[1]
    assert compiler.num_graphs == 6


def cut(weight: Tensor, x: Tensor, place: Tensor) -> Tensor:
    """Rows by number, and all that looks like one."""
    rows = x * weight[2] + weight[-1]
    others = weight[1:3].sum() + weight[None, 0].sum() + weight[0, 1] + weight[True].sum()
    return rows + others + weight[place] + (weight + x)[0] + weight[2]


def test_rows_by_number_become_inputs() -> None:
    graph = fx.symbolic_trace(cut)
    for node in graph.graph.nodes:
        node.meta["example_value"] = node.name
    text = str(graph.graph)
    copy, rows = take_rows_out(graph)
    assert rows == [(0, 2), (0, -1), (0, 2)]
    inputs = [node for node in copy.graph.nodes if node.op == "placeholder"]
    assert [node.name for node in inputs] == ["weight", "x", "place", "row_1", "row_2", "row_3"]
    examples = [node.meta["example_value"] for node in inputs]
    assert examples == ["weight", "x", "place", "getitem", "getitem_1", "getitem_8"]
    assert str(graph.graph) == text
    weight, x, place = torch.randn(4, 4), torch.randn(4), torch.tensor(3)
    outputs = copy(weight, x, place, weight[2], weight[-1], weight[2])
    assert torch.equal(outputs, cut(weight, x, place))
    # Rows are no longer taken inside.
    moved = copy(weight, x, place, weight[2], weight[-1] + 1, weight[2])
    torch.testing.assert_close(moved, cut(weight, x, place) + 1)


def test_a_graph_without_rows_stays_as_it_is() -> None:
    graph = fx.symbolic_trace(lambda x: x * 2)
    copy, rows = take_rows_out(graph)
    assert rows == []
    assert str(copy.graph) == str(graph.graph)


def shared(sharing: Sharing, function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    made: Callable[..., Tensor] = torch.compile(
        function, fullgraph=True, dynamic=False, backend=sharing
    )
    return made


def test_equal_graphs_of_other_rows_are_one(compiler: Compiler) -> None:
    sharing = Sharing(compiler)
    weight, x = torch.randn(3, 4, requires_grad=True), torch.randn(4, requires_grad=True)
    for row in range(3):
        take = shared(sharing, lambda w, x, row=row: (w[row] * x).sin().sum())
        grads = torch.autograd.grad(take(weight, x), (weight, x))
        plain = torch.autograd.grad((weight[row] * x).sin().sum(), (weight, x))
        assert all(torch.equal(ours, theirs) for ours, theirs in zip(grads, plain, strict=True))
    assert sharing.num_graphs == compiler.num_graphs == 1


def test_graphs_that_differ_are_not_shared(compiler: Compiler) -> None:
    sharing = Sharing(compiler)
    x = torch.randn(4, 4)
    cases: list[tuple[Callable[..., Tensor], Tensor]] = [
        (lambda x: x[0] * 2, x),
        # Another number, another operation, an argument by name.
        (lambda x: x[0] * 3, x),
        (lambda x: x[0] + 2, x),
        (lambda x: x[0].sum(dim=0), x),
        (lambda x: x[0].sum(dim=0, keepdim=True), x),
        # The first again, of another shape, order in memory, precision, and with a gradient.
        (lambda x: x[0] * 2, x[:, :3].contiguous()),
        (lambda x: x[0] * 2, x.T),
        (lambda x: x[0] * 2, x.double()),
        (lambda x: x[0] * 2, x.clone().requires_grad_()),
    ]
    for function, example in cases:
        out = shared(sharing, function)(example)
        assert torch.equal(out, function(example))
        assert out.requires_grad == example.requires_grad
    assert sharing.num_graphs == compiler.num_graphs == len(cases)
    # Names of arguments do not matter.
    assert torch.equal(shared(sharing, lambda other: other[3] * 2)(x), x[3] * 2)
    assert sharing.num_graphs == len(cases)


def doubled(x: Tensor) -> Tensor:
    out: Tensor = checkpoint(lambda y: y.sin() * 2, x, use_reentrant=False)
    return out


def tripled(x: Tensor) -> Tensor:
    out: Tensor = checkpoint(lambda y: y.sin() * 3, x, use_reentrant=False)
    return out


def test_operators_with_other_bodies_are_other_graphs() -> None:
    sharing = Sharing(aot_eager)
    x = torch.randn(4, requires_grad=True)
    for function in (doubled, tripled):
        run = torch.compile(function, fullgraph=True, backend=sharing)
        torch.testing.assert_close(run(x), function(x))
    assert sharing.num_graphs == 2


def test_a_pass_without_gradients_does_not_serve_one_with_them() -> None:
    sharing = Sharing(aot_eager)
    run = torch.compile(torch.sin, fullgraph=True, backend=sharing)
    x = torch.randn(4, requires_grad=True)
    with torch.no_grad():
        assert not run(x).requires_grad
    assert run(x).requires_grad
