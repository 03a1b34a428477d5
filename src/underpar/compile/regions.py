"""A network compiled region by region, with one graph for all regions that look alike.

Embedding, what levers do before a visit, each visit of a block, and the loss are regions. The loop
over blocks is not compiled (`Trunk.visit_blocks`), so turning a depth loop on compiles nothing new,
and layers that differ only in their weights share a graph. README.md in this folder has the reasons
and the prices.

Three runners, all in place of `model.network.EAGER`. That of training is in `traced_run.py`, which
the counted script does not carry:

| runner         | regions                    | traced by        | used for                      |
|----------------|----------------------------|------------------|-------------------------------|
| TracedRun      | whole visits               | our own tracer   | training                      |
| DynamoVisits   | whole visits               | torch's Dynamo   | adapting, windows read again  |
| DynamoBranches | attention and MLP branches | torch's Dynamo   | adapting, short steps         |
"""

from __future__ import annotations

import operator
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils._pytree import tree_leaves

from underpar.compile.deferred import kernels_later, outputs_like
from underpar.model.kv_cache import PackedCache
from underpar.model.network import Eager, Network, Visited
from underpar.seams import KVCache, Stream, Visit

# A graph and examples of its inputs -> the function that runs the graph.
Compiler = Callable[[fx.GraphModule, list[Any]], Callable[..., Any]]

# Dynamo gives up on a function after eight traces. Each visit of a long plan is one.
MOST_TRACES = 4096
DYNAMO = {
    "recompile_limit": MOST_TRACES,
    "accumulated_recompile_limit": MOST_TRACES,
    # A visit changes the stream on purpose. Reporting every change takes 5 % of a trace.
    "side_effect_replay_policy": "silent",
}
# Inductor's fusion of norms with column sums spills registers: 8 % of a step (PR 1420,
# pytorch#179423).
INDUCTOR = {"triton.mix_order_reduction": False}


