"""How long a training takes to start, by phase: with empty caches of the compilers, then again.

Each start is a process of its own, `python -m underpar.lab.start_times`, which does what
`underpar train` does up to the end of its first step. The first process finds empty folders where
torch's Inductor and Triton (and FlashAttention-4) keep what they compiled. The second one finds
there what the first one left. Bytecode of Python and files that the system holds in memory are
those of the machine: the first import after a boot takes longer.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from underpar.core.progress import SILENT, Progress
from underpar.core.runtime import Clock, process_age_seconds
from underpar.errors import BenchError, one_line

# In the order of a start. "other" is what is between the phases.
PHASES = ("import", "data", "build", "trace", "compile", "first step", "other")
# Names of environment variables: folders of compilers' caches.
CACHES = (
    "TORCHINDUCTOR_CACHE_DIR",
    "TRITON_CACHE_DIR",
    "FLASH_ATTENTION_CUTE_DSL_CACHE_DIR",
)
# Rows of the compiler's own clocks.
MOST_CLOCKS = 16


@dataclass(frozen=True)
class Request:
    """What is started."""

    recipe: str
    data: str
    overrides: tuple[str, ...] = ()
    device: str = "auto"
    compiled: bool | None = None


@dataclass(frozen=True)
class Start:
    """One start: seconds by phase, seconds of the compiler by its own names, and what ran."""

    seconds: dict[str, float]
    compiler: dict[str, float]
    num_graphs: int
    device: str
    compiled: bool

    @property
    def total(self) -> float:
        """Seconds from the start of the process to the end of the first step."""
        return sum(self.seconds.values())


def measure_starts(
    request: Request, warm: int = 1, progress: Progress = SILENT
) -> dict[str, list[Start]]:
    """A cold start, then as many warm ones as are asked for."""
    if warm < 1:
        raise BenchError(f"{warm} warm starts: expected 1 or more")
    starts = []
    with (
        tempfile.TemporaryDirectory() as caches,
        progress.task("starts", 1 + warm) as task,
    ):
        for _ in range(1 + warm):
            starts.append(_start(request, Path(caches)))
            task.update(len(starts), f"{starts[-1].total:.1f} s")
    return {"cold": starts[:1], "warm": starts[1:]}


def _start(request: Request, caches: Path) -> Start:
    settings = [f"{name}={caches / name.lower()}" for name in CACHES]
    words = [sys.executable, "-m", "underpar.lab.start_times", json.dumps(asdict(request))]
    done = subprocess.run(["env", *settings, *words], capture_output=True, text=True, check=False)
    if done.returncode:
        lines = done.stderr.strip().splitlines() or ["it said nothing"]
        raise BenchError(f"a start ended with code {done.returncode}; {one_line(lines[-1], 400)}")
    return Start(**json.loads(done.stdout.splitlines()[-1]))


def to_markdown(starts: dict[str, list[Start]]) -> str:
    """A row per phase, the total, and what the compiler says of itself."""
    columns = [(name, start) for name, group in starts.items() for start in group]
    rows = [
        [phase, *(f"{start.seconds.get(phase, 0.0):.1f}" for _, start in columns)]
        for phase in PHASES
    ]
    rows.append(["**first step done**", *(f"**{start.total:.1f}**" for _, start in columns)])
    table = _table(["seconds", *(name for name, _ in columns)], rows)
    first = columns[0][1].compiler
    longest = sorted(first, key=lambda name: -first[name])[:MOST_CLOCKS]
    inside = [
        [f"`{name}`", *(f"{start.compiler.get(name, 0.0):.1f}" for _, start in columns)]
        for name in longest
    ]
    if inside:
        table += (
            "\nThe compiler's own clocks: some contain others, some are those of its workers.\n\n"
        )
        table += _table(["seconds", *(name for name, _ in columns)], inside)
    return table


def _table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [heads, ["---", *(["---:"] * (len(heads) - 1))], *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def start(request: Request) -> Start:
    """Start a training in this process, up to the end of its first step."""
    # The process began before this module was imported.
    clock, before = Clock("other"), process_age_seconds()
    with clock.phase("import"):
        from underpar.build.levers import resolve_levers
        from underpar.build.recipe import load_checked
        from underpar.compile.startup import warm_compiler
        from underpar.compile.timings import compiler_seconds
        from underpar.core.run_folder import RunFolder
        from underpar.core.runtime import open_runtime
        from underpar.data.folder import load_data
        from underpar.stages.train import make_trainer

        runtime = open_runtime(request.device, request.compiled)
        warm_compiler(runtime)
    with clock.phase("data"):
        recipe = resolve_levers(load_checked(request.recipe, request.overrides))
        data = load_data(Path(request.data))
    with tempfile.TemporaryDirectory() as folder:
        with clock.phase("build"):
            trainer = make_trainer(recipe, data, RunFolder(Path(folder)), runtime)
        runner: Any = trainer.runner
        if runtime.compiled:
            trace_only = runner.trace_only

            @contextmanager
            def timed() -> Iterator[None]:
                with clock.phase("trace"), trace_only():
                    yield

            runner.trace_only = timed
        with clock.phase("compile"):
            trainer.warm_up()
        with clock.phase("first step"):
            next(trainer.replay([0.0]))
            runtime.synchronize()
    seconds = clock.read()
    seconds["import"] += before
    return Start(
        seconds,
        compiler_seconds(),
        runner.num_graphs if runtime.compiled else 0,
        str(runtime.device),
        runtime.compiled,
    )


def main() -> None:
    """Start what the argument says, and print the seconds as JSON."""
    values = json.loads(sys.argv[1])
    values["overrides"] = tuple(values["overrides"])
    print(json.dumps(asdict(start(Request(**values)))))


if __name__ == "__main__":
    main()
