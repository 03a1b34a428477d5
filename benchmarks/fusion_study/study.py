"""Times the operators of the fusion study: python -m benchmarks.fusion_study --help.

Each operator runs in a process of its own, so that a kernel that fails ends no other. On a GPU all
processes compare and compile side by side, and then take turns: nothing else runs while one is
timed. These are times of operators alone; whether a kernel makes training faster is for
`underpar bench step` to say.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib import import_module
from multiprocessing import get_context
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from statistics import median
from typing import Any

import torch

from underpar.errors import BenchError, UnderparError, one_line
from underpar.lab.bench import BenchResult, Instruments, run_bench
from underpar.lab.operators import PEAK_BYTES, TOKENS, Operator
from underpar.lab.verdict import MIN_KEPT_QUADS
from underpar.recipe import nearest

# By the gain that was predicted for training.
FILES = ("linear_loss", "block_epilogue", "qkv", "xsa", "xsa_rewrite", "mlp", "ema_update", "fp8")
HEADS = ("operator", "plain ms", "fused ms", "fused / plain", "floor ms", "verdict")
WIDTHS = (28, 9, 9, 24, 9, 0)


def operators_of(file: str) -> dict[str, Operator]:
    """The operators of one file, by name."""
    found: dict[str, Operator] = import_module(f"benchmarks.fusion_study.{file}").OPERATORS
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    """Parse, measure, print and write; returns the exit code."""
    parser = argparse.ArgumentParser("python -m benchmarks.fusion_study", description=__doc__)
    parser.add_argument("--list", action="store_true", help="what is predicted, as in docs")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="operators or files to time")
    parser.add_argument("--budget", type=float, default=600.0, metavar="SECONDS", help="all in all")
    parser.add_argument("--out", type=Path, metavar="DIR", help="folder of fusion-study.json")
    parser.add_argument("--tokens", type=int, default=0, help=f"default: {TOKENS}, or 512 on a CPU")
    options = parser.parse_args(arguments)
    operators = {name: op for file in FILES for name, op in operators_of(file).items()}
    try:
        chosen = _choose(list(operators), options.only)
        if options.list:
            for name in chosen:
                print(prediction(name, operators[name]))
            return 0
        if not options.budget > 0 or options.tokens < 0:
            raise BenchError("--budget takes seconds and --tokens a number, both above 0")
        rows = _measure_all({name: operators[name] for name in chosen}, options)
    except UnderparError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return int(any("error" in row for row in rows))


def prediction(name: str, operator: Operator) -> str:
    """The operator's row of the table in docs/fusion-study.md."""
    saved_ms = 1e3 * (operator.plain_bytes - operator.bytes) / PEAK_BYTES
    costs = (operator.flops / 1e9, operator.bytes / 1e6, operator.plain_bytes / 1e6)
    words = (f"`{name}`", operator.what, operator.source, *(f"{cost:,.0f}" for cost in costs))
    return f"| {' | '.join(words)} | {operator.floor_ms:.3f} | {saved_ms:.3f} |"


def _choose(names: list[str], only: Sequence[str] | None) -> list[str]:
    for wanted in only or ():
        if wanted not in names and wanted not in FILES:
            raise BenchError(f"no operator {wanted!r}{nearest(wanted, [*names, *FILES])}")
    return [n for n in names if only is None or n in only or n.partition(".")[0] in only]


def _measure_all(operators: dict[str, Operator], options: argparse.Namespace) -> list[Any]:
    rows: list[dict[str, Any]] = []
    print(_line(HEADS))
    for name, found in _results(list(operators), options.tokens, options.budget):
        operator = operators[name]
        costs = {"flops": operator.flops, "bytes": operator.bytes, "floor_ms": operator.floor_ms}
        rows.append({"name": name, "what": operator.what, **costs, **found})
        print(_line(_cells(rows[-1])), flush=True)
        if options.out:
            _write(options.out, rows)
    return rows


