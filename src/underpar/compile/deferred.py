"""A first pass that only traces, so that kernels of all regions compile in parallel.

Inductor normally waits for the kernels of a graph before it returns the graph, and a region cannot
be traced before the region before it has returned its outputs. So regions would compile one after
the other. In a pass that only traces, kernels are waited for when they are first run, and outputs
are tensors of the right shape without values: worker processes compile the kernels of one region
while the next region is traced.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, fx


class LazyKernel:
    """Stands for a kernel that a worker process still compiles; its first use waits for it.

    The kernel then takes this object's place in the module that runs it.
    """

    def __init__(self, future: Any, scope: dict[str, Any], name: str) -> None:
        self._future, self._scope, self._name = future, scope, name

    def _kernel(self) -> Any:
        kernel = self._scope[self._name] = self._future.result()
        return kernel

    def __getattr__(self, name: str) -> Any:
        return getattr(self._kernel(), name)

    def __call__(self, *args: Any) -> Any:
        """Run the kernel, if kernels are functions."""
        return self._kernel()(*args)


@contextmanager
def kernels_later() -> Iterator[None]:
    """Inside, inductor does not wait for kernels, and compiles forward and backward passes
    together.

    Inductor has no option for the first: its method that waits is replaced.
    """
    from torch._functorch import config
    from torch._inductor.async_compile import AsyncCompile

    wait, lazy = "_wait_futures", "force_non_lazy_backward_lowering"
    # Not every version of torch has both. Without them compiling only takes longer.
    if not hasattr(AsyncCompile, wait) or not hasattr(config, lazy):
        yield
        return
    original = getattr(AsyncCompile, wait)
    setattr(AsyncCompile, wait, _make_lazy)
    try:
        with config.patch({lazy: True}):
            yield
    finally:
        setattr(AsyncCompile, wait, original)


def _make_lazy(_: Any, scope: dict[str, Any]) -> None:
    for name, value in scope.items():
        if hasattr(value, "result"):
            scope[name] = LazyKernel(value, scope, name)


def outputs_like(graph: fx.GraphModule, args: Sequence[Any]) -> Any:
    """What a traced graph would return, as tensors without values.

    Inputs that the graph returns are returned as they are. The tracer has left an example at every
    node; sizes that differ from pass to pass are those of `args`.
    """
    nodes = list(graph.graph.nodes)
    inputs = dict(zip((n for n in nodes if n.op == "placeholder"), args, strict=True))
    sizes = {}
    for node, arg in inputs.items():
        for symbol, size in zip(*map(_sizes, (node.meta["example_value"], arg)), strict=True):
            if isinstance(symbol, torch.SymInt) and symbol.node.expr.is_symbol:
                sizes[symbol.node.expr] = int(size)

    def output(value: Any) -> Any:
        if not isinstance(value, fx.Node) or value in inputs:
            return inputs.get(value, value)
        return _without_values(value.meta["example_value"], sizes)

    return tuple(output(value) for value in nodes[-1].args[0])


def _sizes(value: Any) -> Sequence[Any]:
    return value.shape if isinstance(value, Tensor) else (value,)


def _without_values(like: Any, sizes: Mapping[Any, int]) -> Any:
    def settle(size: Any) -> Any:
        return int(size.node.expr.xreplace(sizes)) if isinstance(size, torch.SymInt) else size

    if not isinstance(like, Tensor):
        return settle(like)
    shape, strides = (
        [settle(size) for size in sizes_of] for sizes_of in (like.shape, like.stride())
    )
    empty = torch.empty_strided(shape, strides, dtype=like.dtype, device=like.device)
    return empty.requires_grad_(like.requires_grad)
