"""An operator in two versions, plain and fused: compared in fp64, and timed against each other."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from underpar.compile.cuda_graphs import Recording, rehearse
from underpar.compile.regions import INDUCTOR
from underpar.lab.bench import Bench, no_synchronize
from underpar.lab.closeness import require_close

# Tokens of a micro-batch of the large recipes.
TOKENS = 98_304
# Ceilings of one H200: bf16 products in FLOP/s, copies in bytes read and written per second.
PEAK_FLOPS, PEAK_BYTES = 790e12, 4.3e12

Version = Callable[..., Tensor | tuple[Tensor, ...]]


@dataclass(frozen=True, kw_only=True)
class Operator:
    """The same work twice.

    `inputs(device, tokens)` makes random arguments; those that need a gradient say so. On a CPU
    they are small and fp32. `flops` and `bytes` are the least that forward and backward pass of the
    fused version do and move for TOKENS tokens; `plain_bytes` is what the plain version moves if a
    compiler makes one kernel of each run of element-wise operations and reductions over channels.
    `check_tokens`: an odd number, so that tiles at the end are part of the check. `rival`: what the
    fused version is timed against, if that is another function than `plain`. `compiled` false:
    training runs the plain version eagerly.
    """

    what: str
    source: str
    plain: Version
    fused: Version
    inputs: Callable[[torch.device, int], tuple[Any, ...]]
    flops: float
    bytes: float
    plain_bytes: float
    check_tokens: int = TOKENS - 37
    rival: Version | None = None
    compiled: bool = True

    @property
    def floor_ms(self) -> float:
        """The time below which no version runs on one H200."""
        return 1e3 * max(self.flops / PEAK_FLOPS, self.bytes / PEAK_BYTES)

    def check(self, device: torch.device) -> None:
        """Refuse a fused version whose results or gradients are not those of the plain one."""
        torch.manual_seed(0)
        args = self.inputs(device, self.check_tokens if device.type == "cuda" else 37)
        exact = tuple(_doubled(arg) for arg in args)
        wanted = _outputs(self.plain, exact)
        with _poisoned_memory():
            ours = _outputs(self.fused, args)
            upstream = [torch.randn_like(out) for out in ours]
            gradients = _gradients(ours, args, upstream)
        wanted += _gradients(wanted, exact, [g.double() for g in upstream])
        require_close(
            self.what, [*ours, *gradients], wanted, _coarsest(args), num_outputs=len(ours)
        )
        if device.type == "cuda":
            del args, exact, ours, upstream, gradients, wanted
            # Other processes may need the memory.
            torch.cuda.empty_cache()

    def bench(self, name: str, device: torch.device, tokens: int = TOKENS) -> Bench:
        """Forward and backward pass of both versions; on a GPU compiled, and as CUDA graphs."""
        torch.manual_seed(0)
        args = self.inputs(device, tokens)
        upstream = [torch.randn_like(out) for out in _outputs(self.plain, args)]
        versions = (self.rival or self.plain, self.fused)
        plain, fused = (
            _both_passes(version, args, upstream, device, self.compiled) for version in versions
        )
        wait = torch.cuda.synchronize if device.type == "cuda" else no_synchronize
        return Bench(name, self.what, plain, fused, "plain", "fused", wait)


def runs_triton(x: Tensor) -> bool:
    """Whether Triton kernels can read x: on a GPU, or on a CPU if Triton interprets kernels."""
    return x.is_cuda or bool(import_module("triton").knobs.runtime.interpret)


def _both_passes(
    version: Version,
    args: tuple[Any, ...],
    upstream: list[Tensor],
    device: torch.device,
    compiled: bool,
) -> Callable[[], None]:
    on_gpu = device.type == "cuda"
    run = version
    if on_gpu and compiled:
        # A graph break is an error.
        run = torch.compile(version, fullgraph=True, dynamic=False, options=dict(INDUCTOR))

    def call() -> None:
        _gradients(_outputs(run, args), args, upstream)

    for _ in range(3):
        rehearse(call, device=device)
    # Launches from Python take longer than kernels of 0.1 ms.
    return Recording(call, torch.cuda.graph_pool_handle() if on_gpu else None).replay


def _outputs(version: Version, args: tuple[Any, ...]) -> tuple[Tensor, ...]:
    out = version(*args)
    return (out,) if isinstance(out, Tensor) else out


def _gradients(
    outputs: tuple[Tensor, ...], args: tuple[Any, ...], upstream: list[Tensor]
) -> tuple[Tensor, ...]:
    """Gradients of the arguments that need one; none if the operator changes its arguments."""
    learned = [arg for arg in args if isinstance(arg, Tensor) and arg.requires_grad]
    # A rival may have fewer outputs.
    pairs = [pair for pair in zip(outputs, upstream, strict=False) if pair[0].requires_grad]
    return (
        torch.autograd.grad([out for out, _ in pairs], learned, [grad for _, grad in pairs])
        if learned
        else ()
    )


def _doubled(arg: Any) -> Any:
    if not isinstance(arg, Tensor) or not arg.is_floating_point():
        return arg
    return arg.detach().double().requires_grad_(arg.requires_grad)


def _coarsest(args: tuple[Any, ...]) -> torch.dtype:
    """The precision that bounds the results: factors and weights may be finer than streams."""
    found = {arg.dtype for arg in args if isinstance(arg, Tensor) and arg.is_floating_point()}
    return max(found, key=lambda dtype: torch.finfo(dtype).eps)


@contextmanager
def _poisoned_memory() -> Iterator[None]:
    """Inside, torch.empty gives NaN, so that a place that is never written shows."""
    before = torch.are_deterministic_algorithms_enabled()
    # Some products are not deterministic and say so; only the memory matters here.
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.use_deterministic_algorithms(True, warn_only=True)
        try:
            yield
        finally:
            torch.use_deterministic_algorithms(before)