def _cells(row: dict[str, Any]) -> tuple[str, ...]:
    if "error" in row:
        return row["name"], "-", "-", "-", f"{row['floor_ms']:.3f}", row["error"]
    ratio = "-"
    if row["ratio"] is not None:
        reach = row["ratio_interval"]
        ratio = f"{row['ratio']:.3f} ({reach['low']:.3f}..{reach['high']:.3f})"
    times = f"{row['plain_ms']:.3f}", f"{row['fused_ms']:.3f}"
    return row["name"], *times, ratio, f"{row['floor_ms']:.3f}", row["verdict"]


def _line(cells: Sequence[str]) -> str:
    return "  ".join(f"{cell:<{width}}" for cell, width in zip(cells, WIDTHS, strict=True)).rstrip()


def _write(folder: Path, rows: list[dict[str, Any]]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    whole = folder / "fusion-study.json.new"
    whole.write_text(json.dumps({"rows": rows}, indent=1))
    whole.replace(folder / "fusion-study.json")


@dataclass(frozen=True)
class _Worker:
    """A process that compares and compiles one operator, and times it when it is told to."""

    name: str
    process: BaseProcess
    pipe: Connection

    @classmethod
    def start(cls, name: str, tokens: int) -> _Worker:
        context = get_context("spawn")
        ours, theirs = context.Pipe()
        process = context.Process(target=_work, args=(name, tokens, theirs), daemon=True)
        process.start()
        theirs.close()
        return cls(name, process, ours)

    def answer(self, deadline: float) -> dict[str, Any]:
        """What the process says next, before the deadline."""
        if not self.pipe.poll(max(0.0, deadline - time.monotonic())):
            return {"error": "not measured: the budget was spent"}
        try:
            answer: dict[str, Any] = self.pipe.recv()
        except EOFError:
            return {"error": "the process ended without an answer"}
        return answer


def _results(
    names: Sequence[str], tokens: int, budget: float
) -> Iterator[tuple[str, dict[str, Any]]]:
    deadline = time.monotonic() + budget
    # Processes share a GPU well. A CPU prepares one at a time.
    together = len(names) if torch.cuda.is_available() else 1
    for first in range(0, len(names), together):
        workers = [_Worker.start(name, tokens) for name in names[first : first + together]]
        try:
            # Who takes more than half of the time that is left leaves the rest to the others.
            ready_by = _half_way_to(deadline)
            found = {worker.name: worker.answer(ready_by) for worker in workers}
            late = [worker for worker in workers if "error" in found[worker.name]]
            for worker in late:
                worker.process.terminate()
            for worker in workers:
                if worker not in late:
                    worker.pipe.send("go")
                    found[worker.name] = worker.answer(_half_way_to(deadline))
                yield worker.name, found[worker.name]
                worker.process.terminate()
        finally:
            for worker in workers:
                worker.process.terminate()


def _half_way_to(deadline: float) -> float:
    return (time.monotonic() + deadline) / 2


def _work(name: str, tokens: int, pipe: Connection) -> None:
    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda" if on_gpu else "cpu")
    torch.set_num_threads(1)
    try:
        # Many processes compile at once; each needs no helpers.
        with import_module("torch._inductor.config").patch(compile_threads=1):
            operator = operators_of(name.partition(".")[0])[name]
            operator.check(device)
            bench = operator.bench(name, device, tokens or (TOKENS if on_gpu else 512))
        pipe.send({})
        pipe.recv()
        # Blocks are short: nvidia-smi takes longer to start.
        no_clocks = Instruments(start_sample=lambda: lambda: None)
        # An H200 that begins to work swings for more than a second, by up to 28 % of a time.
        warmup, seconds = (2.0, 0.06) if on_gpu else (0.3, 0.02)
        result = run_bench(bench, MIN_KEPT_QUADS, seconds, warmup, instruments=no_clocks)
        times = {"plain_ms": _median_ms(result, "A"), "fused_ms": _median_ms(result, "B")}
        pipe.send(result.as_dict() | times)
    except Exception as error:
        pipe.send({"error": f"{type(error).__name__}: {one_line(error, 300)}"})


def _median_ms(result: BenchResult, letter: str) -> float:
    blocks = [b for b in result.blocks if (b.series, b.letter) == ("measured", letter)]
    return 1e3 * median(block.seconds for block in blocks) / result.calls_per_block
