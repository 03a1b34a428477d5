"""Variants of a recipe, measured to test the claims and experiments of `claims.py`.

Each variant is a set of changes to a base recipe and a way to score it; equal recipes share one
run (`measurement.py`). All variants are trained with the same seeds, first all with the first seed,
so a stop leaves whole comparisons.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any

from underpar.core.fields import reading
from underpar.core.progress import SILENT, Progress
from underpar.core.run_folder import write_atomic, write_json
from underpar.core.stats import block_differences
from underpar.errors import BenchError
from underpar.lab.claims import BEFORE, FIGURES, SCORED, VARIANTS, Claim, Variant, read_claims
from underpar.lab.measurement import Allowance, Figure, Measurement, Start, make_job
from underpar.lab.runs import start
from underpar.recipe import load_recipe, nearest

# One seed has no spread: a difference below this many mBPB asks for a second one.
ONE_SEED_MBPB = 3.0
RECORD = "variants.json"
# What the differences say of a claim, and the verdict as `effects.toml` has it.
SAME, OPEN, OTHER = "same direction", "not shown", "other direction"
VERDICTS = {SAME: "helps", OPEN: "none", OTHER: "hurts"}


@dataclass(frozen=True)
class Cell:
    """A figure that a claim needs: of one of its variants, with one seed."""

    claim: Claim
    variant: Variant
    figure: Figure
    seed: int
    treatment: str
    """Names what the seeds of a variant have in common: the key of its first."""


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
        for variant in claim.variants:
            way = (variant.method, variant.change) if claim.figure == SCORED else ()
            treatment = ""
            for seed in range(first, first + request.num_seeds):
                overrides = (*variant.set, *request.overrides, f"train.seed={seed}")
                figure = Figure(claim.base, make_job(claim.base, overrides), *way)
                if not treatment:
                    figure.check()
                treatment = treatment or figure.key
                cells.append(Cell(claim, variant, figure, seed, treatment))
    _require_files_of_their_own(cells)
    # Python's sort keeps the order of cells with equal seeds.
    return sorted(cells, key=lambda cell: cell.seed)


def _require_files_of_their_own(cells: Sequence[Cell]) -> None:
    keys: dict[tuple[str, str], str] = {}
    for cell in cells:
        if method := cell.figure.method:
            place = (cell.figure.job.recipe_hash, method.label)
            if keys.setdefault(place, cell.figure.key) != cell.figure.key:
                raise BenchError(
                    f"{cell.claim.name}: two variants would write score-{place[1]}.json with other "
                    "settings of its levers; change the recipe with `set` instead"
                )


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
    continues.
    """
    cells = make_cells(request)
    measurement = Measurement(
        [cell.figure for cell in cells],
        data,
        out,
        device=device,
        num_at_once=num_at_once,
        allowance=allowance or Allowance(),
        progress=progress,
        start=start_words,
    )
    # What was measured of the others belongs to the result, and tells the noise.
    all_cells = make_cells(replace(request, names=()))
    all_claims = {cell.claim.name: cell.claim for cell in all_cells}
    claims = {claim.name: claim for claim in request.claims()}
    protocols: tuple[Protocol, ...] = ()
    for earlier in measurement.recall(RECORD, known):
        with reading(earlier.path, "it is not the result of variants"):
            protocols = with_protocols(protocols, read_protocols(earlier.tree))
    protocols = with_protocols(protocols, [Protocol(request.overrides, request.num_seeds)])

    def record() -> dict[str, Any]:
        """Write down what has been measured so far."""
        result = measurement.record() | {
            "seeds": request.num_seeds,
            "overrides": list(request.overrides),
            "protocols": [protocol.as_list() for protocol in protocols],
            "claims": summarize(all_cells, measurement.figures),
        }
        write_json(out / RECORD, result)
        write_atomic(out / "variants.md", to_markdown(claims, all_claims, result))
        write_atomic(out / "effects.toml", to_effects(claims, all_claims, result))
        return result

    failed = measurement.run(record)
    return record(), failed


@dataclass(frozen=True)
class Protocol:
    """What all runs of a comparison have in common: changes of the recipe, and how many seeds."""

    overrides: tuple[str, ...]
    num_seeds: int

    def as_list(self) -> list[Any]:
        """As JSON: the number of seeds, then the changes."""
        return [self.num_seeds, *self.overrides]


def with_protocols(
    protocols: Sequence[Protocol], others: Sequence[Protocol]
) -> tuple[Protocol, ...]:
    """The protocols of both; of two that differ in their seeds, the one with more."""
    most: dict[tuple[str, ...], int] = {}
    for protocol in (*protocols, *others):
        seeds = most.get(protocol.overrides, 0)
        most[protocol.overrides] = max(protocol.num_seeds, seeds)
    return tuple(Protocol(overrides, num) for overrides, num in most.items())


def read_protocols(tree: Mapping[str, Any]) -> list[Protocol]:
    """The protocols of a result."""
    return [
        Protocol(tuple(map(str, overrides)), int(num))
        for num, *overrides in tree.get("protocols", ())
    ]


def summarize(cells: Sequence[Cell], figures: Mapping[str, float]) -> dict[str, dict[str, Any]]:
    """Claim -> variant -> what it is, and bits per byte of the seeds that were measured."""
    table: dict[str, dict[str, Any]] = {}
    for cell in cells:
        variants = table.setdefault(cell.claim.name, {})
        empty = {"treatment": cell.treatment, "bpb": {}}
        values = variants.setdefault(cell.variant.name, empty)["bpb"]
        if cell.figure.key in figures:
            values[str(cell.seed)] = figures[cell.figure.key]
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
