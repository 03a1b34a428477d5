"""A kernel as a registered operator against `autograd.Function`: host time and graph breaks.

    python -m benchmarks.fusion_study.packaging

PR 1615 lost 5 % of a step with Triton kernels in an `autograd.Function` and blamed a graph break;
PR 670 speaks of 2.7 times the time. The kernels of `xsa.py` are packaged both ways. For each way
this prints the microseconds that Python takes for forward and backward pass of a few tokens, and
how many graphs Dynamo makes of the operation between two others. Breaks are counted on a GPU only:
elsewhere Dynamo cannot read how Triton launches a kernel.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median
from typing import Any

import torch
from torch import Tensor

from benchmarks.fusion_study import xsa
from underpar.lab.operators import runs_triton

CALLS, REPEATS = 50, 5


def packages(x: Tensor) -> dict[str, Callable[..., Tensor]]:
    """The ways to run XSA on the device of x."""
    ways: dict[str, Callable[..., Tensor]] = {"plain torch, eager": xsa.plain}
    if runs_triton(x):
        ways |= {"registered operator": xsa.gated_xsa, "autograd.Function": xsa.AsFunction.apply}
    return ways


def host_microseconds(version: Callable[..., Tensor], inputs: list[Tensor], calls: int) -> float:
    """Median time of a forward and a backward pass; with few tokens the device does not count."""
    upstream = torch.ones_like(inputs[0])
    times = []
    for _ in range(REPEATS + 1):
        started = time.perf_counter()
        for _ in range(calls):
            torch.autograd.grad(version(*inputs), inputs, upstream)
        if inputs[0].is_cuda:
            torch.cuda.synchronize()
        times.append((time.perf_counter() - started) / calls)
    # The first one compiles.
    return 1e6 * median(times[1:])


def count_graphs(version: Callable[..., Tensor], inputs: list[Tensor]) -> tuple[int, int]:
    """Graphs and graph breaks of the operation between two products."""

    def step(*args: Tensor) -> Tensor:
        first, *rest = args
        return 2.0 * version(2.0 * first, *rest)

    found: Any = torch._dynamo.explain(step)(*inputs)
    return found.graph_count, found.graph_break_count


def main() -> None:
    """Print a line per package."""
    on_gpu = torch.cuda.is_available()
    kind: dict[str, Any] = {"device": "cuda", "dtype": torch.bfloat16} if on_gpu else {}
    inputs = [torch.randn(64, heads, 64, **kind).requires_grad_() for heads in (8, 4)]
    inputs.append(torch.rand(64, 8, **kind).requires_grad_())
    print(f"{'package':<22}  host us  graphs  breaks")
    for name, version in packages(inputs[0]).items():
        words = f"{name:<22}  {host_microseconds(version, inputs, CALLS):<7.0f}"
        if on_gpu:
            graphs, breaks = count_graphs(version, inputs)
            words += f"  {graphs:<6}  {breaks}"
        print(words, flush=True)


if __name__ == "__main__":
    main()
