"""A function captured once as a CUDA graph, then replayed.

A step launches thousands of kernels, and launching them one by one takes longer than running them.
A captured graph is one launch. Without a memory pool the function runs again instead.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch


class Recording:
    """The kernels of a function, captured to be launched again; `pool` None: it runs again."""

    def __init__(self, function: Callable[[], None], pool: Any) -> None:
        self._function = function
        self._graph: torch.cuda.CUDAGraph | None = None
        if pool is not None:
            self._graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self._graph, pool=pool):
                function()

    def replay(self) -> None:
        """Run what was captured."""
        if self._graph is None:
            self._function()
        else:
            self._graph.replay()


def rehearse(*functions: Callable[[], None], device: torch.device) -> None:
    """Run functions once before they are captured: compilers and libraries set themselves up."""
    side: AbstractContextManager[object] = nullcontext()
    if device.type == "cuda":
        # In another stream than the capture, as torch asks.
        torch.cuda.synchronize(device)
        side = torch.cuda.stream(torch.cuda.Stream(device))
    with side:
        for function in functions:
            function()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
