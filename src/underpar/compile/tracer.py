"""Traces functions of a network to torch.fx graphs, ten times as fast as Dynamo.

Dynamo reads bytecode and writes guards: conditions under which a graph may be used again. A network
needs less. What it computes follows from its arguments and from plain settings of its modules. So
the function runs once on tensors without values while its operations are noted (as torch.fx does
with proxies, arXiv:2112.08429), and arguments and settings are the key of the graph.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.fx.node import map_aggregate
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_flatten, tree_unflatten

from underpar.compile.regions import Compiler, autocasts

# Where an input is found in every call: its place among the tensors of the arguments, or the table
# of parameters or buffers of a module, and a name in it.
Source = int | tuple[Mapping[str, Any], str]


class Traced:
    """A function of modules, tensors and containers of them, compiled once per kind of arguments.

    The function may change no argument. It returns tensors and plain values, in tuples and
    dictionaries.
    """

    def __init__(self, function: Callable[..., Any], compiler: Compiler) -> None:
        self._function, self._compiler = function, compiler
        self._known: dict[Hashable, Callable[[Sequence[Tensor]], Any]] = {}

    def __call__(self, *args: Any, settings: Hashable = None) -> Any:
        """What the function returns; `settings` are those of its modules (`settings_of`)."""
        tensors: list[Tensor] = []
        kind = (settings, torch.is_grad_enabled(), autocasts(), *_kinds(args, tensors))
        if kind not in self._known:
            self._known[kind] = self._trace(args, tensors)
        return self._known[kind](tensors)

    def _trace(
        self, args: tuple[Any, ...], tensors: list[Tensor]
    ) -> Callable[[Sequence[Tensor]], Any]:
        tracer = Tracer(tensors, [arg for arg in args if isinstance(arg, nn.Module)])
        with tracer:
            returned = self._function(*args)
        leaves, form = tree_flatten(returned)
        # A tensor that is only passed through takes no part in the graph. A tensor that is returned
        # twice is an output once.
        made = list({id(leaf): leaf for leaf in leaves if tracer.made(leaf)}.values())
        plain = {id(leaf): leaf for leaf in leaves if not isinstance(leaf, Tensor)}
        others = [leaf for leaf in leaves if isinstance(leaf, Tensor) and not tracer.made(leaf)]
        passed = {id(leaf): tracer.source(leaf) for leaf in others}
        # If nothing is computed, nothing is compiled.
        graph = tracer.graph_of(made)
        run = self._compiler(graph, tracer.examples) if made else lambda *_: ()
        inputs, order = tracer.sources, [id(leaf) for leaf in leaves]
        names = [id(leaf) for leaf in made]

        def replay(tensors: Sequence[Tensor]) -> Any:
            outputs = run(*(_fetch(source, tensors) for source in inputs))
            values = plain | dict(zip(names, outputs, strict=True))
            values |= {name: _fetch(source, tensors) for name, source in passed.items()}
            return tree_unflatten([values[name] for name in order], form)

        return replay


def _fetch(source: Source, tensors: Sequence[Tensor]) -> Tensor:
    if isinstance(source, int):
        return tensors[source]
    table, name = source
    tensor: Tensor = table[name]
    return tensor


def settings_of(model: nn.Module) -> Hashable:
    """All plain values that modules hold: numbers, names, flags.

    They are read by reflection in every pass, so that a changed setting (a loop that is switched
    on, say) is another key and never runs a stale graph. It takes about a millisecond.
    """
    return tuple(
        (name, value)
        for module in model.modules()
        for name, value in vars(module).items()
        if _is_plain(value)
    )


def _is_plain(value: Any) -> bool:
    """Whether a value is compared by its content, as a number is, and not by its identity."""
    return type(value).__hash__ not in (None, object.__hash__)


def _kinds(value: Any, tensors: list[Tensor]) -> Iterator[Hashable]:
    """What an argument contributes to the key of a graph; its tensors are appended to the list."""
    if isinstance(value, Tensor):
        yield next((i for i, known in enumerate(tensors) if known is value), None)
        yield _sizes(value), value.stride(), value.dtype, value.device, value.requires_grad
        tensors.append(value)
    elif isinstance(value, nn.Module):
        # The module, not its id: another module may get the id once this one is gone.
        yield value
    elif isinstance(value, Mapping):
        yield tuple(value)
        yield from _kinds(tuple(value.values()), tensors)
    elif isinstance(value, tuple | list):
        yield len(value)
        for each in value:
            yield from _kinds(each, tensors)
    elif _is_plain(value):
        yield value
    else:
        yield type(value).__name__
        yield from _kinds(vars(value), tensors)


def _sizes(tensor: Tensor) -> tuple[int | None, ...]:
    """The shape, with None for a size that `torch._dynamo.mark_dynamic` says may differ."""
    varying = getattr(tensor, "_dynamo_dynamic_indices", ())
    return tuple(None if dim in varying else size for dim, size in enumerate(tensor.shape))


class Tracer(TorchFunctionMode):
    """Notes operations as a graph; tensors from outside become inputs in order of first use."""

    def __init__(self, tensors: Sequence[Tensor], modules: Sequence[nn.Module]) -> None:
        super().__init__()
        from torch._subclasses.fake_tensor import FakeTensorMode
        from torch.fx.experimental.symbolic_shapes import ShapeEnv

        self.examples: list[Tensor] = []
        self.sources: list[Source] = []
        self._graph = fx.Graph()
        self._last_input: fx.Node | None = None
        self._autocasts = autocasts()
        self._fake_mode = FakeTensorMode(shape_env=ShapeEnv(), static_shapes=True)
        # id of a tensor without values -> the tensor, which keeps the id valid, and its node.
        self._nodes: dict[int, tuple[Tensor, fx.Node]] = {}
        self._stand_ins: dict[int, Tensor] = {}
        self._places: dict[int, Source] = {
            id(tensor): (table, name)
            for module in modules
            for part in module.modules()
            for table in (part._parameters, part._buffers)
            for name, tensor in table.items()
        }
        self._places |= {id(tensor): i for i, tensor in reversed(list(enumerate(tensors)))}

    def made(self, leaf: Any) -> bool:
        """Whether an operation in the graph made this tensor."""
        return id(leaf) in self._nodes

    def source(self, tensor: Tensor) -> Source:
        """Where a tensor from outside is found in every call."""
        if id(tensor) not in self._places:
            shape = tuple(tensor.shape)
            raise RuntimeError(
                f"a traced function reads a tensor {shape} of neither arguments "
                "nor modules; pass it, or register it as a buffer"
            )
        return self._places[id(tensor)]

    def graph_of(self, outputs: Sequence[Tensor]) -> fx.GraphModule:
        """The graph that computes these outputs."""
        self._graph.output(tuple(self._nodes[id(tensor)][1] for tensor in outputs))
        return fx.GraphModule(nn.Module(), self._graph)

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Run an operation without values and note it, if its result has tensors."""
        if autocasts() != self._autocasts:
            raise RuntimeError("a traced function changes autocast; do so around it")
        args, kwargs = map_aggregate((args, kwargs or {}), self._stand_in)
        with self._fake_mode:
            out = func(*args, **kwargs)
        if isinstance(out, Tensor):
            self._note(out, _call(self._graph, func, *self._as_nodes(args, kwargs)))
        elif isinstance(out, tuple | list) and any(isinstance(each, Tensor) for each in out):
            whole = _call(self._graph, func, *self._as_nodes(args, kwargs))
            whole.meta["example_value"] = out
            for place, each in enumerate(out):
                if isinstance(each, Tensor):
                    self._note(each, self._graph.call_function(operator.getitem, (whole, place)))
        elif func is torch._C._set_grad_enabled:
            self._graph.call_function(func, args)
        return out

    def _stand_in(self, tensor: Any) -> Any:
        if not isinstance(tensor, Tensor) or id(tensor) in self._nodes:
            return tensor
        if id(tensor) not in self._stand_ins:
            self.sources.append(self.source(tensor))
            fake = self._stand_ins[id(tensor)] = self._without_values(tensor)
            self.examples.append(fake)
            # After the other inputs, before all operations.
            with self._graph.inserting_after(self._last_input):
                self._last_input = self._graph.placeholder(f"input_{len(self.examples)}")
            self._note(fake, self._last_input)
        return self._stand_ins[id(tensor)]

    def _without_values(self, tensor: Tensor) -> Tensor:
        from torch._dynamo.source import ConstantSource
        from torch.fx.experimental.symbolic_shapes import DimDynamic, StatelessSymbolicContext

        sizes = _sizes(tensor)
        if None not in sizes:
            return self._fake_mode.from_tensor(tensor)
        kinds = [DimDynamic.DYNAMIC if size is None else DimDynamic.STATIC for size in sizes]
        return self._fake_mode.from_tensor(
            tensor,
            static_shapes=False,
            symbolic_context=StatelessSymbolicContext(dynamic_sizes=kinds),
            source=ConstantSource(f"input_{len(self.examples)}"),
        )

    def _note(self, tensor: Tensor, node: fx.Node) -> None:
        node.meta["example_value"] = tensor
        self._nodes[id(tensor)] = tensor, node

    def _as_nodes(self, args: Any, kwargs: Any) -> Any:
        return map_aggregate((args, kwargs), self._as_node)

    def _as_node(self, value: Any) -> Any:
        return self._nodes[id(value)][1] if isinstance(value, Tensor) else value


def _call(graph: fx.Graph, func: Any, args: Any, kwargs: Any) -> fx.Node:
    """An operation as Dynamo would write it, which inductor expects."""
    if func is Tensor.__getitem__:
        return graph.call_function(operator.getitem, args)
    if func.__name__ == "__get__":
        return graph.call_function(getattr, (args[0], func.__self__.__name__))
    if func in _methods():
        return graph.call_method(_methods()[func], args, kwargs)
    return graph.call_function(func, args, kwargs)


@cache
def _methods() -> dict[Any, str]:
    """Methods of Tensor -> their names; the `__name__` of a method may be another one."""
    return {method: name for name in dir(Tensor) if callable(method := getattr(Tensor, name))}
