"""What each lever is worth: a recipe trained with several seeds, and once without each lever.

All runs see the same number of tokens, so several may share a device: only their seconds change.
The spread of the seeds is the noise that a difference has to exceed.
"""

from __future__ import annotations

import math
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from underpar.build.levers import find_lever, lever_names, resolve_levers
from underpar.build.model import weight_shapes
from underpar.core.run_folder import RunFolder
from underpar.errors import BenchError, RecipeError, RunError
from underpar.lab.stats import student_interval
from underpar.recipe import Recipe, load_recipe, nearest

LOG = "train.log"
LOOP = "loop"
LOOPS_ON = "loops-on"
# Stages in which leaving a lever out changes what is trained, on the same data.
STAGES = ("model", "train")
CONDITIONS = ("data_identity", "train_tokens", "device", "versions", "remark")
# The chance that a normal value lies within two standard deviations.
WITHIN_TWO = math.erf(math.sqrt(2))

_POLL_SECONDS = 0.2


@dataclass(frozen=True)
class Request:
    """A recipe with its overrides, the levers to leave out (none: all of the model), and costs."""

    recipe: str
    overrides: tuple[str, ...] = ()
    levers: tuple[str, ...] = ()
    num_seeds: int = 4
    num_tokens: int = 60_000_000

    def __post_init__(self) -> None:
        if self.num_seeds < 2:
            raise BenchError(f"{self.num_seeds} seeds have no spread; use at least 2")
        if self.num_tokens < 1:
            raise BenchError(f"{self.num_tokens} tokens cannot be trained on; use 1 or more")


@dataclass(frozen=True)
class Job:
    """One run: the name of its folder, all that changes its recipe, and the hash of the result."""

    name: str
    overrides: tuple[str, ...]
    recipe_hash: str


@dataclass(frozen=True)
class Row:
    """A lever left out, with the levers that do nothing without it, by the name of its run."""

    lever: str
    also_dropped: tuple[str, ...]
    loops_on: bool
    """Whether it is compared with the run that loops from the first step on."""
    run: str


@dataclass(frozen=True)
class Plan:
    """Every run to make, and what will be compared."""

    request: Request
    recipe_hash: str
    seeds: dict[str, int]
    """By name of the run."""
    rows: tuple[Row, ...]
    jobs: tuple[Job, ...]


def make_plan(request: Request) -> Plan:
    """All runs of an ablation; each recipe is checked before anything is trained."""
    recipe = resolve_levers(load_recipe(request.recipe, request.overrides))
    levers = _chosen(request.levers, recipe)
    waits = recipe.levers.get(LOOP, {}).get("start", 0.0) > 0
    rows = tuple(_row(lever, recipe, waits) for lever in levers)
    first = recipe.train.seed
    seeds = {f"seed-{seed}": seed for seed in range(first, first + request.num_seeds)}
    on = (f"levers.{LOOP}.start=0.0",)
    changes: dict[str, tuple[str, ...]] = {n: (f"train.seed={s}",) for n, s in seeds.items()}
    if any(row.loops_on for row in rows):
        changes[LOOPS_ON] = on
    for row in rows:
        off = tuple(f"levers.{name}=false" for name in (row.lever, *row.also_dropped))
        changes[row.run] = off + (on if row.loops_on and row.lever != LOOP else ())
    jobs = tuple(_job(name, request, change) for name, change in changes.items())
    return Plan(request, recipe.hash, seeds, rows, jobs)


def _chosen(names: Sequence[str], recipe: Recipe) -> list[str]:
    for name in names:
        stage = find_lever(name).STAGE
        if name not in recipe.levers:
            here = nearest(name, list(recipe.levers)) if recipe.levers else ""
            raise RecipeError(f"lever {name!r} is not in the recipe{here}")
        if stage not in STAGES:
            raise RecipeError(f"lever {name!r} is of stage {stage!r}; training cannot measure it")
    chosen = names or [n for n in recipe.levers if find_lever(n).STAGE == "model"]
    if not chosen:
        raise RecipeError("the recipe has no levers of the model; name others with --lever")
    return [name for name in lever_names() if name in chosen]


def _row(lever: str, recipe: Recipe, loop_waits: bool) -> Row:
    dependents = _dependents(lever, recipe)
    loops = lever == LOOP or lever in _dependents(LOOP, recipe)
    return Row(lever, dependents, loops and loop_waits, f"without-{lever}")


