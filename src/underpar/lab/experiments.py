"""Experiments: which runs fit into some seconds, and the page of what they showed.

An experiment is a line of `experiments.toml` (`claims.py`); `variants.py` makes its runs.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from underpar.artifact.size_before_training import grid_bits
from underpar.build.levers import resolve_levers
from underpar.build.model import weight_shapes
from underpar.core.run_folder import RunFolder, write_atomic
from underpar.data.folder import load_data
from underpar.errors import BenchError, RunError
from underpar.lab.claims import SCORED, WITH, WITHOUT, Claim, read_claims
from underpar.lab.measurement import Allowance, Figure, Measurement, guess, read_bpb
from underpar.lab.results import into_page
from underpar.lab.variants import (
    RECORD,
    Cell,
    Comparison,
    Protocol,
    Request,
    compare,
    make_cells,
    summarize,
    values_beside,
)
from underpar.submit.bundle import bundle

DONE, RUNS, NO_TIME = "done", "runs", "no time"


@dataclass(frozen=True)
class PlannedRun:
    """A run, what it is for, how long it is expected to take, and whether there is time for it."""

    name: str
    uses: tuple[str, ...]
    seed: int
    seconds: float | None
    bits: float | None
    """Bits per weight of the grids that fill the cap; None without grids."""
    state: str


def plan_request(
    request: Request,
    data: Path,
    out: Path,
    device: str,
    known: Path | None,
    allowance: Allowance,
    num_at_once: int = 1,
) -> list[PlannedRun]:
    """What `run_variants` with the same arguments would train, if runs took as expected.

    Refuses a network that the cap leaves too few bits per weight.
    """
    cells = make_cells(request)
    figures = [cell.figure for cell in cells]
    measurement = Measurement(figures, data, out, device, num_at_once, allowance)
    measurement.recall(RECORD, known)
    by_run: dict[str, list[Cell]] = {}
    for cell in cells:
        by_run.setdefault(cell.figure.job.name, []).append(cell)
    tokenizer = load_data(data, verify=False).tokenizer.content
    planned, free_at = [], [0.0] * num_at_once
    for name, uses in by_run.items():
        figure = uses[0].figure
        bits = bits_per_weight(figure, tokenizer)
        seconds = guess("train", figure, allowance)
        is_done = all(cell.figure.key in measurement.figures for cell in uses)
        if is_done or read_bpb(measurement.folder(figure)) is not None:
            state = DONE
        elif allowance.has_time(min(free_at) + (seconds or 0.0)):
            state = RUNS
            free_at[free_at.index(min(free_at))] += seconds or 0.0
        else:
            state = NO_TIME
        words = tuple(f"{cell.claim.name} {cell.variant.name}" for cell in uses)
        planned.append(PlannedRun(name, words, uses[0].seed, seconds, bits, state))
    return planned


# A trellis of grids needs about 1 bit per weight, and below 2 a model of this size is of no use.
LEAST_BITS = 2.0


def bits_per_weight(figure: Figure, tokenizer: bytes) -> float | None:
    """Bits per weight that the cap leaves to the grids of a recipe; None if it has none."""
    recipe = resolve_levers(figure.recipe)
    bits = grid_bits(recipe, weight_shapes(recipe), len(bundle(recipe)), tokenizer)
    if bits < LEAST_BITS:
        raise BenchError(
            f"{figure.job.name} ({' '.join(figure.job.overrides)}) does not fit: its cap leaves "
            f"{bits:.2f} bits per weight, expected {LEAST_BITS:g} or more; store other tensors in "
            "fewer bits, or take a smaller network"
        )
    return bits if math.isfinite(bits) else None


COLUMNS = ("experiment", "hypothesis", "setting", "seeds", "with - without, mBPB", "decision")
NO_RUNS: dict[str, Any] = {"protocols": [], "figures": {}}


def write_page(page: Path, file: Path, result: Mapping[str, Any]) -> None:
    """Put the tables of all experiments of a file into a page, new or old."""
    write_atomic(page, into_page(page, to_tables(file, result), "underpar lab experiments"))


def to_tables(file: Path, result: Mapping[str, Any]) -> str:
    """All experiments of a file: a table per protocol of the result."""
    sections = [
        "\n".join(_section(file, Protocol(tuple(overrides), num_seeds), result))
        for num_seeds, *overrides in result["protocols"]
    ]
    if not sections:
        rows = [_row(claim, None) for claim in read_claims(file).values()]
        sections = ["\n".join(["## No runs yet\n", *_table(rows)])]
    return "\n".join(sections)


def _section(file: Path, protocol: Protocol, result: Mapping[str, Any]) -> Iterator[str]:
    request = Request(file, overrides=protocol.overrides, num_seeds=protocol.num_seeds)
    cells = make_cells(request)
    claims = {cell.claim.name: cell.claim for cell in cells}
    measured = summarize(cells, result["figures"])
    rows = []
    for claim in claims.values():
        values = values_beside(claim, claims, measured)
        # The first row is that of the runs without the change.
        found = compare(claim, measured[claim.name], values)[1:]
        rows.append(_row(claim, found[0] if found else None))
    yield f"## {' '.join(protocol.overrides) or 'Recipes as they are'}\n"
    yield f"{result['device']}, data `{result['data_identity']}` ({result['text']}).\n"
    yield from _table(rows)


def _table(rows: Sequence[tuple[str, ...]]) -> Iterator[str]:
    yield f"| {' | '.join(COLUMNS)} |"
    yield "| --- | --- | --- | ---: | ---: | --- |"
    for row in rows:
        yield f"| {' | '.join(row)} |"
    yield ""


def read_record(path: Path | None) -> dict[str, Any]:
    """The result of an earlier command, for the page alone; of none if there is no path."""
    if path is None:
        return NO_RUNS
    if not path.is_file():
        raise RunError(f"{path} does not exist; earlier runs leave a variants.json in --out")
    result: dict[str, Any] = RunFolder(path.parent).read_json(path)
    if missing := {"protocols", "figures", "device", "data_identity", "text"} - {*result}:
        raise RunError(f"{path} has no {min(missing)!r}: it is not the result of experiments")
    return result


def _row(claim: Claim, found: Comparison | None) -> tuple[str, ...]:
    settings = {variant.name: variant.set for variant in claim.variants}
    both = settings[WITHOUT]
    change = " ".join(f"`{word}`" for word in settings[WITH][len(both) :])
    if claim.on:
        change += f" on `{claim.on}`"
    elif both:
        change += " on " + " ".join(f"`{word}`" for word in both)
    setting = f"{claim.base}: {change}" + (", packed" if claim.figure == SCORED else "")
    expected = f" Expected: {claim.published}." if claim.published else ""
    hypothesis = f"{claim.claim} ({claim.source}).{expected}"
    if found is None:
        return claim.name, hypothesis, setting, "0", "", claim.decision or "not measured"
    difference, decision = f"{found.difference_mbpb:+.2f}", "one seed"
    if found.noise_mbpb is not None:
        low, high = (found.difference_mbpb + sign * found.noise_mbpb for sign in (-1, 1))
        difference += f" ({low:+.2f} to {high:+.2f})"
        decision = "helps" if high < 0 else "hurts" if low > 0 else "open"
    if claim.decision:
        decision += f"; {claim.decision}"
    return claim.name, hypothesis, setting, str(found.num_seeds), difference, decision
