"""Compare the scores of two sets of runs: the gain, its interval, its p values, what it is worth.

Both sides are in bits per byte. Margins may be given in bits per byte or in nats per token, which
are converted with the bytes per token of the new side.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from underpar.audit.acceptance import (
    MARGIN_NATS,
    acceptance,
    bpb_to_nats,
    nats_to_bpb,
    plan,
)
from underpar.core.makers import again
from underpar.core.run_folder import RunFolder
from underpar.core.stats import GainTest, paired, welch
from underpar.errors import BenchError


@dataclass(frozen=True)
class Result:
    """The score of one run: bits per byte, seed of the training, bytes per target.

    A number that was given instead of a run has nothing but its bits per byte.
    """

    name: str
    bpb: float
    seed: int | None = None
    bytes_per_target: float | None = None
    data: str | None = None
    num_bytes: int | None = None
    method: str | None = None
    artifact: str | None = None

    def __post_init__(self) -> None:
        if not (math.isfinite(self.bpb) and self.bpb > 0):
            raise BenchError(
                f"{self.name:.80}: {self.bpb} bits per byte; expected a finite number above 0"
            )


def read_result(text: str, method: str) -> Result:
    """The score in a run folder, in a score file, or given as a number of bits per byte."""
    try:
        bpb = float(text)
    except ValueError:
        pass
    else:
        return Result(text, bpb)
    path = Path(text)
    if not path.exists():
        raise BenchError(f"{text!r:.120} is neither a number, a run folder nor a score file")
    folder = RunFolder(path if path.is_dir() else path.parent)
    score = folder.read_fields(folder.score_file(method) if path.is_dir() else path)
    seed = folder.read_recipe().train.seed if folder.recipe_file.exists() else None
    words = [k for k in ("data_identity", "method", "artifact_sha256") if k in score.values]
    known = {key: score.text(key) for key in words}
    num_bytes, num_targets = score.count("bytes"), score.count("targets")
    if not num_targets:
        raise BenchError(f"{text} prices no text; {again(score.file)}")
    return Result(
        text,
        score.finite("bpb"),
        seed,
        num_bytes / num_targets,
        known.get("data_identity"),
        num_bytes,
        known.get("method"),
        known.get("artifact_sha256"),
    )


def compare(
    old: Sequence[Result],
    new: Sequence[Result],
    bytes_per_token: float | None = None,
    margin_nats: float | None = None,
    margin_bpb: float | None = None,
) -> dict[str, Any]:
    """Welch's test at margin 0, at the record's margin and at margins of the caller's.

    A paired test is added if the seeds match, and whether the gain meets the rules of the field.
    `bytes_per_token` replaces that of the new side's score files.
    """
    _check_sides(old, new)
    if bytes_per_token is None:
        bytes_per_token = mean_bytes_per_token(new)
    elif not 0 < bytes_per_token < math.inf:
        raise BenchError(f"{bytes_per_token} bytes per token; expected a finite number above 0")
    olds, news = [r.bpb for r in old], [r.bpb for r in new]
    tests = [welch(olds, news)]
    if bytes_per_token:
        # The rules leave open whether the margin is per token or per byte: test both.
        per_token, per_byte = nats_to_bpb(MARGIN_NATS, bytes_per_token), nats_to_bpb(MARGIN_NATS, 1)
        tests += [welch(olds, news, m) for m in (per_token, per_byte)]
    extra = _extra_margins(bytes_per_token, margin_nats, margin_bpb)
    tests += [welch(olds, news, margin) for margin in extra]
    pairs = pair_by_seed(old, new)
    if pairs:
        tests.append(paired(*pairs))
    gain = tests[0].gain
    return {
        "old": [vars(r) for r in old],
        "new": [vars(r) for r in new],
        "gain_bpb": gain,
        "gain_nats_per_token": bpb_to_nats(gain, bytes_per_token) if bytes_per_token else None,
        "bytes_per_token": bytes_per_token,
        "tests": [_in_both_units(test, bytes_per_token) for test in tests],
        "paired_by_seed": pairs is not None,
        "seeds_needed_for_this_gain": plan(gain, max(stdev(olds), stdev(news)), 0.01),
        "acceptance": [rule.as_dict() for rule in acceptance(olds, news, bytes_per_token)],
        "notes": _notes(old, new, tests[0]),
    }


def mean_bytes_per_token(results: Sequence[Result]) -> float | None:
    """Bytes per token of those results that know theirs."""
    widths = [r.bytes_per_target for r in results if r.bytes_per_target]
    return fmean(widths) if widths else None


def pair_by_seed(
    old: Sequence[Result], new: Sequence[Result]
) -> tuple[list[float], list[float]] | None:
    """The scores of both sides in the order of seeds, if each seed is there once per side."""
    olds, news = ({r.seed: r.bpb for r in side} for side in (old, new))
    usable = None not in olds and set(olds) == set(news)
    if not usable or not len(olds) == len(old) == len(new) > 1:
        return None
    seeds = sorted(seed for seed in olds if seed is not None)
    return [olds[s] for s in seeds], [news[s] for s in seeds]


def _check_sides(old: Sequence[Result], new: Sequence[Result]) -> None:
    """Refuse sides that a test would answer with a wrong p."""
    for name, side in (("old", old), ("new", new)):
        if len(side) < 2:
            raise BenchError(
                f"the {name} side has {len(side)} result; a test needs 2 runs or more per side"
            )
        methods = sorted({r.method for r in side if r.method})
        if len(methods) > 1:
            raise BenchError(
                f"the {name} side mixes scoring methods ({', '.join(methods)}); give one per side"
            )
        seen: dict[str, str] = {}
        for result in side:
            # A number may be given twice: two runs can have the same score to the digits given.
            if result.num_bytes is None:
                continue
            if (run := result.artifact or result.name) in seen:
                raise BenchError(f"{result.name} is the run of {seen[run]} again; give it once")
            seen[run] = result.name
    for what, values in (
        ("held-out texts", {r.data for r in (*old, *new) if r.data}),
        ("numbers of held-out bytes", {r.num_bytes for r in (*old, *new) if r.num_bytes}),
    ):
        if len(values) > 1:
            named = " and ".join(sorted(f"{value!s:.12}" for value in values))
            raise BenchError(f"scores of different {what} do not compare: {named}")


def _extra_margins(
    bytes_per_token: float | None, margin_nats: float | None, margin_bpb: float | None
) -> list[float]:
    for value in (margin_nats, margin_bpb):
        if value is not None and not 0 <= value < math.inf:
            raise BenchError(f"margin {value}; expected a finite number of 0 or more")
    margins = []
    if margin_nats is not None:
        if not bytes_per_token:
            raise BenchError(
                f"a margin of {margin_nats:g} nats per token needs the tokens of the new side; "
                "give --bytes-per-token or run folders"
            )
        margins.append(nats_to_bpb(margin_nats, bytes_per_token))
    if margin_bpb is not None:
        margins.append(margin_bpb)
    return margins


def _in_both_units(test: GainTest, bytes_per_token: float | None) -> dict[str, Any]:
    nats = bpb_to_nats(test.margin, bytes_per_token) if bytes_per_token else None
    return test.as_dict() | {"margin_nats_per_token": nats}


def _notes(old: Sequence[Result], new: Sequence[Result], test: GainTest) -> list[str]:
    """What a reader must know to weigh the result."""
    notes = []
    methods = [{r.method for r in side if r.method} for side in (old, new)]
    if all(methods) and methods[0] != methods[1]:
        names = " and ".join(next(iter(m)) for m in methods)
        notes.append(f"the sides are scored by different methods ({names})")
    runs = [{r.artifact or r.name: r.name for r in side if r.num_bytes} for side in (old, new)]
    if methods[0] == methods[1]:
        shared = sorted(runs[0][run] for run in runs[0].keys() & runs[1].keys())
        notes += [f"{name} is on both sides, which hides a gain" for name in shared]
    if test.interval.low == test.interval.high:
        notes.append("neither side varies: p says only which mean is lower")
    notes.append("p holds if the seeds were chosen before the runs and no run was left out")
    return notes
