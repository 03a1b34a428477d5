"""Variants of a recipe, measured to test the claims of `claims.py`.

Each variant is a set of changes to a base recipe and a way to score it; equal recipes share one
run. Runs are processes, and so are packing and scoring.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

from underpar.build.levers import resolve_levers
from underpar.build.model import weight_shapes
from underpar.build.scoring import open_method
from underpar.core.fields import reading
from underpar.core.locks import lock_folder
from underpar.core.progress import SILENT, Progress
from underpar.core.run_folder import RunFolder, write_atomic, write_json
from underpar.core.runtime import open_runtime
from underpar.core.stats import welch
from underpar.core.versions import device_name, versions
from underpar.data.folder import data_identity, load_data
from underpar.errors import BenchError, RunError
from underpar.lab.ablate import read_bpb, refuse_other_run
from underpar.lab.claims import BEFORE, FIGURES, SCORED, VARIANTS, Claim, Variant, read_claims
from underpar.lab.runs import Job, read_tail, run_jobs, start
from underpar.recipe import Recipe, load_recipe, nearest

if TYPE_CHECKING:
    import subprocess

# One seed has no spread: a difference below this many mBPB asks for a second one.
ONE_SEED_MBPB = 3.0
# What the differences say of a claim, and the verdict as `effects.toml` has it.
SAME, OPEN, OTHER = "same direction", "not shown", "other direction"
VERDICTS = {SAME: "helps", OPEN: "none", OTHER: "hurts"}


@dataclass(frozen=True)
class Cell:
    """One figure to measure: a variant of a claim with one seed. `job` trains its run."""

    claim: Claim
    variant: Variant
    job: Job

    @property
    def key(self) -> str:
        """Names the figure in results: the recipe, and how it is scored."""
        if self.claim.figure == BEFORE:
            return self.job.recipe_hash
        parts = (self.job.recipe_hash, self.variant.method.label, *self.variant.change)
        return " ".join(parts)


@dataclass(frozen=True)
class Comparison:
    """A variant beside the one that is claimed to be the best; above 0 it is worse."""

    variant: str
    bpb: float
    num_seeds: int
    difference_mbpb: float = 0.0
    noise_mbpb: float | None = None
    """None with one seed."""
    verdict: str = ""


@dataclass(frozen=True)
class Request:
    """Which claims to test (none: all that have variants), with how many seeds and what changes."""

    file: Path = VARIANTS
    names: tuple[str, ...] = ()
    overrides: tuple[str, ...] = ()
    num_seeds: int = 1

    def __post_init__(self) -> None:
        if self.num_seeds < 1:
            raise BenchError(f"{self.num_seeds} seeds measure nothing; use at least 1")

    def claims(self) -> list[Claim]:
        """The claims that are tested."""
        known = {name: c for name, c in read_claims(self.file).items() if c.variants}
        for name in self.names:
            if name not in known:
                raise BenchError(f"no variants {name!r} in {self.file}{nearest(name, list(known))}")
        return [known[name] for name in self.names or known]


def make_cells(request: Request) -> list[Cell]:
    """All figures to measure. Every recipe and way of scoring is checked before any training."""
    cells: list[Cell] = []
    for claim in request.claims():
        first = load_recipe(claim.base, request.overrides).train.seed
        stem = "+".join(Path(part).stem for part in claim.base.split("+"))
        for variant in claim.variants:
            for seed in range(first, first + request.num_seeds):
                overrides = (*variant.set, *request.overrides, f"train.seed={seed}")
                recipe = resolve_levers(load_recipe(claim.base, overrides))
                weight_shapes(recipe)
                if claim.figure == SCORED:
                    open_method(recipe, variant.method, variant.change)
                job = Job(f"{stem}-{recipe.hash}", overrides, recipe.hash)
                cells.append(Cell(claim, variant, job))
    _require_files_of_their_own(cells)
    return cells


def _require_files_of_their_own(cells: Sequence[Cell]) -> None:
    keys: dict[tuple[str, str], str] = {}
    for cell in cells:
        if cell.claim.figure == SCORED:
            place = (cell.job.recipe_hash, cell.variant.method.label)
            if keys.setdefault(place, cell.key) != cell.key:
                raise BenchError(
                    f"{cell.claim.name}: two variants would write score-{place[1]}.json with other "
                    "settings of its levers; change the recipe with `set` instead"
                )


def require_equal_shares(cells: Sequence[Cell], num_at_once: int) -> None:
    """Refuse runs side by side with a budget of seconds: each would take fewer steps."""
    for cell in cells:
        seconds = _recipe(cell).train.budget_seconds
        if num_at_once > 1 and seconds:
            raise BenchError(
                f"{num_at_once} runs at once share the device, and {cell.claim.name} has a budget "
                f"of {seconds:g} s; use --jobs 1, or --set train.budget_seconds=0 --set "
                "train.reserve_seconds=0 --set train.budget_steps=N"
            )


def _recipe(cell: Cell) -> Recipe:
    return load_recipe(cell.claim.base, cell.job.overrides)


Start = Callable[[Sequence[str], Path], "subprocess.Popen[bytes]"]
"""Starts `underpar` with some words; its output goes to a log in a folder."""


def run_variants(
    request: Request,
    data: Path,
    out: Path,
    device: str = "auto",
    num_at_once: int = 1,
    known: Path | None = None,
    progress: Progress = SILENT,
    start_words: Start = start,
) -> tuple[dict[str, Any], dict[str, str]]:
    """Measure all figures; writes OUT/variants.json, .md and effects.toml. Also what failed.

    `known` is an earlier variants.json whose figures need not be measured again. What was stopped
    continues.
    """
    cells = make_cells(request)
    require_equal_shares(cells, num_at_once)
    opened = load_data(data, verify=False)
    identity = data_identity(opened)
    conditions = {
        "device": device_name(open_runtime(device).device),
        "versions": versions(),
        "data_identity": identity,
    }
    for cell in cells:
        size = _recipe(cell).model.vocab_size
        if size != opened.tokenizer.vocab_size:
            raise BenchError(
                f"{cell.claim.name} needs a vocabulary of {size:,}, {data} has "
                f"{opened.tokenizer.vocab_size:,}; choose claims of one base with --claim"
            )
    figures = read_known(known, conditions) if known else {}
    failed: dict[str, str] = {}
    with lock_folder(out, create=True):
        work = Work(out, data, device, num_at_once, start_words, progress, failed)
        left = [cell for cell in cells if cell.key not in figures]
        for cell in left:
            refuse_other_run(cell.job, RunFolder(out / cell.job.name), identity)
        work.train(left)
        scored = [cell for cell in left if cell.claim.figure == SCORED]
        work.pack(scored)
        work.score(scored)
        for cell in left:
            value = read_figure(cell, RunFolder(out / cell.job.name))
            if value is not None:
                figures[cell.key] = value
        result = conditions | {
            "seeds": request.num_seeds,
            "overrides": list(request.overrides),
            "figures": figures,
            "claims": summarize(cells, figures),
        }
        claims = {claim.name: claim for claim in request.claims()}
        write_json(out / "variants.json", result)
        write_atomic(out / "variants.md", to_markdown(claims, result))
        write_atomic(out / "effects.toml", to_effects(claims, result))
    return result, failed


@dataclass
class Work:
    """The processes of all cells: each run is trained, packed and scored once."""

    out: Path
    data: Path
    device: str
    num_at_once: int
    start: Start
    progress: Progress
    failed: dict[str, str]

    def train(self, cells: Sequence[Cell]) -> None:
        """Train the runs that are not finished."""
        jobs = {}
        for cell in cells:
            if read_bpb(self._folder(cell), 0) is None:
                words = ["train", cell.claim.base, "--data", str(self.data), "--out"]
                # Nobody repeats the steps of these runs, so no checkpoint is kept for an audit.
                words += [str(self._folder(cell).path), "--keep", "0"]
                words += [w for o in cell.job.overrides for w in ("--set", o)]
                jobs[cell.job.name] = self._job(cell, words)
        self._run("train", jobs.values(), self.num_at_once)

    def pack(self, cells: Sequence[Cell]) -> None:
        """Pack the trained runs that have no artifact yet."""
        jobs = {
            cell.job.name: self._job(cell, ["pack", str(self._folder(cell).path)])
            for cell in cells
            if read_bpb(self._folder(cell), 0) is not None
            and not self._folder(cell).budget_file.exists()
        }
        self._run("pack", jobs.values(), self.num_at_once)

    def score(self, cells: Sequence[Cell]) -> None:
        """Score the packed runs, one at a time: a folder has one writer."""
        jobs = {}
        for cell in cells:
            folder = self._folder(cell)
            if folder.artifact_file.exists() and read_figure(cell, folder) is None:
                words = ["score", str(folder.artifact_file), "--data", str(self.data)]
                jobs[cell.key] = self._job(cell, words + cell.variant.score_words())
        self._run("score", jobs.values(), 1)

    def _folder(self, cell: Cell) -> RunFolder:
        return RunFolder(self.out / cell.job.name)

    def _job(self, cell: Cell, words: Sequence[str]) -> Job:
        words = (*words, "--device", self.device)
        return Job(cell.job.name, cell.job.overrides, cell.job.recipe_hash, words)

    def _run(self, stage: str, jobs: Any, num_at_once: int) -> None:
        jobs = list(jobs)
        done = 0

        def on_end(job: Job, code: int) -> None:
            nonlocal done
            done += 1
            self.progress.note(f"{stage} {done} of {len(jobs)}, {job.name}: exit code {code}")
            if code:
                self.failed[job.name] = f"{stage}: exit code {code}"
                self.progress.note(read_tail(self.out / job.name))

        run_jobs(
            jobs, lambda job: self.start(job.options, self.out / job.name), num_at_once, on_end
        )


def read_figure(cell: Cell, folder: RunFolder) -> float | None:
    """Bits per byte of a cell if they were measured, of the artifact that lies in the folder."""
    if cell.claim.figure == BEFORE:
        return read_bpb(folder, 0)
    path = folder.score_file(cell.variant.method.label)
    if not (path.exists() and folder.budget_file.exists()):
        return None
    score, budget = folder.read_fields(path), folder.read_fields(folder.budget_file)
    is_of_it = score.text("artifact_sha256") == budget.text("artifact_sha256")
    return score.finite("bpb") if is_of_it else None


def read_known(path: Path, conditions: Mapping[str, Any]) -> dict[str, float]:
    """The figures of an earlier variants.json, made under the same `conditions`."""
    if not path.is_file():
        raise RunError(
            f"{path} does not exist; 'underpar lab variants' leaves variants.json in --out"
        )
    result = RunFolder(path.parent).read_json(path)
    for key, value in conditions.items():
        if result.get(key) != value:
            raise RunError(f"{path} has {key} {result.get(key)}, these runs have {value}")
    with reading(path, "it is not the result of variants"):
        return {str(key): float(value) for key, value in result["figures"].items()}


def summarize(
    cells: Sequence[Cell], figures: Mapping[str, float]
) -> dict[str, dict[str, list[float]]]:
    """Claim -> variant -> bits per byte of the seeds that were measured."""
    table: dict[str, dict[str, list[float]]] = {}
    for cell in cells:
        values = table.setdefault(cell.claim.name, {}).setdefault(cell.variant.name, [])
        if cell.key in figures:
            values.append(figures[cell.key])
    return table


def compare(claim: Claim, values: Mapping[str, Sequence[float]]) -> list[Comparison]:
    """Each variant beside the best by the claim, which comes first; measured ones only."""
    best = values.get(claim.best, ())
    if not best:
        return []
    rows = [Comparison(claim.best, fmean(best), len(best))]
    for name, others in values.items():
        if name != claim.best and others:
            rows.append(_beside(name, best, others))
    return rows


def _beside(name: str, best: Sequence[float], others: Sequence[float]) -> Comparison:
    difference, noise = 1000 * (fmean(others) - fmean(best)), None
    if min(len(best), len(others)) > 1:
        interval = welch(others, best).interval
        noise = 1000 * (interval.high - interval.low) / 2
    limit = ONE_SEED_MBPB if noise is None else noise
    verdict = OPEN if abs(difference) <= limit else SAME if difference > 0 else OTHER
    return Comparison(name, fmean(others), len(others), difference, noise, verdict)


def verdict_of(rows: Sequence[Comparison]) -> str:
    """The verdict on a claim: the worst of its comparisons."""
    found = {row.verdict for row in rows[1:]}
    return next((verdict for verdict in (OTHER, OPEN) if verdict in found), SAME)


def to_markdown(claims: Mapping[str, Claim], result: Mapping[str, Any]) -> str:
    """A section per claim: published effect, ours, verdict."""
    return "\n".join(part for claim in claims.values() for part in _section(claim, result))


def _section(claim: Claim, result: Mapping[str, Any]) -> Iterator[str]:
    rows = compare(claim, result["claims"].get(claim.name, {}))
    yield f"## {claim.name}\n"
    yield f"{claim.claim} (`{claim.lever}`, {claim.source}). Published: {claim.published}.\n"
    if len(rows) < 2:
        yield "Not measured: the best by the claim and another variant are needed.\n"
        return
    above = f"above `{claim.best}`, mBPB"
    yield f"| variant | seeds | BPB, {FIGURES[claim.figure]} | {above} | noise | verdict |"
    yield "|---|---:|---:|---:|---:|---|"
    for row in rows:
        difference = f"{row.difference_mbpb:+.2f}" if row.verdict else ""
        noise = "" if row.noise_mbpb is None else f"{row.noise_mbpb:.2f}"
        cells = (row.variant, str(row.num_seeds), f"{row.bpb:.5f}", difference, noise, row.verdict)
        yield f"| {' | '.join(cells)} |"
    data = f"data `{result['data_identity']}`"
    yield f"\nVerdict: {verdict_of(rows)}, on {result['device']}, {data}.\n"


def to_effects(claims: Mapping[str, Claim], result: Mapping[str, Any]) -> str:
    """Entries for `effects.toml`, one per claim that was measured."""
    entries = []
    for claim in claims.values():
        rows = compare(claim, result["claims"].get(claim.name, {}))
        if len(rows) < 2:
            continue
        figures = [f"{rows[0].variant} {rows[0].bpb:.4f} BPB"]
        figures += [f"{row.variant} {row.difference_mbpb:+.1f} mBPB" for row in rows[1:]]
        recipe = " with ".join((claim.base, *result["overrides"]))
        seeds = f"{rows[0].num_seeds} seed{'' if rows[0].num_seeds == 1 else 's'}"
        setting = f"{recipe}, {FIGURES[claim.figure]}, {seeds}, {result['device']}"
        values = {
            "claim": claim.name,
            "figure": ", ".join(figures),
            "setting": setting,
            "where": "underpar lab variants",
            "verdict": VERDICTS[verdict_of(rows)],
        }
        lines = [f"{key} = {json.dumps(value)}" for key, value in values.items()]
        entries.append("\n".join([f"[[{claim.lever}]]", *lines, ""]))
    return "\n".join(entries)
