"""Paired, interleaved timing of two variants, with a control that can refuse the result.

Blocks of calls run in the order A B B A, the next quad in the order B A A B, and so on: linear
drift cancels within a quad, quadratic drift between two quads. Quads of A against A, the control,
run in between through the same code. verdict.py holds the rules that drop quads, refuse results
or accept them.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch

from underpar.core.progress import SILENT, Progress
from underpar.core.versions import device_name, versions
from underpar.errors import BenchError
from underpar.lab.clocks import ClockSample, start_clock_sample
from underpar.lab.verdict import MIN_KEPT_QUADS, Block, Judgement, Series, judge

Call = Callable[[], object]


@runtime_checkable
class Timed(Protocol):
    """A call with a clock of its own: events of the device, or the clock of another process."""

    def __call__(self) -> object:
        """Do the work once."""

    def seconds(self, calls: int) -> float:
        """Seconds of so many calls, after one that is not timed."""


_MAX_CALLS = 1_000_000_000


@dataclass(frozen=True)
class Instruments:
    """The clock and the sampler of a run; tests use exact ones."""

    clock: Callable[[], float] = time.perf_counter
    start_sample: Callable[[], Callable[[], ClockSample | None]] = start_clock_sample


INSTRUMENTS = Instruments()


def no_synchronize() -> None:
    """Wait for nothing: for work that is done when its call returns."""


@dataclass(frozen=True)
class Bench:
    """Two variants of the same work; `check` raises if their results differ."""

    name: str
    what: str
    a: Call
    b: Call
    label_a: str = "A"
    label_b: str = "B"
    synchronize: Callable[[], None] = no_synchronize
    check: Call | None = None


@dataclass(frozen=True, kw_only=True)
class BenchResult(Judgement):
    """All that one run of a benchmark measured, and its verdict."""

    name: str
    what: str
    label_a: str
    label_b: str
    calls_per_block: int
    blocks: tuple[Block, ...]
    versions: dict[str, str]


def run_bench(
    bench: Bench,
    quads: int = 12,
    min_block_seconds: float = 2.0,
    warmup_seconds: float = 30.0,
    progress: Progress = SILENT,
    instruments: Instruments = INSTRUMENTS,
) -> BenchResult:
    """Check that the variants agree, warm up, find the number of calls per block, measure."""
    if quads < MIN_KEPT_QUADS or quads % 2:
        raise BenchError(f"quads is {quads}; use an even number of at least {MIN_KEPT_QUADS}")
    if not 0 < min_block_seconds < math.inf or not 0 <= warmup_seconds < math.inf:
        raise BenchError(
            f"block of {min_block_seconds} s and warm-up of {warmup_seconds} s cannot be run; "
            "the block must be > 0, the warm-up >= 0"
        )
    _run_check(bench)
    _warm_up(bench, warmup_seconds, instruments.clock)
    calls = _calibrate(bench, min_block_seconds, instruments.clock)
    blocks: list[Block] = []
    series: tuple[Series, Series] = ("measured", "control")
    with progress.task(bench.name, 2 * quads) as task:
        for quad in range(quads):
            # Like the letters, the two series take turns in going first.
            for turn, kind in enumerate(series if quad % 2 == 0 else series[::-1]):
                blocks += _run_quad(bench, kind, quad, calls, instruments)
                task.update(2 * quad + turn + 1)
    return BenchResult(
        name=bench.name,
        what=bench.what,
        label_a=bench.label_a,
        label_b=bench.label_b,
        calls_per_block=calls,
        blocks=tuple(blocks),
        versions=_versions(),
        **vars(judge(blocks)),
    )


def _run_check(bench: Bench) -> None:
    if bench.check is None:
        return
    try:
        bench.check()
    except Exception as error:
        raise BenchError(
            f"bench {bench.name}: its correctness check failed "
            f"({type(error).__name__}: {error}); no speed is measured on a red test"
        ) from error


def _warm_up(bench: Bench, seconds: float, clock: Callable[[], float]) -> None:
    start = clock()
    num_pairs = 0
    while num_pairs < 3 or clock() - start < seconds:
        bench.a()
        bench.b()
        bench.synchronize()
        num_pairs += 1


def _calibrate(bench: Bench, min_seconds: float, clock: Callable[[], float]) -> int:
    calls = 1
    while True:
        seconds = min(_time_calls(bench, call, calls, clock) for call in (bench.a, bench.b))
        if seconds >= min_seconds:
            return calls
        if calls >= _MAX_CALLS or (calls >= 1000 and seconds <= 0):
            raise BenchError(
                f"bench {bench.name}: {calls} calls took {seconds} s, so a block never lasts "
                f"{min_seconds} s; give it more work per call"
            )
        # Aim 5 % above the mark: with noise, the search would need many small steps otherwise.
        wanted = 1.05 * calls * min_seconds / seconds if seconds > 0 else math.inf
        calls = max(calls + 1, math.ceil(min(wanted, 10.0 * calls)))


def _time_calls(bench: Bench, call: Call, calls: int, clock: Callable[[], float]) -> float:
    if isinstance(call, Timed):
        return call.seconds(calls)
    # Not timed: the first call of a block pays for the change of variant (caches, allocator).
    call()
    bench.synchronize()
    start = clock()
    for _ in range(calls):
        call()
    bench.synchronize()
    return clock() - start


def _run_quad(
    bench: Bench, series: Series, quad: int, calls: int, instruments: Instruments
) -> list[Block]:
    variants = {"A": bench.a, "B": bench.b if series == "measured" else bench.a}
    blocks = []
    for letter in "ABBA" if quad % 2 == 0 else "BAAB":
        # The query runs during the block, so that it sees the device under load.
        finish = instruments.start_sample()
        seconds = _time_calls(bench, variants[letter], calls, instruments.clock)
        if not seconds > 0:
            raise BenchError(f"bench {bench.name}: a block of {calls} calls took {seconds} s")
        blocks.append(Block(series, quad, letter, seconds, finish()))
    return blocks


def _versions() -> dict[str, str]:
    numbers = versions("python", "numpy", "torch")
    if torch.cuda.is_initialized():
        numbers["cuda"] = str(torch.version.cuda)
        numbers["accelerator"] = device_name(torch.device("cuda"))
    return numbers
