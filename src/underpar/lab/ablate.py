"""What each lever is worth: a recipe trained with several seeds, and once without each lever.

All runs train on the same number of tokens. Several runs may share a device, because only their
seconds change. The spread of the seeds is the noise that a difference has to exceed.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from underpar.build.levers import find_lever, lever_names, resolve_levers
from underpar.build.model import weight_shapes
from underpar.core.fields import reading
from underpar.core.locks import lock_folder
from underpar.core.progress import SILENT, Progress
from underpar.core.run_folder import RunFolder, write_atomic, write_json
from underpar.core.runtime import open_runtime
from underpar.core.stats import student_interval
from underpar.core.versions import device_name, versions
from underpar.data.folder import data_identity, load_data
from underpar.errors import BenchError, RecipeError, RunError
from underpar.lab.lever_docs import ablation_section
from underpar.lab.runs import (
    CONDITIONS,
    Job,
    Launch,
    launcher,
    read_conditions,
    read_tail,
    run_jobs,
    token_budget,
)
from underpar.recipe import Recipe, load_recipe, nearest

LOOP = "loop"
LOOPS_ON = "loops-on"
# Leaving out a lever of these stages changes the training and keeps the data.
STAGES = ("model", "train")
# Probability that a normal value lies within two standard deviations.
WITHIN_TWO = math.erf(math.sqrt(2))


@dataclass(frozen=True)
class Request:
    """What to measure: a recipe, the levers to leave out (none: all of the model), the costs."""

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
class Row:
    """A run without one lever, and without the levers that do nothing without that lever."""

    lever: str
    also_dropped: tuple[str, ...]
    loops_on: bool
    """Whether it is compared with the run whose loop is on from the first step."""
    run: str


@dataclass(frozen=True)
class Plan:
    """Every run to make, and what will be compared."""

    request: Request
    recipe_hash: str
    seeds: dict[str, int]
    """Name of the run -> seed."""
    rows: tuple[Row, ...]
    jobs: tuple[Job, ...]


def make_plan(request: Request) -> Plan:
    """All runs of an ablation. Each recipe is checked before anything is trained."""
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
    """Levers of the recipe that do nothing without `lever`, directly or through another lever."""
    dropped = {lever}
    grown = True
    while grown:
        needs = {name: set(getattr(find_lever(name), "NEEDS", ())) for name in recipe.levers}
        more = {name for name, needed in needs.items() if needed & dropped} - dropped
        dropped, grown = dropped | more, bool(more)
    return tuple(name for name in lever_names() if name in dropped - {lever})


def _job(name: str, request: Request, change: tuple[str, ...]) -> Job:
    overrides = (*request.overrides, *token_budget(request.num_tokens), *change)
    recipe = resolve_levers(load_recipe(request.recipe, overrides))
    try:
        weight_shapes(recipe)
    except RecipeError as error:
        raise RecipeError(f"run {name!r} cannot be built: {error}") from error
    return Job(name, overrides, recipe.hash)


@dataclass(frozen=True)
class Outcome:
    """Bits per byte of the runs that finished, and why others did not, by name."""

    bpb: dict[str, float]
    failed: dict[str, str]


def run_ablation(
    request: Request,
    data: Path,
    out: Path,
    device: str = "auto",
    num_at_once: int = 2,
    known: Path | None = None,
    progress: Progress = SILENT,
    launch: Launch | None = None,
) -> tuple[dict[str, Any], dict[str, str]]:
    """Make all runs, write OUT/ablation.json and OUT/ablation.md; the result and what failed.

    `known` is an earlier ablation.json whose runs need not be made again. What was stopped
    continues. `launch` replaces the processes that train.
    """
    plan = make_plan(request)
    identity = data_identity(load_data(data, verify=False))
    # Runs are compared with each other: they need the same device, versions and data.
    here = {"device": device_name(open_runtime(device).device), "versions": versions()}
    here |= {"data_identity": identity}
    earlier = read_known(known, plan, here) if known else Known({}, {})
    left = replace(plan, jobs=tuple(job for job in plan.jobs if job.name not in earlier.bpb))
    launch = launch or launcher(request.recipe, data, out, device)
    with lock_folder(out, create=True):
        outcome = run_plan(left, out, launch, num_at_once, identity, progress)
    for name, reason in outcome.failed.items():
        progress.note(f"run {out / name} failed, {reason}:\n{read_tail(out / name)}")
    result = summarize(plan, earlier.bpb | outcome.bpb)
    result |= earlier.conditions or read_conditions(RunFolder(out / next(iter(plan.seeds))))
    write_json(out / "ablation.json", result)
    write_atomic(out / "ablation.md", ablation_section(result) + "\n")
    return result, outcome.failed


def run_plan(
    plan: Plan,
    out: Path,
    launch: Launch,
    num_at_once: int = 2,
    data_identity: str | None = None,
    progress: Progress = SILENT,
) -> Outcome:
    """Make the runs that are not finished yet; a stopped one continues.

    When this function is stopped, its runs stop too, and can be continued.
    """
    if num_at_once < 1:
        raise BenchError(f"{num_at_once} runs at once do nothing; use at least 1")
    for job in plan.jobs:
        refuse_other_run(job, RunFolder(out / job.name), data_identity)
    outcome = Outcome({}, {})
    tokens = plan.request.num_tokens

    def record(job: Job, code: int) -> None:
        bpb = read_bpb(RunFolder(out / job.name), tokens)
        if bpb is not None:
            outcome.bpb[job.name] = bpb
        else:
            outcome.failed[job.name] = f"exit code {code}" if code else "stopped before its end"
        num_done = len(outcome.bpb) + len(outcome.failed)
        words = "failed" if bpb is None else f"{bpb:.4f} bits per byte"
        progress.note(f"{num_done} of {len(plan.jobs)}, {job.name}: {words}")

    waiting = []
    for job in plan.jobs:
        if read_bpb(RunFolder(out / job.name), tokens) is None:
            waiting.append(job)
        else:
            record(job, 0)
    run_jobs(waiting, launch, num_at_once, record)
    return outcome


def refuse_other_run(job: Job, folder: RunFolder, data_identity: str | None) -> None:
    """Refuse a folder that holds the run of another recipe or of other data."""
    if not folder.about_file.exists():
        return
    about = folder.read_json(folder.about_file)
    # The two hashes differ if micro-batches did not fit in memory.
    about["recipe_hash"] = about.get("asked_recipe_hash", about.get("recipe_hash"))
    wanted = {"recipe_hash": job.recipe_hash, "data_identity": data_identity}
    for key, value in wanted.items():
        if value is not None and about.get(key) != value:
            raise RunError(
                f"{folder.path} holds a run with {key} {about.get(key)}, this one has {value}; "
                "choose another --out"
            )


def read_bpb(folder: RunFolder, num_tokens: int) -> float | None:
    """Bits per byte at the end of a run, of its averaged weights if it has any; None before."""
    path = folder.validation_file
    if not path.exists():
        return None
    tree = folder.read_fields(path)
    key = "live_bpb" if tree.values.get("average_bpb") is None else "average_bpb"
    bpb, finished = tree.number(key), tree.count("tokens") >= num_tokens
    if finished and not math.isfinite(bpb):
        raise RunError(
            f"{path} says {bpb} bits per byte; remove its folder and run the same command again"
        )
    return bpb if finished else None


@dataclass(frozen=True)
class Known:
    """Bits per byte of earlier runs, by name, and the conditions that they were made under."""

    bpb: dict[str, float]
    conditions: dict[str, Any]


def read_known(path: Path, plan: Plan, conditions: Mapping[str, Any]) -> Known:
    """The runs of an earlier ablation.json; recipe, tokens and `conditions` must be the same."""
    if not path.is_file():
        raise RunError(f"{path} does not exist; 'underpar ablate' leaves an ablation.json in --out")
    result = RunFolder(path.parent).read_json(path)
    wanted = {"recipe_hash": plan.recipe_hash, "tokens": plan.request.num_tokens}
    for key, value in (wanted | dict(conditions)).items():
        if result.get(key) != value:
            raise RunError(f"{path} has {key} {result.get(key)}, this ablation has {value}")
    with reading(path, "it is not the result of an ablation"):
        values = zip(result["seeds"], result["baseline"]["bpb"], strict=True)
        bpb = {f"seed-{seed}": float(value) for seed, value in values}
        bpb |= {f"without-{row['lever']}": float(row["bpb"]) for row in result["levers"]}
        always = {} if result["loops_on"] is None else {LOOPS_ON: float(result["loops_on"])}
    return Known(bpb | always, {key: result.get(key) for key in CONDITIONS})


def summarize(plan: Plan, bpb: Mapping[str, float]) -> dict[str, Any]:
    """The result as JSON: per lever the difference in mBPB, above 0 if the lever helps."""
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
    """One run against the mean of the seeds, or against the single run whose loop is always on."""
    baseline = [bpb[LOOPS_ON]] if row.loops_on else seeds
    interval = student_interval(seeds, WITHIN_TWO)
    # The interval is that of a mean. A difference to one more run varies by sd * sqrt(1 + 1/n).
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