def _dependents(lever: str, recipe: Recipe) -> tuple[str, ...]:
    """Levers of the recipe that do nothing without `lever`."""
    gone = {lever}
    grown = True
    while grown:
        more = {n for n in recipe.levers if gone & set(getattr(find_lever(n), "NEEDS", ()))} - gone
        gone, grown = gone | more, bool(more)
    return tuple(name for name in lever_names() if name in gone - {lever})


def _job(name: str, request: Request, change: tuple[str, ...]) -> Job:
    budgets = ("budget_seconds=0", "reserve_seconds=0", "budget_steps=0", "budget_flops=0")
    budget = (f"train.budget_tokens={request.num_tokens}", *(f"train.{b}" for b in budgets))
    overrides = (*request.overrides, *budget, *change)
    recipe = resolve_levers(load_recipe(request.recipe, overrides))
    try:
        weight_shapes(recipe)
    except RecipeError as error:
        raise RecipeError(f"run {name!r} cannot be built: {error}") from error
    return Job(name, overrides, recipe.hash)


# Starts a run.
Launch = Callable[[Job], subprocess.Popen[bytes]]
# A run, its bits per byte (None: it failed), runs done and runs in all.
OnRun = Callable[[Job, float | None, int, int], None]


def launcher(recipe: str, data: Path, out: Path, device: str) -> Launch:
    """Starts `underpar train` in a folder of its own below `out`, with a log beside its files."""

    def start(job: Job) -> subprocess.Popen[bytes]:
        folder = out / job.name
        folder.mkdir(parents=True, exist_ok=True)
        words = [sys.executable, "-m", "underpar", "train", recipe, "--data", str(data)]
        words += ["--out", str(folder), "--device", device]
        words += [word for override in job.overrides for word in ("--set", override)]
        with (folder / LOG).open("ab") as log:
            return subprocess.Popen(
                words, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT
            )

    return start


@dataclass(frozen=True)
class Outcome:
    """Bits per byte of the runs that finished, and why others did not, by name."""

    bpb: dict[str, float]
    failed: dict[str, str]


def run_plan(
    plan: Plan,
    out: Path,
    launch: Launch,
    num_at_once: int = 2,
    data_identity: str | None = None,
    on_run: OnRun | None = None,
) -> Outcome:
    """Make the runs that are not finished yet. Stopped ones continue, also when this is stopped."""
    if num_at_once < 1:
        raise BenchError(f"{num_at_once} runs at once do nothing; use at least 1")
    for job in plan.jobs:
        _refuse_other_run(job, RunFolder(out / job.name), data_identity)
    outcome = Outcome({}, {})
    tokens = plan.request.num_tokens

    def take(job: Job, code: int) -> None:
        bpb = read_bpb(RunFolder(out / job.name), tokens)
        if bpb is not None:
            outcome.bpb[job.name] = bpb
        else:
            outcome.failed[job.name] = f"exit code {code}" if code else "stopped before its end"
        if on_run is not None:
            on_run(job, bpb, len(outcome.bpb) + len(outcome.failed), len(plan.jobs))

    waiting = []
    for job in plan.jobs:
        if read_bpb(RunFolder(out / job.name), tokens) is None:
            waiting.append(job)
        else:
            take(job, 0)
    run_jobs(waiting, launch, num_at_once, take)
    return outcome


def run_jobs(
    jobs: Sequence[Job], launch: Launch, num_at_once: int, on_end: Callable[[Job, int], None]
) -> None:
    """Start jobs in their order, so many at once; those that still run at an error are ended."""
    waiting, running = deque(jobs), dict[Job, subprocess.Popen[bytes]]()
    # A kill of this process must not leave its runs behind on the device.
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        while waiting or running:
            while waiting and len(running) < num_at_once:
                job = waiting.popleft()
                running[job] = launch(job)
            ended = {job: process.poll() for job, process in running.items()}
            for job, code in ended.items():
                if code is not None:
                    del running[job]
                    on_end(job, code)
            if all(code is None for code in ended.values()):
                time.sleep(_POLL_SECONDS)
    finally:
        for process in running.values():
            process.terminate()
        for process in running.values():
            process.wait()
        signal.signal(signal.SIGTERM, before)


def _refuse_other_run(job: Job, folder: RunFolder, data_identity: str | None) -> None:
    if not folder.about_file.exists():
        return
    about = folder.read_json(folder.about_file)
    wanted = {"recipe_hash": job.recipe_hash, "data_identity": data_identity}
    for key, value in wanted.items():
        if value is not None and about.get(key) != value:
            raise RunError(
                f"{folder.path} holds a run with {key} {about.get(key)}, this one has {value}; "
                "choose another --out"
            )


