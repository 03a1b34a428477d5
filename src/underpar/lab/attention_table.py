"""Attention table: milliseconds of each backend on real shapes, by context and window."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from underpar.core.runtime import Runtime
from underpar.data.batch import Segments, segments_from_starts
from underpar.kernels.attention import attend, available

NUM_TOKENS = 98_304
HEADS = (8, 4, 4)
HEAD_DIM = 64
CONTEXTS = (1024, 2048, 3072)
WINDOWS = (0, 512)
# Mean tokens per document of the FineWeb validation split.
MEAN_DOCUMENT_TOKENS = 957
# On a CPU the table only shows that it works.
MOST_CPU_TOKENS = 512
WARMUPS = 3
REPEATS = 20


@dataclass(frozen=True)
class Row:
    """Median times of one backend; `pieces` are all equal, or cut from random documents."""

    backend: str
    pieces: str
    context: int
    window: int
    forward_ms: float
    both_ms: float


def measure_rows(
    runtime: Runtime, num_tokens: int = NUM_TOKENS, contexts: Sequence[int] = CONTEXTS
) -> Iterator[Row]:
    """Each available backend, each row as soon as it is measured.

    Tensors are bf16 on CUDA. Elsewhere they are fp32, and tokens are few.
    """
    device = runtime.device
    on_gpu = device.type == "cuda"
    dtype = torch.bfloat16 if on_gpu else torch.float32
    num = num_tokens if on_gpu else min(num_tokens, MOST_CPU_TOKENS)
    tensors = [
        torch.randn(num, h, HEAD_DIM, device=device, dtype=dtype, requires_grad=True) for h in HEADS
    ]
    usable = [name for name, answer in available(device, dtype).items() if answer == "yes"]
    for context in contexts:
        for pieces, segments in _cut(num, context).items():
            for window in WINDOWS:
                for name in usable:
                    calls = _calls(tensors, segments.to(device), window, name)
                    forward, both = (median_ms(call, runtime) for call in calls)
                    yield Row(name, pieces, context, window, forward, both)


def _cut(num_tokens: int, context: int) -> dict[str, Segments]:
    rng = np.random.default_rng(0)
    lengths = 1 + rng.exponential(MEAN_DOCUMENT_TOKENS, num_tokens).astype(np.int64)
    starts = np.cumsum(lengths)
    return {
        "equal": segments_from_starts(np.zeros(0, dtype=np.int64), num_tokens, context),
        "documents": segments_from_starts(starts[starts < num_tokens], num_tokens, context, 64),
    }


def _calls(
    tensors: list[Tensor], segments: Segments, window: int, backend: str
) -> tuple[Callable[[], object], Callable[[], object]]:
    q, k, v = tensors
    grad = torch.randn_like(q)

    def forward() -> Tensor:
        return attend(q, k, v, segments.cu, segments.max_len, window, backend)

    def both() -> object:
        return torch.autograd.grad(forward(), tensors, grad)

    return torch.no_grad()(forward), both


def median_ms(call: Callable[[], object], runtime: Runtime) -> float:
    """Milliseconds of a call on its device, the median of `REPEATS` after a warm-up."""
    for _ in range(WARMUPS):
        call()
    runtime.synchronize()
    time_once = _device_ms if runtime.device.type == "cuda" else _clock_ms
    return statistics.median(time_once(call) for _ in range(REPEATS))


def _device_ms(call: Callable[[], object]) -> float:
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    call()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end)


def _clock_ms(call: Callable[[], object]) -> float:
    started = time.perf_counter()
    call()
    return 1000 * (time.perf_counter() - started)
