"""Compare the scores of two sets of runs: the gain, its interval, its p values."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from underpar.core.run_folder import RunFolder
from underpar.errors import BenchError
from underpar.lab.stats import paired, seeds_needed, welch

# Parameter Golf accepts a record if it is better by this margin, in nats per token (rules R14).
RECORD_MARGIN_NATS = 0.005
LN_2 = 0.6931471805599453


@dataclass(frozen=True)
class Result:
    """The score of one run: bits per byte, seed of the training, bytes per target."""

    name: str
    bpb: float
    seed: int | None = None
    bytes_per_target: float | None = None
    data: str | None = None


def read_result(text: str, method: str) -> Result:
    """The score in a run folder, in a score file, or given as a number of bits per byte."""
    try:
        return Result(text, float(text))
    except ValueError:
        pass
    path = Path(text)
    if not path.exists():
        raise BenchError(f"{text!r} is neither a number, a run folder nor a score file")
    folder = RunFolder(path if path.is_dir() else path.parent)
    tree = folder.read_json(folder.score_file(method) if path.is_dir() else path)
    seed = folder.read_recipe().train.seed if folder.recipe_file.exists() else None
    try:
        width = tree["bytes"] / tree["targets"]
        return Result(text, float(tree["bpb"]), seed, width, tree.get("data_identity"))
    except (KeyError, TypeError, ZeroDivisionError) as error:
        raise BenchError(f"{text} is not a score file ({error!r})") from error


def compare(old: Sequence[Result], new: Sequence[Result]) -> dict[str, Any]:
    """Welch's test at margin 0 and at the record's margin; a paired test if the seeds match."""
    if len({r.data for r in (*old, *new) if r.data}) > 1:
        raise BenchError("these scores are of different held-out texts and do not compare")
    olds, news = [r.bpb for r in old], [r.bpb for r in new]
    tests = [welch(olds, news)]
    per_token = record_margin_bpb(new)
    if per_token is not None:
        # The rules leave open whether the margin is per token or per byte: test both.
        tests += [welch(olds, news, m) for m in (per_token, RECORD_MARGIN_NATS / LN_2)]
    pairs = pair_by_seed(old, new)
    if pairs:
        tests.append(paired(*pairs))
    gain = tests[0].gain
    return {
        "old": [vars(r) for r in old],
        "new": [vars(r) for r in new],
        "gain_bpb": gain,
        "tests": [t.as_dict() for t in tests],
        "paired_by_seed": pairs is not None,
        "seeds_needed_for_this_gain": _plan(gain, max(_deviation(olds), _deviation(news))),
    }


def record_margin_bpb(new: Sequence[Result]) -> float | None:
    """The record's margin in bits per byte, for the tokens of the new runs."""
    widths = [r.bytes_per_target for r in new if r.bytes_per_target]
    return RECORD_MARGIN_NATS / LN_2 * len(widths) / sum(widths) if widths else None


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


def _plan(gain: float, sigma: float) -> int | None:
    if gain <= 0 or sigma <= 0:
        return None
    try:
        return seeds_needed(gain, sigma)
    except BenchError:
        # The gain needs more seeds than `seeds_needed` searches.
        return None


def _deviation(values: Sequence[float]) -> float:
    mean = sum(values) / len(values)
    return float((sum((v - mean) ** 2 for v in values) / max(len(values) - 1, 1)) ** 0.5)