def read_bpb(folder: RunFolder, num_tokens: int) -> float | None:
    """Bits per byte at the end of a run, of the average if there is one; None before the end."""
    path = folder.validation_file
    if not path.exists():
        return None
    tree = folder.read_json(path)
    try:
        value = tree["live_bpb"] if tree["average_bpb"] is None else tree["average_bpb"]
        bpb, finished = float(value), tree["tokens"] >= num_tokens
    except (KeyError, TypeError, ValueError) as error:
        raise RunError(f"{path} is not a validation of this version ({error!r})") from error
    if finished and not math.isfinite(bpb):
        raise RunError(f"{path} says {bpb} bits per byte; remove its folder and train again")
    return bpb if finished else None


def read_conditions(folder: RunFolder) -> dict[str, Any]:
    """On what data, device and versions a run was made."""
    about = folder.read_json(folder.about_file)
    return {key: about.get(key) for key in CONDITIONS}


@dataclass(frozen=True)
class Known:
    """Bits per byte of runs made before, by name, and on what they were made."""

    bpb: dict[str, float]
    conditions: dict[str, Any]


def read_known(path: Path, plan: Plan, conditions: Mapping[str, Any]) -> Known:
    """The runs of an earlier ablation.json, of the same recipe and tokens under `conditions`."""
    if not path.is_file():
        raise RunError(f"{path} does not exist; 'underpar ablate' leaves an ablation.json in --out")
    result = RunFolder(path.parent).read_json(path)
    if not isinstance(result, dict):
        raise RunError(f"{path} is not the result of an ablation")
    wanted = {"recipe_hash": plan.recipe_hash, "tokens": plan.request.num_tokens}
    for key, value in (wanted | dict(conditions)).items():
        if result.get(key) != value:
            raise RunError(f"{path} has {key} {result.get(key)}, this ablation has {value}")
    try:
        values = zip(result["seeds"], result["baseline"]["bpb"], strict=True)
        bpb = {f"seed-{seed}": float(value) for seed, value in values}
        bpb |= {f"without-{row['lever']}": float(row["bpb"]) for row in result["levers"]}
        always = {} if result["loops_on"] is None else {LOOPS_ON: float(result["loops_on"])}
    except (KeyError, TypeError, ValueError) as error:
        raise RunError(f"{path} is not the result of an ablation ({error!r})") from error
    return Known(bpb | always, {key: result.get(key) for key in CONDITIONS})


def read_tail(folder: Path, num_lines: int = 8) -> str:
    """The last lines of a run's log."""
    path = folder / LOG
    text = path.read_text(errors="replace") if path.exists() else ""
    return "\n".join(text.splitlines()[-num_lines:])


def summarize(plan: Plan, bpb: Mapping[str, float]) -> dict[str, Any]:
    """Differences in mBPB, above 0 where a lever helps, for the rows whose runs are there."""
    missing = [name for name in plan.seeds if name not in bpb]
    if missing:
        raise BenchError(f"no result without all seeds; missing: {', '.join(missing)}")
    values = [bpb[name] for name in plan.seeds]
    rows = [row for row in plan.rows if row.run in bpb and (not row.loops_on or LOOPS_ON in bpb)]
    return {
        "recipe": plan.request.recipe,
        "overrides": list(plan.request.overrides),
        "recipe_hash": plan.recipe_hash,
        "tokens": plan.request.num_tokens,
        "seeds": list(plan.seeds.values()),
        "baseline": {"bpb": values, "mean": fmean(values), "sd": stdev(values)},
        "loops_on": bpb.get(LOOPS_ON),
        "levers": [_compare(row, values, bpb) for row in rows],
    }


def _compare(row: Row, seeds: Sequence[float], bpb: Mapping[str, float]) -> dict[str, Any]:
    """One run against the mean of the seeds, or against the single run that always loops."""
    baseline = [bpb[LOOPS_ON]] if row.loops_on else seeds
    interval = student_interval(seeds, WITHIN_TWO)
    # The interval is that of a mean; one run varies by a deviation more, sd * sqrt(1 + 1/n).
    widen = math.sqrt(len(seeds) * (1 + 1 / len(baseline)))
    noise = (interval.high - interval.low) / 2 * widen
    difference = bpb[row.run] - fmean(baseline)
    return {
        "lever": row.lever,
        "also_dropped": list(row.also_dropped),
        "loops_on": row.loops_on,
        "bpb": bpb[row.run],
        "difference_mbpb": 1000 * difference,
        "noise_mbpb": 1000 * noise,
        "beyond_noise": abs(difference) > noise,
    }
