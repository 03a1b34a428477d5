"""A pass that computes nothing, for compilers: regions are traced one after the other, and the
kernels of one are compiled by other processes while the next is traced.

Inductor waits for a graph's kernels before it hands the graph over, and a region cannot be traced
before the one in front of it has given its outputs. Here kernels are waited for where they are
first run, and outputs of the first pass are tensors of the right shape without values.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, fx


class LazyKernel:
    """Stands for a kernel, by name in the module that runs it, until it is asked for."""

    def __init__(self, future: Any, scope: dict[str, Any], name: str) -> None:
        self._future, self._scope, self._name = future, scope, name

    def _kernel(self) -> Any:
        kernel = self._scope[self._name] = self._future.result()
        return kernel

    def __getattr__(self, name: str) -> Any:
        return getattr(self._kernel(), name)

    def __call__(self, *args: Any) -> Any:
        """Run it, where a kernel is a function."""
        return self._kernel()(*args)


@contextmanager
def kernels_later() -> Iterator[None]:
    """Inside, inductor does not wait for kernels, and compiles backward passes at once too."""
    from torch._functorch import config
    from torch._inductor.async_compile import AsyncCompile

    wait, lazy = "_wait_futures", "force_non_lazy_backward_lowering"
    # Not in every version: without them compiling takes longer, nothing else.
    if not hasattr(AsyncCompile, wait) or not hasattr(config, lazy):
        yield
        return
    own = getattr(AsyncCompile, wait)
    setattr(AsyncCompile, wait, _make_lazy)
    try:
        with config.patch({lazy: True}):
            yield
    finally:
        setattr(AsyncCompile, wait, own)


def _make_lazy(_: Any, scope: dict[str, Any]) -> None:
    for name, value in scope.items():
        if hasattr(value, "result"):
            scope[name] = LazyKernel(value, scope, name)


def outputs_like(graph: fx.GraphModule, args: Sequence[Any]) -> Any:
    """Tensors as a traced graph would return them, without values; what it passes through as it is.

    Its tracer has left an example at every node; sizes that may differ are those of `args`.
    """
    nodes = list(graph.graph.nodes)
    given = dict(zip((n for n in nodes if n.op == "placeholder"), args, strict=True))
    sizes = {}
    for node, arg in given.items():
        for named, size in zip(*map(_sizes, (node.meta["example_value"], arg)), strict=True):
            if isinstance(named, torch.SymInt) and named.node.expr.is_symbol:
                sizes[named.node.expr] = int(size)

    def output(value: Any) -> Any:
        if not isinstance(value, fx.Node) or value in given:
            return given.get(value, value)
        return _without_values(value.meta["example_value"], sizes)

    return tuple(output(value) for value in nodes[-1].args[0])


def _sizes(value: Any) -> Sequence[Any]:
    return value.shape if isinstance(value, Tensor) else (value,)


def _without_values(like: Any, sizes: Mapping[Any, int]) -> Any:
    def settle(size: Any) -> Any:
        return int(size.node.expr.xreplace(sizes)) if isinstance(size, torch.SymInt) else size

    if not isinstance(like, Tensor):
        return settle(like)
    shape, strides = ([settle(size) for size in own] for own in (like.shape, like.stride()))
    empty = torch.empty_strided(shape, strides, dtype=like.dtype, device=like.device)
    return empty.requires_grad_(like.requires_grad)
