"""Variants of a recipe, measured to test the claims and experiments of `claims.py`.

Each variant is a set of changes to a base recipe and a way to score it; equal recipes share one
run. All variants are trained with the same seeds, first all with the first seed, so a stop leaves
whole comparisons. Runs are processes, and so are packing and scoring. Each figure is written down
as soon as it is there.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
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
from underpar.core.stats import block_differences
from underpar.core.versions import device_name, versions
from underpar.data.folder import data_identity, load_data
from underpar.data.hold_out import priced_documents
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
    seed: int
    first_hash: str
    """Hash of the recipe with the first seed, which all seeds of a variant share."""

    @property
    def key(self) -> str:
        """Names the figure in results: the recipe, and how it is scored."""
        return self._key(self.job.recipe_hash)

    @property
    def treatment(self) -> str:
        """Names what the seeds of a variant have in common."""
        return self._key(self.first_hash)

    def _key(self, recipe_hash: str) -> str:
        if self.claim.figure == BEFORE:
            return recipe_hash
        return " ".join((recipe_hash, self.variant.method.label, *self.variant.change))


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
            first_hash = ""
            for seed in range(first, first + request.num_seeds):
                overrides = (*variant.set, *request.overrides, f"train.seed={seed}")
                recipe = resolve_levers(load_recipe(claim.base, overrides))
                first_hash = first_hash or recipe.hash
                if seed == first:
                    weight_shapes(recipe)
                    if claim.figure == SCORED:
                        open_method(recipe, variant.method, variant.change)
                job = Job(f"{stem}-{recipe.hash}", overrides, recipe.hash)
                cells.append(Cell(claim, variant, job, seed, first_hash))
    _require_files_of_their_own(cells)
    # Python's sort keeps the order of cells with equal seeds.
    return sorted(cells, key=lambda cell: cell.seed)


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
    allowance: Allowance | None = None,
) -> tuple[dict[str, Any], dict[str, str]]:
    """Measure all figures; writes OUT/variants.json, .md and effects.toml. Also what failed.

    `known` is an earlier variants.json whose figures need not be measured again. What was stopped
    continues. No process starts that the `allowance` has no time for.
    """
    opened = open_measurement(request, data, out, device, num_at_once, known)
    cells, conditions, so_far = opened.cells, opened.conditions, opened.so_far
    # What was measured of the others belongs to the result, and tells the noise.
    all_cells = make_cells(replace(request, names=()))
    allowance = allowance or Allowance()
    protocols = with_protocol(so_far.protocols, Protocol(request.overrides, request.num_seeds))
    figures = so_far.figures
    for kind, seconds in so_far.seconds.items():
        allowance.took(kind, seconds)
    failed: dict[str, str] = {}
    claims = {claim.name: claim for claim in request.claims()}
    all_claims = {cell.claim.name: cell.claim for cell in all_cells}

    def record() -> dict[str, Any]:
        """Write down what has been measured so far."""
        for cell in cells:
            value = read_figure(cell, RunFolder(out / cell.job.name))
            if value is not None:
                figures[cell.key] = value
        result = conditions | {
            "seeds": request.num_seeds,
            "overrides": list(request.overrides),
            "protocols": [protocol.as_list() for protocol in protocols],
            "seconds": allowance.expected,
            "figures": figures,
            "claims": summarize(all_cells, figures),
        }
        write_json(out / "variants.json", result)
        write_atomic(out / "variants.md", to_markdown(claims, all_claims, result))
        write_atomic(out / "effects.toml", to_effects(claims, all_claims, result))
        return result

    with lock_folder(out, create=True):
        left = [cell for cell in cells if cell.key not in figures]
        for cell in left:
            refuse_other_run(cell.job, RunFolder(out / cell.job.name), conditions["data_identity"])
        work = Work(
            out, data, device, num_at_once, start_words, progress, failed, allowance, record
        )
        work.train(left)
        scored = [cell for cell in left if cell.claim.figure == SCORED]
        work.pack(scored)
        work.score(scored)
        result = record()
    return result, failed


@dataclass(frozen=True)
class Measurement:
    """What a request asks for, what all its runs share, and what is known already."""

    cells: list[Cell]
    conditions: dict[str, Any]
    so_far: Known


def open_measurement(
    request: Request, data: Path, out: Path, device: str, num_at_once: int, known: Path | None
) -> Measurement:
    """Check a request and the data, and read what earlier runs left in `known` and in `out`."""
    cells = make_cells(request)
    require_equal_shares(cells, num_at_once)
    opened = load_data(data, verify=False)
    conditions = {
        "device": device_name(open_runtime(device).device),
        "versions": versions(),
        "data_identity": data_identity(opened),
        "text": priced_documents(opened.manifest),
    }
    for cell in cells:
        size = _recipe(cell).model.vocab_size
        if size != opened.tokenizer.vocab_size:
            raise BenchError(
                f"{cell.claim.name} needs a vocabulary of {size:,}, {data} has "
                f"{opened.tokenizer.vocab_size:,}; choose claims of one base with --claim"
            )
    so_far = Known({}, {}, ())
    for path in (known, out / "variants.json"):
        if path and (path == known or path.exists()):
            so_far = so_far.and_also(read_known(path, conditions))
    return Measurement(cells, conditions, so_far)


@dataclass
class Allowance:
    """The time that may be used, and how long processes of each kind took so far."""

    seconds: float = math.inf
    expected: dict[str, float] = field(default_factory=dict)
    """Kind of process -> the longest that one of them took, in seconds."""
    now: Callable[[], float] = time.monotonic

    def __post_init__(self) -> None:
        if not self.seconds > 0:
            raise BenchError(f"{self.seconds:g} seconds are no time; give more than 0")
        self._end = self.now() + self.seconds

    def has_time(self, seconds: float) -> bool:
        """Whether something that takes so many seconds would end in time."""
        return self.now() + seconds <= self._end

    def took(self, kind: str, seconds: float) -> None:
        """Remember how long a process took."""
        self.expected[kind] = round(max(seconds, self.expected.get(kind, 0.0)), 1)


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
    allowance: Allowance
    record: Callable[[], object]
    """Called after each process."""

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
        self._run("train", jobs, cells, self.num_at_once)

    def pack(self, cells: Sequence[Cell]) -> None:
        """Pack the trained runs that have no artifact yet."""
        jobs = {
            cell.job.name: self._job(cell, ["pack", str(self._folder(cell).path)])
            for cell in cells
            if read_bpb(self._folder(cell), 0) is not None
            and not self._folder(cell).budget_file.exists()
        }
        self._run("pack", jobs, cells, self.num_at_once)

    def score(self, cells: Sequence[Cell]) -> None:
        """Score the packed runs, one at a time: a folder has one writer."""
        jobs = {}
        for cell in cells:
            folder = self._folder(cell)
            if folder.artifact_file.exists() and read_figure(cell, folder) is None:
                words = ["score", str(folder.artifact_file), "--data", str(self.data)]
                jobs[cell.key] = self._job(cell, words + cell.variant.score_words())
        self._run("score", jobs, cells, 1)

    def _folder(self, cell: Cell) -> RunFolder:
        return RunFolder(self.out / cell.job.name)

    def _job(self, cell: Cell, words: Sequence[str]) -> Job:
        words = (*words, "--device", self.device)
        return Job(cell.job.name, cell.job.overrides, cell.job.recipe_hash, words)

    def _run(
        self, stage: str, by_key: Mapping[str, Job], cells: Sequence[Cell], num_at_once: int
    ) -> None:
        jobs = list(by_key.values())
        by_name = {cell.job.name: cell for cell in cells}
        begun: dict[str, float] = {}
        done = 0

        def may_start(job: Job) -> bool:
            # What was never measured starts if any time is left.
            fits = self.allowance.has_time(guess(stage, by_name[job.name], self.allowance) or 0.0)
            if not fits:
                self.progress.note(f"{stage} {job.name}: no time left for it")
            return fits

        def launch(job: Job) -> subprocess.Popen[bytes]:
            begun[job.name] = self.allowance.now()
            return self.start(job.options, self.out / job.name)

        def on_end(job: Job, code: int) -> None:
            nonlocal done
            done += 1
            self.progress.note(f"{stage} {done} of {len(jobs)}, {job.name}: exit code {code}")
            if code:
                self.failed[job.name] = f"{stage}: exit code {code}"
                self.progress.note(read_tail(self.out / job.name))
            else:
                kind = kind_of(stage, by_name[job.name])
                self.allowance.took(kind, self.allowance.now() - begun[job.name])
            self.record()

        run_jobs(jobs, launch, num_at_once, on_end, may_start)


# Beside the budget of a recipe: the process, the compiler, and the prices of held-out text.
START_SECONDS = 90.0


def kind_of(stage: str, cell: Cell) -> str:
    """Names the processes that take as long as this one: stage, base, budget of the training."""
    part = _recipe(cell).train
    budget = (part.budget_seconds, part.budget_tokens, part.budget_steps, part.budget_flops)
    return " ".join((stage, cell.claim.base, *(f"{value:g}" for value in budget)))


def guess(stage: str, cell: Cell, allowance: Allowance) -> float | None:
    """Seconds that a process is expected to take; None if nothing says."""
    measured = allowance.expected.get(kind_of(stage, cell))
    if measured is not None:
        return measured
    budget = _recipe(cell).train.budget_seconds
    return budget + START_SECONDS if stage == "train" and budget else None


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


@dataclass(frozen=True)
class Protocol:
    """What all runs of a comparison have in common: changes of the recipe, and how many seeds."""

    overrides: tuple[str, ...]
    num_seeds: int

    def as_list(self) -> list[Any]:
        """As JSON: the number of seeds, then the changes."""
        return [self.num_seeds, *self.overrides]


def with_protocol(protocols: Sequence[Protocol], new: Protocol) -> tuple[Protocol, ...]:
    """The protocols with a new one; of two that differ in their seeds, the one with more."""
    most = {p.overrides: p.num_seeds for p in protocols}
    most[new.overrides] = max(new.num_seeds, most.get(new.overrides, 0))
    return tuple(Protocol(overrides, num) for overrides, num in most.items())


@dataclass(frozen=True)
class Known:
    """What earlier runs left: figures, how long processes took, and the protocols."""

    figures: dict[str, float]
    seconds: dict[str, float]
    protocols: tuple[Protocol, ...]

    def and_also(self, other: Known) -> Known:
        """Both together."""
        protocols = self.protocols
        for protocol in other.protocols:
            protocols = with_protocol(protocols, protocol)
        return Known(self.figures | other.figures, self.seconds | other.seconds, protocols)


def read_known(path: Path, conditions: Mapping[str, Any]) -> Known:
    """What an earlier variants.json holds, made under the same `conditions`."""
    if not path.is_file():
        raise RunError(f"{path} does not exist; earlier runs leave a variants.json in --out")
    result = RunFolder(path.parent).read_json(path)
    for key, value in conditions.items():
        if result.get(key) != value:
            raise RunError(f"{path} has {key} {result.get(key)}, these runs have {value}")
    with reading(path, "it is not the result of variants"):
        figures = {str(key): float(value) for key, value in result["figures"].items()}
        seconds = {str(k): float(value) for k, value in result.get("seconds", {}).items()}
        protocols = tuple(
            Protocol(tuple(map(str, overrides)), int(num))
            for num, *overrides in result.get("protocols", ())
        )
    return Known(figures, seconds, protocols)


def summarize(cells: Sequence[Cell], figures: Mapping[str, float]) -> dict[str, dict[str, Any]]:
    """Claim -> variant -> what it is, and bits per byte of the seeds that were measured."""
    table: dict[str, dict[str, Any]] = {}
    for cell in cells:
        variants = table.setdefault(cell.claim.name, {})
        empty = {"treatment": cell.treatment, "bpb": {}}
        values = variants.setdefault(cell.variant.name, empty)["bpb"]
        if cell.key in figures:
            values[str(cell.seed)] = figures[cell.key]
    return table


def values_beside(
    claim: Claim, claims: Mapping[str, Claim], measured: Mapping[str, Mapping[str, Any]]
) -> dict[tuple[str, int], float]:
    """(treatment, seed) -> bits per byte, of all runs whose noise is that of the claim's runs.

    These are the runs of one base before quantization. Ways to score differ in their noise.
    """
    names = [claim.name]
    if claim.figure == BEFORE:
        names = [c.name for c in claims.values() if (c.base, c.figure) == (claim.base, BEFORE)]
    return {
        (variant["treatment"], int(seed)): bpb
        for name in names
        for variant in measured.get(name, {}).values()
        for seed, bpb in variant["bpb"].items()
    }


def compare(
    claim: Claim, measured: Mapping[str, Any], values: Mapping[tuple[str, int], float]
) -> list[Comparison]:
    """Each variant beside the best by the claim, which comes first, on the seeds of both.

    `measured` is the claim's entry of `summarize`; all `values` together tell the noise.
    """
    best = measured.get(claim.best, {"bpb": {}})
    if not best["bpb"]:
        return []
    differences = block_differences(values, best["treatment"])
    bpb = fmean(best["bpb"].values())
    rows = [Comparison(claim.best, bpb, len(best["bpb"]))]
    for name, variant in measured.items():
        if name == claim.best or variant["treatment"] not in differences:
            continue
        found, noise = differences[variant["treatment"]], None
        if found.interval is not None:
            noise = 1000 * (found.interval.high - found.interval.low) / 2
        limit = ONE_SEED_MBPB if noise is None else noise
        difference = 1000 * found.value
        verdict = OPEN if abs(difference) <= limit else SAME if difference > 0 else OTHER
        own = fmean(variant["bpb"].values())
        rows.append(Comparison(name, own, found.num_blocks, difference, noise, verdict))
    return rows


def verdict_of(rows: Sequence[Comparison]) -> str:
    """The verdict on a claim: the worst of its comparisons."""
    found = {row.verdict for row in rows[1:]}
    return next((verdict for verdict in (OTHER, OPEN) if verdict in found), SAME)


def rows_of(
    claim: Claim, all_claims: Mapping[str, Claim], result: Mapping[str, Any]
) -> list[Comparison]:
    """What a result says of a claim."""
    measured = result["claims"]
    values = values_beside(claim, all_claims, measured)
    return compare(claim, measured.get(claim.name, {}), values)


def to_markdown(
    claims: Mapping[str, Claim], all_claims: Mapping[str, Claim], result: Mapping[str, Any]
) -> str:
    """A section per claim: published effect, ours, verdict."""
    sections = (_section(claim, all_claims, result) for claim in claims.values())
    return "\n".join(part for section in sections for part in section)


def _section(
    claim: Claim, all_claims: Mapping[str, Claim], result: Mapping[str, Any]
) -> Iterator[str]:
    rows = rows_of(claim, all_claims, result)
    yield f"## {claim.name}\n"
    lever = f"`{claim.lever}`, " if claim.lever else ""
    yield f"{claim.claim} ({lever}{claim.source}). Published: {claim.published or 'nothing'}.\n"
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


def to_effects(
    claims: Mapping[str, Claim], all_claims: Mapping[str, Claim], result: Mapping[str, Any]
) -> str:
    """Entries for `effects.toml`, one per claim about a lever that was measured."""
    entries = []
    for claim in claims.values():
        rows = rows_of(claim, all_claims, result)
        if len(rows) < 2 or not claim.lever:
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
