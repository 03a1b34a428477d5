"""A function recorded once and then replayed: on a GPU a CUDA graph, whose kernels are one launch.

Without a memory pool the function runs again instead.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch


class Recording:
    """The kernels of a function, to be launched again."""

    def __init__(self, function: Callable[[], None], pool: Any) -> None:
        self._function = function
        self._graph: torch.cuda.CUDAGraph | None = None
        if pool is not None:
            self._graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self._graph, pool=pool):
                function()

    def replay(self) -> None:
        """Run what was recorded."""
        if self._graph is None:
            self._function()
        else:
            self._graph.replay()


def rehearse(*functions: Callable[[], None], device: torch.device) -> None:
    """Run functions once before they are recorded: compilers and libraries set themselves up."""
    side: AbstractContextManager[object] = nullcontext()
    if device.type == "cuda":
        # Apart from where the recording will be made, as torch asks.
        torch.cuda.synchronize(device)
        side = torch.cuda.stream(torch.cuda.Stream(device))
    with side:
        for function in functions:
            function()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
