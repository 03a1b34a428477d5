"""The compiled model: regions of it that look alike are compiled once.

Embedding, what levers do before a visit, each visit of a block and the loss are regions of their
own, so the order of visits is no part of any graph: a loop that is switched on compiles nothing
new, and layers that differ only in their weights share one graph. What crosses a region is, but for
what skips make, what one graph for all would store anyway, and the rotary tables are better stored
than computed again in every layer, as such a graph does.

Layers also differ in what levers do around attention and MLP. Where steps are short and compiling
counts, these two alone are regions (`Branches`): fewer and smaller graphs, and less that is fused.
"""

from __future__ import annotations

import operator
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from copy import copy
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils._pytree import tree_leaves, tree_map

from underpar.compile.deferred import kernels_later, outputs_like
from underpar.compile.tracer import Compiler, Recorded, autocasts, settings_of
from underpar.data.batch import Batch
from underpar.kernels.capped import capped_cross_entropy
from underpar.model.gpt import GPT, Block
from underpar.model.kv_cache import PackedCache
from underpar.seams import KVCache, Stream, Visit

# Visits are traced one by one, which is quick, and a plan may be long.
MOST_TRACES = 4096
DYNAMO = {
    "recompile_limit": MOST_TRACES,
    "accumulated_recompile_limit": MOST_TRACES,
    # A visit changes the stream, as it should: to report where takes a twentieth of its trace.
    "side_effect_replay_policy": "silent",
}
# Fused norms with column sums spill registers: 8 % of a step (PR 1420, pytorch#179423).
INDUCTOR = {"triton.mix_order_reduction": False}


