"""Paired, interleaved timing of two variants, with a control that can refuse the result.

Blocks of calls run in the order A B B A, the next quad in the order B A A B, and so on: linear
drift cancels within a quad, quadratic drift between two quads. Quads of A against A, the control,
run in between through the same code. Several variants share A and its control. verdict.py holds the
rules that drop quads, refuse results or accept them.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Protocol, runtime_checkable

import torch

from underpar.core.progress import SILENT, Progress
from underpar.core.versions import device_name, versions
from underpar.errors import BenchError
from underpar.lab.clocks import ClockSample, start_clock_sample
from underpar.lab.verdict import MIN_KEPT_QUADS, Block, Judgement, Series, correct, judge

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
    twin: Call | None = None
    """A once more, for the control, if variants run in processes of their own."""


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

    def median_seconds(self, letter: str) -> float:
        """Seconds of a call of A or of B, the median over the measured blocks."""
        blocks = [b for b in self.blocks if (b.series, b.letter) == ("measured", letter)]
        return median(block.seconds for block in blocks) / self.calls_per_block


def run_bench(
    bench: Bench,
    quads: int = 12,
    min_block_seconds: float = 2.0,
    warmup_seconds: float = 30.0,
    progress: Progress = SILENT,
    instruments: Instruments = INSTRUMENTS,
) -> BenchResult:
    """Check that the variants agree, warm up, find the number of calls per block, measure."""
    settings = (quads, min_block_seconds, warmup_seconds, progress, instruments)
    return run_benches([bench], *settings)[0]


def run_benches(
    benches: Sequence[Bench],
    quads: int = 12,
    min_block_seconds: float = 2.0,
    warmup_seconds: float = 30.0,
    progress: Progress = SILENT,
    instruments: Instruments = INSTRUMENTS,
) -> list[BenchResult]:
    """Several variants against the same A, which has one control; p values are corrected."""
    if quads < MIN_KEPT_QUADS or quads % 2:
        raise BenchError(f"quads is {quads}; use an even number of at least {MIN_KEPT_QUADS}")
    if not 0 < min_block_seconds < math.inf or not 0 <= warmup_seconds < math.inf:
        raise BenchError(
            f"block of {min_block_seconds} s and warm-up of {warmup_seconds} s cannot be run; "
            "the block must be > 0, the warm-up >= 0"
        )
    first = benches[0]
    assert all(bench.a is first.a for bench in benches)
    for bench in benches:
        _run_check(bench)
    control = replace(first, b=first.a if first.twin is None else first.twin)
    variants = [first.a, *(bench.b for bench in benches)]
    variants += [] if first.twin is None else [first.twin]
    _warm_up(first, variants, warmup_seconds, instruments.clock)
    calls = _calibrate(first, variants, min_block_seconds, instruments.clock)
    # The blocks of each bench; the control, whose blocks all of them share, comes last.
    blocks: list[list[Block]] = [[] for _ in benches]
    turns: list[tuple[Bench, Series, list[list[Block]]]] = [
        (bench, "measured", [own]) for bench, own in zip(benches, blocks, strict=True)
    ]
    turns.append((control, "control", blocks))
    with progress.task(first.name, len(turns) * quads) as task:
        for quad in range(quads):
            # Like the letters, the series take turns in going first.
            for turn, job in enumerate(turns if quad % 2 == 0 else turns[::-1]):
                bench, series, targets = job
                made = _run_quad(bench, series, quad, calls, instruments)
                for target in targets:
                    target += made
                task.update(len(turns) * quad + turn + 1)
    judgements = correct([judge(own) for own in blocks])
    return [
        BenchResult(
            name=bench.name,
            what=bench.what,
            label_a=bench.label_a,
            label_b=bench.label_b,
            calls_per_block=calls,
            blocks=tuple(own),
            versions=_versions(),
            **vars(judgement),
        )
        for bench, own, judgement in zip(benches, blocks, judgements, strict=True)
    ]


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


def _warm_up(
    bench: Bench, variants: Sequence[Call], seconds: float, clock: Callable[[], float]
) -> None:
    start = clock()
    num_rounds = 0
    while num_rounds < 3 or clock() - start < seconds:
        for call in variants:
            call()
        bench.synchronize()
        num_rounds += 1


def _calibrate(
    bench: Bench, variants: Sequence[Call], min_seconds: float, clock: Callable[[], float]
) -> int:
    calls = 1
    while True:
        seconds = min(_time_calls(bench, call, calls, clock) for call in variants)
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
    variants = {"A": bench.a, "B": bench.b}
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
