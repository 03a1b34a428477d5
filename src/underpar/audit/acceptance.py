"""R14: when a score counts as better than the record before it. The field has used two rules.

The README of the contest asks for a gain of at least 0.005 nats at p < 0.01. The unit is that of
the validation loss, nats per token; some pull requests read it per byte, so both readings are
judged. The leaderboard updates of parameter-golf PR 1902 and 2146 asked for p < 0.25 without a
margin, each record against the one before it in time. Welch's one-sided test gives p.

Scores are compared in bits per byte. A margin per token is converted with the tokens of the new
side: the old record's tokens do not decide how much a new one must gain.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from statistics import stdev
from typing import Any

from underpar.core.stats import seeds_needed, welch
from underpar.errors import BenchError

MARGIN_NATS = 0.005
README_P, PRACTICE_P = 0.01, 0.25
PER_TOKEN = "README, margin per token"
PER_BYTE = "README, margin per byte"
PRACTICE = "practice, no margin"
# Planned seeds find the gain with this chance.
POWER = 0.8


@dataclass(frozen=True)
class Acceptance:
    """Whether a gain meets one rule. `is_met` is None if the results cannot tell; `why` says why.

    `num_seeds` runs per side would show the gain with a power of 0.8, if the gain and the spread
    are those of these runs; None: no number of seeds would. `num_missing` are still to be run on
    the smaller side.
    """

    rule: str
    margin_bpb: float | None
    needs_p: float
    p: float | None
    is_met: bool | None
    why: str
    num_seeds: int | None
    num_missing: int | None

    def as_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return asdict(self)


def nats_to_bpb(nats_per_token: float, bytes_per_token: float) -> float:
    """A loss or margin in nats per token, in bits per byte."""
    return nats_per_token / (math.log(2) * bytes_per_token)


def bpb_to_nats(bits_per_byte: float, bytes_per_token: float) -> float:
    """A loss or margin in bits per byte, in nats per token."""
    return bits_per_byte * math.log(2) * bytes_per_token


def acceptance(
    old: Sequence[float], new: Sequence[float], bytes_per_token: float | None
) -> list[Acceptance]:
    """Both rules, the first in both readings, for bits per byte of two or more runs per side."""
    per_token = nats_to_bpb(MARGIN_NATS, bytes_per_token) if bytes_per_token else None
    return [
        _judge(PER_TOKEN, old, new, per_token, README_P),
        _judge(PER_BYTE, old, new, nats_to_bpb(MARGIN_NATS, 1.0), README_P),
        _judge(PRACTICE, old, new, 0.0, PRACTICE_P),
    ]


def _judge(
    rule: str, old: Sequence[float], new: Sequence[float], margin: float | None, needs_p: float
) -> Acceptance:
    if margin is None:
        why = "the bytes per token of the new side are not known"
        return Acceptance(rule, None, needs_p, None, None, why, None, None)
    test = welch(old, new, margin)
    num_seeds = plan(test.gain - margin, max(stdev(old), stdev(new)), needs_p)
    num_missing = None if num_seeds is None else max(0, num_seeds - min(len(old), len(new)))
    if test.interval.low == test.interval.high:
        why = "neither side varies, so there is no noise to weigh the gain against"
        return Acceptance(rule, margin, needs_p, test.p, None, why, num_seeds, num_missing)
    is_met = test.p < needs_p
    why = f"p = {test.p:.4f} {'<' if is_met else '>='} {needs_p:g}"
    return Acceptance(rule, margin, needs_p, test.p, is_met, why, num_seeds, num_missing)


def plan(excess: float, sigma: float, alpha: float) -> int | None:
    """Runs per side that show `excess` beyond the margin; None if no number would."""
    if excess <= 0 or sigma <= 0:
        return None
    try:
        return seeds_needed(excess, sigma, alpha, POWER)
    except BenchError:
        # The gain needs more seeds than `seeds_needed` searches.
        return None
