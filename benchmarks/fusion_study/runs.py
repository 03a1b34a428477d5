"""Trains each variant of the study for some steps, in turns: speed and loss of runs, in pairs.

    python -m benchmarks.fusion_study.runs h200-300s --data DATA --seeds 1 2 --out runs

Operators alone and single steps leave open what a kernel does to a run. Here all variants train in
one process from the same weights, on the same tokens, with the schedule of the recipe within the
steps. They take turns of a few steps, in the order A ... Z, then Z ... A. Two such turns are a
pair. The time of a variant over that of the plain network in the same pair is one value, and the
interval is that over pairs. The plain network takes part once more, as the control; the rules of
`bench step` judge.

The loss is the mean over the last quarter of the steps, minus that of the plain network with the
same seed. Its interval needs two seeds (randomized blocks). Penalties, weights of tokens and more
targets are left out, as in `bench step`.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from statistics import fmean, median
from typing import Any

import torch
from torch import Tensor

from underpar.build.levers import plug_levers
from underpar.build.model import build_model
from underpar.compile.startup import end_warm_up, warm_compiler
from underpar.core.run_folder import write_atomic, write_json
from underpar.core.runtime import Runtime, keep_bytecode, open_runtime, seed_everything
from underpar.core.stats import block_differences
from underpar.data.batch import Batch
from underpar.data.folder import load_data
from underpar.errors import BenchError, UnderparError, one_line
from underpar.lab.step_bench import TrainingStep, Variant, make_sides, num_graphs
from underpar.lab.verdict import MIN_KEPT_QUADS, decide, summarize
from underpar.model.network import Network
from underpar.recipe import Recipe, nearest
from underpar.train import schedule
from underpar.train.feed import Feed
from underpar.train.step import open_loader
from underpar.train.warmup import MOMENTS

HERE = Path(__file__).parent
ALGEBRA = HERE.parent / "algebra"
PLAIN, CONTROL = "plain", "plain again"
# Name -> what is special about it. "plain" is training as it is, without rewrites.
VARIANTS: dict[str, dict[str, Any]] = {
    PLAIN: {},
    "rewrites": {"rewrites": "auto"},
    "folded_scales": {"rewrites": "folded_scales"},
    "fused_skips": {"rewrites": "fused_skips"},
    "linear_loss": {"rewrites": "linear_loss"},
    "one_projection": {"candidates": (ALGEBRA / "one_projection.py",)},
    **{
        name: {"candidates": (HERE / f"{name}.py",)}
        for name in ("block_epilogue", "qkv", "xsa", "xsa_rewrite", "ema_update", "together")
    },
    # The other two scale rows inside their kernels, in place of the norm before the MLP.
    **{f"mlp.v{number}": {"candidates": (HERE / "mlp.py",)} for number in (5, 3, 2)},
    "fp8": {"overrides": ("levers.fp8=true",)},
    "fp8, MLP": {"overrides": ("levers.fp8={head=false}",)},
    "max-autotune": {"compiled": "max-autotune-no-cudagraphs"},
    CONTROL: {},
}
BEGIN, END = "<!-- runs: this table is written by runs.py -->", "<!-- runs: end -->"


@dataclass
class Run:
    """A variant in training: its turns of steps."""

    side: TrainingStep
    seconds: list[float] = field(default_factory=list)
    """Per step, in each turn."""
    losses: list[Tensor] = field(default_factory=list)
    """Of each step."""


@dataclass
class Study:
    """All runs of all seeds, and what could not run."""

    steps: int
    device: str
    finished: dict[int, dict[str, Run]] = field(default_factory=dict)
    refused: dict[str, str] = field(default_factory=dict)

    def rows(self) -> list[dict[str, Any]]:
        """Speed and loss per variant, against the plain network."""
        values = {
            (name, seed): last_loss(run, self.steps)
            for seed, runs in self.finished.items()
            for name, run in runs.items()
            if len(run.losses) == self.steps
        }
        losses = block_differences(values, PLAIN)
        control = self._effects(CONTROL)
        rows = []
        for name in VARIANTS:
            if name in self.refused:
                rows.append({"name": name, "refused": self.refused[name]})
            seconds = [
                s for runs in self.finished.values() if name in runs for s in runs[name].seconds
            ]
            if not seconds:
                continue
            effects = self._effects(name)
            row: dict[str, Any] = {"name": name, "effects": effects}
            row["step_ms"] = 1e3 * median(seconds)
            row["loss"] = [values[name, seed] for seed in self.finished if (name, seed) in values]
            if name not in (PLAIN, CONTROL):
                row |= judged(effects, control)
            if name in losses:
                found = losses[name]
                ends = [] if found.interval is None else [found.interval.low, found.interval.high]
                row["loss_difference"] = [found.value, *ends]
            rows.append(row)
        return rows

    def _effects(self, name: str) -> list[float]:
        pairs = [(runs[PLAIN], runs[name]) for runs in self.finished.values() if name in runs]
        return [effect for pair in pairs for effect in pair_effects(*pair)]


def judged(effects: Sequence[float], control: Sequence[float]) -> dict[str, Any]:
    """The verdict by the rules of `bench step`; the change of time only if it is not refused."""
    if min(len(effects), len(control)) < MIN_KEPT_QUADS:
        return {"verdict": "refused", "reason": f"{len(effects)} pairs are too few"}
    measured = summarize(effects)
    verdict, reason = decide(measured, summarize(control))
    row: dict[str, Any] = {"verdict": verdict, "reason": reason}
    if verdict != "refused":
        reach = measured.mean_interval
        row["time"] = [math.exp(v) - 1 for v in (measured.mean, reach.low, reach.high)]
    return row


def pair_effects(plain: Run, run: Run) -> list[float]:
    """The logarithm of the time over that of the plain network, of each two turns.

    The first two are left out: a device that begins to work swings.
    """
    both = list(zip(plain.seconds, run.seconds, strict=False))[2:]
    return [
        math.log((first[1] + second[1]) / (first[0] + second[0]))
        for first, second in zip(both[::2], both[1::2], strict=False)
    ]


def last_loss(run: Run, steps: int) -> float:
    """The mean loss of the last quarter of the steps."""
    return float(torch.stack(run.losses)[-max(1, steps // 4) :].float().mean())


def fresh_network(recipe: Recipe, runtime: Runtime) -> Network:
    """The network as training starts with it."""
    seed_everything(recipe.train.seed)
    model = build_model(recipe)
    for lever in plug_levers(recipe, "train").values():
        if hasattr(lever, "initialize"):
            lever.initialize(model)
    return model.to(runtime.device).train()


def open_runs(
    names: Sequence[str], plain: Variant, runtime: Runtime, refused: dict[str, str]
) -> dict[str, Run]:
    """A run per variant, with all of its graphs compiled; what cannot run is refused."""
    runs: dict[str, Run] = {}
    sharings: dict[str, Any] = {}
    for name in names:
        special = dict(VARIANTS[name])
        special["overrides"] = (*plain.overrides, *special.get("overrides", ()))
        variant = replace(plain, **special)
        try:
            [side] = make_sides([variant], 0.0, runtime, sharings, fresh_network)
            if name.startswith("mlp.v"):
                blocks: Any = side.model.blocks
                for block in blocks:
                    block.mlp.variant = int(name[-1])
            runs[name] = Run(side)
        except Exception as error:
            refused[name] = one_line(f"{type(error).__name__}: {error}", 200)
    for trace_only in (True, False):
        for name in list(runs):
            try:
                _compile(runs[name].side, trace_only)
            except Exception as error:
                refused[name] = one_line(f"{type(error).__name__}: {error}", 200)
                del runs[name]
    if PLAIN not in runs:
        raise BenchError(f"the plain network cannot be trained: {refused.get(PLAIN, 'not asked')}")
    return runs


def _compile(side: TrainingStep, trace_only: bool) -> None:
    seen = set()
    for at in MOMENTS:
        side.model.set_progress(at)
        if side.model.variant not in seen:
            seen.add(side.model.variant)
            side.go_to(at, 0)
            side.trace() if trace_only else side.gradients()


def train_in_turns(
    runs: dict[str, Run],
    steps: Iterator[list[Batch]],
    num_steps: int,
    per_turn: int,
    on_turn: Callable[[], bool],
) -> None:
    """Every run takes the same steps; `on_turn` says after each turn whether there is time."""
    before = num_graphs(*(run.side for run in runs.values()))
    for turn, start in enumerate(range(0, num_steps, per_turn)):
        size = min(per_turn, num_steps - start)
        batches = list(islice(steps, size))
        order = list(runs.values())
        for run in order if turn % 2 == 0 else order[::-1]:
            clock = _Clock(run.side.runtime)
            for place, micros in enumerate(batches):
                step = start + place
                run.side.go_to(step / num_steps, step)
                run.side.read(iter(micros))
                run.losses.append(run.side())
                if place == 0:
                    # The first one pays for the change of variant.
                    clock.start()
            if size > 1:
                run.seconds.append(clock.stop() / (size - 1))
        if not on_turn():
            return
    if num_graphs(*(run.side for run in runs.values())) > before:
        raise BenchError("a graph was compiled while runs were timed")


class _Clock:
    """Seconds between two places in the work of a device."""

    def __init__(self, runtime: Runtime) -> None:
        self.on_gpu = runtime.device.type == "cuda"

    def start(self) -> None:
        self.begin: Any = self._now()

    def stop(self) -> float:
        end = self._now()
        if not self.on_gpu:
            return float(end - self.begin)
        end.synchronize()
        return float(self.begin.elapsed_time(end) / 1000)

    def _now(self) -> Any:
        if not self.on_gpu:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event


def batches_of(
    recipe: Recipe, data: Path, runtime: Runtime, num_steps: int
) -> Iterator[list[Batch]]:
    """The micro-batches of each step, on the device, as training reads them."""
    part = recipe.train
    loader = open_loader(load_data(data).train, part)
    with closing(Feed(loader, runtime)) as feed:
        for step in range(num_steps):
            context = schedule.context_at(part, step / num_steps)
            micros = islice(feed.at(step, context), loader.num_micro_batches)
            yield [micro.to(runtime.device) for micro in micros]


def table_of(study: Study, done: bool = True) -> str:
    """The table of docs/fusion-study.md."""
    seeds = len(study.finished)
    lines = [
        f"{study.steps} steps on {study.device}, {seeds} seed{'s' if seeds != 1 else ''}"
        + ("" if done else ", not finished")
        + ". Loss: nats per token in the last quarter, against the plain network of the same seed.",
        "",
        "| variant | steps/s | time of a step | loss | loss minus plain |",
        "|---|---:|---|---:|---|",
    ]
    for row in study.rows():
        if "refused" in row:
            lines.append(f"| {row['name']} | - | refused: {row['refused']} | - | - |")
            continue
        time_, difference = row.get("time"), row.get("loss_difference")
        told = "-" if "verdict" not in row else row["reason"].removeprefix("refused: ")
        if time_ is not None:
            told = f"{row['verdict']}: {_told(time_, 100, '.2f', ' %')}"
        elif "verdict" in row:
            told = f"refused: {told}"
        loss = f"{fmean(row['loss']):.4f}" if row["loss"] else "-"
        least = "-" if difference is None else _told(difference, 1, ".4f", "")
        speed = 1e3 / row["step_ms"]
        lines.append(f"| {row['name']} | {speed:.2f} | {told} | {loss} | {least} |")
    return "\n".join(lines) + "\n"


def _told(values: Sequence[float], factor: float, form: str, unit: str) -> str:
    first, *ends = (f"{factor * value:+{form}}" for value in values)
    return f"{first}{unit} ({' to '.join(ends)})" if ends else f"{first}{unit}, no interval"


def write_page(page: Path, table: str) -> None:
    """Replace the table of runs in a page; the rest stays."""
    text = page.read_text()
    if text.count(BEGIN) != 1 or text.count(END) != 1:
        raise BenchError(f"{page} has no place for the table: a line {BEGIN!r} and a line {END!r}")
    head, rest = text.split(BEGIN)
    write_atomic(page, f"{head}{BEGIN}\n{table}{END}{rest.split(END)[1]}")


def write(study: Study, options: argparse.Namespace, done: bool) -> None:
    """Write OUT/runs.json and OUT/runs.md, and the table of the page at the end."""
    table = table_of(study, done)
    if options.out:
        options.out.mkdir(parents=True, exist_ok=True)
        about = {"steps": study.steps, "device": study.device, "seeds": list(study.finished)}
        write_json(options.out / "runs.json", about | {"finished": done, "rows": study.rows()})
        write_atomic(options.out / "runs.md", table)
    if done and options.page:
        write_page(options.page, table)


def main(arguments: Sequence[str] | None = None) -> int:
    """Parse, train, print and write; returns the exit code."""
    parser = argparse.ArgumentParser("python -m benchmarks.fusion_study.runs", description=__doc__)
    parser.add_argument("recipe")
    parser.add_argument("--data", type=Path, required=True, help="a data folder")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1], metavar="SEED")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="variants beside the plain one")
    parser.add_argument("--set", nargs="+", default=[], metavar="KEY=VALUE", dest="overrides")
    parser.add_argument("--turn", type=int, default=10, metavar="STEPS", help="steps of a turn")
    parser.add_argument("--budget", type=float, default=math.inf, metavar="SECONDS")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--out", type=Path, metavar="DIR", help="folder of runs.json and runs.md")
    parser.add_argument("--page", type=Path, help="a page whose table is replaced")
    options = parser.parse_args(arguments)
    try:
        return _run(options)
    except UnderparError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


def _run(options: argparse.Namespace) -> int:
    names = list(VARIANTS)
    for wanted in options.only or ():
        if wanted not in names:
            raise BenchError(f"no variant {wanted!r}{nearest(wanted, names)}")
    if options.only:
        names = [n for n in names if n in options.only or n in (PLAIN, CONTROL)]
    if options.steps < 4 or options.turn < 2 or not options.budget > 0:
        raise BenchError("--steps takes 4 or more, --turn 2 or more, --budget more than 0 seconds")
    deadline = time.monotonic() + options.budget
    runtime = open_runtime(options.device)
    device = torch.cuda.get_device_name() if runtime.device.type == "cuda" else "a CPU"
    study = Study(options.steps, device)
    for seed in options.seeds:
        overrides = (*options.overrides, f"train.seed={seed}")
        warm_compiler(runtime)
        plain = Variant(options.recipe, overrides, rewrites="none")
        runs = open_runs(names, plain, runtime, study.refused)
        end_warm_up()
        study.finished[seed] = runs
        recipe = runs[PLAIN].side.recipe

        def on_turn() -> bool:
            write(study, options, False)
            return time.monotonic() < deadline

        steps = batches_of(recipe, options.data, runtime, options.steps)
        train_in_turns(runs, steps, options.steps, options.turn, on_turn)
        # The losses stay, the networks go.
        for run in runs.values():
            run.losses = [loss.detach().cpu() for loss in run.losses]
            del run.side
        if time.monotonic() >= deadline:
            break
    done = all(len(r.losses) == options.steps for s in study.finished.values() for r in s.values())
    write(study, options, done and len(study.finished) == len(options.seeds))
    print(table_of(study, done))
    return int(not done or bool(study.refused))


if __name__ == "__main__":
    keep_bytecode()
    sys.exit(main())
