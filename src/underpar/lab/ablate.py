"""What each lever is worth: a recipe trained with several seeds, and once without each lever.

All runs train on the same number of tokens. Several runs may share a device, because only their
seconds change. The spread of the seeds is the noise that a difference has to exceed.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from underpar.build.levers import find_lever, lever_names, resolve_levers
from underpar.core.progress import SILENT, Progress
from underpar.core.run_folder import write_atomic, write_json
from underpar.core.stats import student_interval
from underpar.errors import BenchError, RecipeError
from underpar.lab.lever_docs import ablation_section
from underpar.lab.measurement import Figure, Measurement, Start, make_job
from underpar.lab.runs import start, token_budget
from underpar.recipe import Recipe, load_recipe, nearest

RECORD = "ablation.json"
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
    figures: dict[str, Figure]
    """Name of the run -> its bits per byte before quantization."""


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
    figures = {name: _figure(name, request, change) for name, change in changes.items()}
    return Plan(request, recipe.hash, seeds, rows, figures)


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


def _figure(name: str, request: Request, change: tuple[str, ...]) -> Figure:
    overrides = (*request.overrides, *token_budget(request.num_tokens), *change)
    figure = Figure(request.recipe, make_job(request.recipe, overrides, name))
    figure.check()
    return figure


def run_ablation(
    request: Request,
    data: Path,
    out: Path,
    device: str = "auto",
    num_at_once: int = 2,
    known: Path | None = None,
    progress: Progress = SILENT,
    start_words: Start = start,
) -> tuple[dict[str, Any], dict[str, str]]:
    """Make all runs, write OUT/ablation.json and OUT/ablation.md; the result and what failed.

    `known` is an earlier ablation.json whose runs need not be made again. What was stopped
    continues.
    """
    plan = make_plan(request)
    measurement = Measurement(
        [*plan.figures.values()],
        data,
        out,
        device=device,
        num_at_once=num_at_once,
        progress=progress,
        start=start_words,
    )
    measurement.recall(RECORD, known)

    def record() -> None:
        write_json(out / RECORD, measurement.record())

    failed = measurement.run(record)
    found = measurement.figures
    bpb = {name: found[f.key] for name, f in plan.figures.items() if f.key in found}
    result = measurement.record() | summarize(plan, bpb)
    write_json(out / RECORD, result)
    write_atomic(out / "ablation.md", ablation_section(result) + "\n")
    return result, failed


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
