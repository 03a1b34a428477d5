"""Steps captured as CUDA graphs, once per width, then replayed.

A step launches thousands of kernels; launching them one by one takes longer than running them. A
captured graph is one launch. On a CPU, or if the host must know what a step reads, the step runs
again from the same buffers.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import fields
from typing import Any

import torch
from torch import Tensor

from underpar.score.ttt.forward import Answer, Given


class RecordedStep:
    """Prices and gradients of steps of one width."""

    def __init__(
        self,
        ask: Callable[[Given], Answer],
        differentiate: Callable[[Tensor], Tensor],
        given: Given,
        pool: Any,
    ) -> None:
        """`given` becomes the buffer of all steps; with counts and weights of zero, `ask` changes
        nothing, so it may be asked here as often as a recording needs. `pool`: memory that
        recordings share, as only one of them is in use at a time; None: nothing is recorded."""
        self._given = given
        self._ask, self._differentiate = ask, differentiate
        rehearse(self._forward, self._backward, device=given.inputs.device)
        self._price = Recording(self._forward, pool)
        self._learn = Recording(self._backward, pool)

    def _forward(self) -> None:
        self._log_p, self._loss = self._ask(self._given)

    def _backward(self) -> None:
        self._grads = self._differentiate(self._loss)

    def price(self, given: Given) -> Tensor:
        """Log-probabilities (n, 1 + K), which the next step overwrites."""
        for field in fields(given):
            values, buffer = getattr(given, field.name), getattr(self._given, field.name)
            if values is not None:
                buffer.copy_(values, non_blocking=True)
        self._price.replay()
        return self._log_p.detach()

    def gradients(self) -> Tensor:
        """Gradients of the loss of what was priced last, which the next step overwrites."""
        self._learn.replay()
        return self._grads


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