class CompiledRun(Eager, ABC):
    """Runs the parts of a forward pass as compiled regions."""

    fused = True

    def __init__(self, sharing: Sharing | None = None) -> None:
        """`sharing` compiles the graphs; by default with torch's Inductor."""
        self._sharing = sharing or Sharing(inductor)
        self._regions: dict[Callable[..., Any], Callable[..., Any]] = {}

    @property
    def num_graphs(self) -> int:
        """Graphs compiled so far; equal graphs count once."""
        return self._sharing.num_graphs

    def region(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """The function, compiled. It is traced once per kind of arguments."""
        if function not in self._regions:
            self._regions[function] = self._compile(function)
        return self._regions[function]

    @abstractmethod
    def _compile(self, function: Callable[..., Any]) -> Callable[..., Any]: ...

    @contextmanager
    def trace_only(self) -> Iterator[None]:
        """Inside, passes trace and compile, and compute nothing (`compile/deferred.py`)."""
        self._sharing.is_trace_only = True
        try:
            with kernels_later():
                yield
        finally:
            self._sharing.is_trace_only = False


def another_object(x: Tensor) -> Tensor:
    """The same tensor as a new object.

    Tracers tell an argument that is given twice from two arguments. A stream whose x is also kept
    by a skip would so make this one visit special, with a graph of its own.
    """
    return x.view_as(x)


class DynamoRun(CompiledRun):
    """For passes whose cache is more than a pack. Dynamo traces them; a graph break is an error."""

    def __init__(self, sharing: Sharing | None = None) -> None:
        super().__init__(sharing)
        # Not every version of torch has all of them.
        config = torch._dynamo.config
        self._config = config.patch({k: v for k, v in DYNAMO.items() if hasattr(config, k)})

    def _compile(self, function: Callable[..., Any]) -> Callable[..., Any]:
        compiled = torch.compile(function, fullgraph=True, dynamic=False, backend=self._sharing)

        def call(*args: Any) -> Any:
            with self._config:
                return compiled(*args)

        return call

    def end(
        self, function: Callable[..., Any], network: Network, stream: Stream, *rest: Any
    ) -> Any:
        """What a function makes of the stream after the last block: a region."""
        return super().end(self.region(function), network, stream, *rest)


class DynamoVisits(DynamoRun):
    """Whole visits as regions; the number of tokens differs from pass to pass."""

    def __init__(self, sharing: Sharing | None = None) -> None:
        super().__init__(sharing)
        # Functions of this object: Dynamo keeps traces by function, and two runners share none.
        self._embed = self._compile(lambda network, *args: network.embed(*args))
        self._visit = self._compile(_visit)

    def embed(self, network: Network, tokens: Tensor, cache: KVCache) -> Stream:
        """The stream that the first block reads: a region."""
        self._sharing.begin_pass()
        mark_sized(tokens, cache.positions)
        stream: Stream = self._embed(network, tokens, cache)
        return stream

    def before_block(self, trunk: Visited, visit: Visit, stream: Stream) -> None:
        """Nothing: it is part of the region of the visit."""

    def block(self, trunk: Visited, visit: Visit, stream: Stream) -> None:
        """Take the stream through a visit of a block, levers included: a region."""
        stream.x = another_object(stream.x)
        _mark_stream(stream)
        self._visit(trunk, visit, stream)

    def end(
        self, function: Callable[..., Any], network: Network, stream: Stream, *rest: Any
    ) -> Any:
        """What a function makes of the stream after the last block: a region."""
        _mark_stream(stream)
        return super().end(function, network, stream, *rest)


def _visit(trunk: Visited, visit: Visit, stream: Stream) -> None:
    trunk.before_block(visit, stream)
    trunk.run_block(visit, stream)


def _mark_stream(stream: Stream) -> None:
    mark_sized(*tree_leaves((stream.x, stream.start, stream.angles, stream.kept)))


class DynamoBranches(DynamoRun):
    """Attention and MLP branches as regions; what is around them is not compiled.

    Fewer and smaller graphs, which compile in half the time; less is fused.
    """

    def __init__(self, sharing: Sharing | None = None) -> None:
        super().__init__(sharing)
        # Functions of this object, as above.
        self._attention = self._compile(lambda block, *args: block.attend(*args))
        self._mlp = self._compile(lambda block, *args: block.mlp_branch(*args))

    def embed(self, network: Network, tokens: Tensor, cache: KVCache) -> Stream:
        """The stream that the first block reads, computed eagerly."""
        self._sharing.begin_pass()
        if isinstance(cache, PackedCache):
            # One graph serves all numbers of pieces.
            mark_sized(cache.cu)
        stream = network.embed(tokens, cache)
        # Even if the embedding does not learn: else the first attention had a graph of its own.
        stream.x.requires_grad_(torch.is_grad_enabled())
        return stream

    def attention(self, block: Any, x: Tensor, visit: Visit, stream: Stream) -> Tensor:
        """What the attention branch of a block adds: a region."""
        y: Tensor = self._attention(block, another_object(x), visit, stream)
        return y

    def mlp(self, block: Any, x: Tensor, visit: Visit) -> Tensor:
        """What the MLP branch of a block adds: a region."""
        y: Tensor = self._mlp(block, another_object(x), visit)
        return y


def mark_sized(*tensors: Tensor | None) -> None:
    """Say that the first dimension of each differs from pass to pass: one graph for all sizes."""
    for tensor in tensors:
        if tensor is not None:
            torch._dynamo.mark_dynamic(tensor, 0)


def autocasts() -> Hashable:
    """The precision that autocast casts operations to. It is part of the key: no graph shows it."""
    on = (kind for kind in ("cpu", "cuda") if torch.is_autocast_enabled(kind))
    return tuple((kind, torch.get_autocast_dtype(kind)) for kind in on)


def inductor(graph: fx.GraphModule, inputs: list[Any], **extra: Any) -> Any:
    """Compile a graph with torch's Inductor; `extra` are more of its options."""
    from torch._inductor import list_options
    from torch._inductor.compile_fx import compile_fx

    known = set(list_options())
    options = {name: value for name, value in INDUCTOR.items() if name in known} | extra
    return compile_fx(graph, inputs, config_patches=options)


class Sharing:
    """A backend that compiles equal graphs once.

    A lever may keep a row per layer in one weight and read `weight[layer]`. Inside a graph the
    number of the layer would make the graph of each layer another one. So rows by number are taken
    out: they become inputs of the graph.
    """

    def __init__(self, compiler: Compiler) -> None:
        self.num_graphs = 0
        self.is_trace_only = False
        self._compiler = compiler
        self._known: dict[object, Callable[..., Any]] = {}
        # In one forward pass: id of a weight -> its rows.
        self._rows: dict[int, tuple[Tensor, ...]] = {}

    def __call__(self, graph: fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        """Compile `graph`, or find what an equal graph was compiled to."""
        graph, rows = take_rows_out(graph)
        examples = [node.meta["example_value"] for node in _inputs(graph)]
        assert len(examples) == len(inputs) + len(rows)
        key = (
            torch.is_grad_enabled(),
            autocasts(),
            _text(graph),
            *(_describe(example) for example in examples),
        )
        if key not in self._known:
            self._known[key] = self._compiler(graph, examples)
            self.num_graphs += 1
        run = self._known[key]

        def call(*args: Any) -> Any:
            whole = (*args, *(self._row(args[place], row) for place, row in rows))
            return outputs_like(graph, whole) if self.is_trace_only else run(*whole)

        return call

    def begin_pass(self) -> None:
        """Begin another forward pass: weights may have changed."""
        self._rows.clear()

    def _row(self, weight: Tensor, row: int) -> Tensor:
        # All rows at once: autograd then puts their gradients together once.
        if id(weight) not in self._rows:
            self._rows[id(weight)] = weight.unbind()
        return self._rows[id(weight)][row]


def take_rows_out(graph: fx.GraphModule) -> tuple[fx.GraphModule, list[tuple[int, int]]]:
    """A copy of the graph in which each `input[number]` is an input of its own.

    Also the place of the input and the number, for each new input. New inputs come last.
    """
    copy = fx.Graph()
    copy.output(copy.graph_copy(graph.graph, {}))
    inputs = [node for node in copy.nodes if node.op == "placeholder"]
    last, rows = inputs[-1], []
    for node in list(copy.nodes):
        if node.target is not operator.getitem or node.args[0] not in inputs:
            continue
        if type(node.args[1]) is not int:
            continue
        rows.append((inputs.index(node.args[0]), node.args[1]))
        with copy.inserting_after(last):
            last = copy.placeholder(f"row_{len(rows)}")
        last.meta = dict(node.meta)
        node.replace_all_uses_with(last)
        copy.erase_node(node)
    return fx.GraphModule(graph, copy), rows


def _inputs(graph: fx.GraphModule) -> list[fx.Node]:
    return [node for node in graph.graph.nodes if node.op == "placeholder"]


def _text(graph: fx.GraphModule) -> str:
    """The operations of a graph as text, without the names of nodes: equal for equal graphs."""
    places = {node: f"%{place}" for place, node in enumerate(graph.graph.nodes)}
    lines = []
    for node in graph.graph.nodes:
        target = "" if node.op == "placeholder" else node.target
        if node.op == "get_attr":
            # The body of a higher-order operator. Anything else equals only itself.
            value = getattr(graph, node.target)
            target = _text(value) if isinstance(value, fx.GraphModule) else id(value)
        lines.append((node.op, target, fx.map_arg((node.args, node.kwargs), places.__getitem__)))
    return repr(lines)


def _describe(example: Any) -> object:
    """What a graph may depend on in an input; sizes that differ from pass to pass are alike."""
    if not isinstance(example, Tensor):
        return type(example)
    sizes = (s if isinstance(s, int) else "any" for s in (*example.shape, *example.stride()))
    return (*sizes, example.dtype, example.device, example.requires_grad)