class Regions(ABC):
    """Compiles a model region by region."""

    def __init__(self) -> None:
        self._sharing = Sharing(_inductor)

    @property
    def num_graphs(self) -> int:
        """Graphs compiled so far; equal ones are one."""
        return self._sharing.num_graphs

    @abstractmethod
    def region(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """The function, compiled; it shares graphs with the others."""

    @abstractmethod
    def _read(self, model: GPT, tokens: Tensor, cache: KVCache) -> Stream: ...

    def read(self, model: GPT, tokens: Tensor, cache: KVCache) -> Stream:
        """The stream behind the last visit of a block."""
        self._sharing.begin()
        return self._read(model, tokens, cache)

    @contextmanager
    def hollow(self) -> Iterator[None]:
        """Inside, passes trace and compile, and compute nothing (`compile/deferred.py`)."""
        self._sharing.is_hollow = True
        try:
            with kernels_later():
                yield
        finally:
            self._sharing.is_hollow = False


class Recordings(Regions):
    """For passes of equal sizes, as training has them: recorded (`compile/tracer.py`).

    What levers do before a visit is a region of its own, so that visits with and without it share
    their graph.
    """

    def __init__(self) -> None:
        super().__init__()
        self._settings: Hashable = None
        self._embed = self.region(_embed)
        self._prepare = self.region(partial(_apart, GPT.prepare))
        self._take = self.region(partial(_apart, GPT.take))

    def region(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """The function, compiled; it shares graphs with the others, and changes no argument."""
        recorded = Recorded(function, self._sharing)
        return lambda *args: recorded(*args, settings=self._settings)

    def _read(self, model: GPT, tokens: Tensor, cache: KVCache) -> Stream:
        self._settings = settings_of(model)
        x, start, angles = self._embed(model, tokens, cache)
        # Positions alone depend on the context: visits have none, so that they serve all contexts.
        within = copy(cache)
        del within.context
        stream = Stream(x, start, tokens, within, angles)
        for visit in model.plan:
            for region in (self._prepare, self._take):
                # Another object: one that is kept elsewhere too would make this visit special.
                stream.x = stream.x.view_as(stream.x)
                stream.x, stream.kept = region(model, visit, stream)
        return stream


def _embed(model: GPT, tokens: Tensor, cache: KVCache) -> tuple[Any, ...]:
    stream = model.embed(tokens, cache)
    return stream.x, stream.start, stream.angles


def _apart(
    part: Callable[..., None], model: GPT, visit: Visit, stream: Stream
) -> tuple[Tensor, dict[str, Any]]:
    """A part of a visit that leaves the stream as it was."""
    own = replace(stream, kept=tree_map(lambda kept: kept, stream.kept))
    part(model, visit, own)
    return own.x, own.kept


class Traced(Regions):
    """For passes whose past is more than a pack: traced by Dynamo; a break is an error."""

    def region(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """The function, compiled; it shares graphs with the others."""
        return torch.compile(function, fullgraph=True, dynamic=False, backend=self._sharing)

    def read(self, model: GPT, tokens: Tensor, cache: KVCache) -> Stream:
        """The stream behind the last visit of a block."""
        config = torch._dynamo.config
        # Not every version has all of them.
        with config.patch({name: DYNAMO[name] for name in DYNAMO if hasattr(config, name)}):
            return super().read(model, tokens, cache)


class Visits(Traced):
    """Whole visits as regions; the number of tokens differs from pass to pass."""

    def __init__(self) -> None:
        super().__init__()
        # Functions of this object: their traces are not those of another.
        self._embed = self.region(lambda model, tokens, cache: model.embed(tokens, cache))
        self._take = self.region(lambda model, visit, stream: model.visit(visit, stream))

    def _read(self, model: GPT, tokens: Tensor, cache: KVCache) -> Stream:
        mark_sized(tokens, cache.positions)
        stream: Stream = self._embed(model, tokens, cache)
        for visit in model.plan:
            # Another object, as above.
            stream.x = stream.x.view_as(stream.x)
            self._mark(stream)
            self._take(model, visit, stream)
        self._mark(stream)
        return stream

    def _mark(self, stream: Stream) -> None:
        mark_sized(*tree_leaves((stream.x, stream.start, stream.angles, stream.kept)))


class Branches(Traced):
    """Attention and MLP as regions; what is around them is not compiled."""

    def __init__(self) -> None:
        super().__init__()
        self._branches = {
            "attend": self.region(lambda block, *given: Block.attend(block, *given)),
            "think": self.region(lambda block, *given: Block.mlp_branch(block, *given)),
        }

    def _read(self, model: GPT, tokens: Tensor, cache: KVCache) -> Stream:
        stream = model.embed(tokens, cache)
        # Where the embedding does not learn, too: else the first attention were a graph of its own.
        stream.x.requires_grad_(torch.is_grad_enabled())
        with self._in_place(model):
            for visit in model.plan:
                model.visit(visit, stream)
        return stream

    @contextmanager
    def _in_place(self, model: GPT) -> Iterator[None]:
        """Inside, the model's blocks call their regions."""
        pairs = [(block, name) for block in model.blocks for name in self._branches]
        for block, name in pairs:
            setattr(block, name, partial(self._run, name, block))
        try:
            yield
        finally:
            for block, name in pairs:
                delattr(block, name)

    def _run(self, name: str, block: nn.Module, x: Tensor, *rest: Any) -> Tensor:
        # Another object: one that is kept elsewhere too would make this visit special.
        y: Tensor = self._branches[name](block, x.view_as(x), *rest)
        return y


def mark_sized(*tensors: Tensor | None) -> None:
    """Have the first dimension of each differ from pass to pass."""
    for tensor in tensors:
        if tensor is not None:
            torch._dynamo.mark_dynamic(tensor, 0)


class CompiledLoss:
    """The mean loss of a model on a batch, compiled."""

    def __init__(self) -> None:
        self.regions: Regions = Recordings()
        self._end = self.regions.region(_end)

    def __call__(self, model: nn.Module, batch: Batch) -> Tensor:
        """Mean nats a target."""
        assert isinstance(model, GPT)
        # The number of pieces alone differs from batch to batch: one graph for all of them.
        torch._dynamo.mark_dynamic(batch.segments.cu, 0)
        stream = self.regions.read(model, batch.inputs, PackedCache(batch.segments))
        loss: Tensor = self._end(model, stream, batch.targets)
        return loss


def _end(model: Any, stream: Any, targets: Tensor) -> Tensor:
    # A copy: to finish a stream is to change it.
    stream = replace(stream)
    return capped_cross_entropy(model.head(model.finish(stream)), targets, model.spec.softcap)


def _inductor(graph: fx.GraphModule, inputs: list[Any]) -> Any:
    from torch._inductor import list_options
    from torch._inductor.compile_fx import compile_fx

    known = set(list_options())
    options = {name: value for name, value in INDUCTOR.items() if name in known}
    return compile_fx(graph, inputs, config_patches=options)


class Sharing:
    """A backend that compiles equal graphs once.

    A row of a stacked weight, `weight[layer]`, is taken outside of the graph: in it, the number of
    the layer would make every layer's graph its own.
    """

    def __init__(self, compiler: Compiler) -> None:
        self.num_graphs = 0
        self.is_hollow = False
        self._compiler = compiler
        self._known: dict[object, Callable[..., Any]] = {}
        # Of one pass through the model: weight -> its rows.
        self._rows: dict[int, tuple[Tensor, ...]] = {}

    def __call__(self, graph: fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        """Compile `graph`, or find what an equal one became."""
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
            return outputs_like(graph, whole) if self.is_hollow else run(*whole)

        return call

    def begin(self) -> None:
        """Begin another pass: weights may have changed."""
        self._rows.clear()

    def _row(self, weight: Tensor, row: int) -> Tensor:
        # Taken apart as a whole: the gradients of all rows are put together once.
        if id(weight) not in self._rows:
            self._rows[id(weight)] = weight.unbind()
        return self._rows[id(weight)][row]


def take_rows_out(graph: fx.GraphModule) -> tuple[fx.GraphModule, list[tuple[int, int]]]:
    """A copy in which each `input[number]` is an input itself, with place and number of each.

    The new inputs come last.
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
    """A graph without the names of its nodes."""
    places = {node: f"%{place}" for place, node in enumerate(graph.graph.nodes)}
    lines = []
    for node in graph.graph.nodes:
        target = "" if node.op == "placeholder" else node.target
        if node.op == "get_attr":
            # The body of a higher-order operator; anything else is like nothing but itself.
            held = getattr(graph, node.target)
            target = _text(held) if isinstance(held, fx.GraphModule) else id(held)
        lines.append((node.op, target, fx.map_arg((node.args, node.kwargs), places.__getitem__)))
    return repr(lines)


def _describe(example: Any) -> object:
    """What a compiler may know of an input; sizes that may differ are all the same to it."""
    if not isinstance(example, Tensor):
        return type(example)
    sizes = (s if isinstance(s, int) else "any" for s in (*example.shape, *example.stride()))
    return (*sizes, example.dtype, example.device, example.requires_grad)
