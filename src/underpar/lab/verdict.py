"""The verdict on the timed blocks of a benchmark, by rules that were fixed before it ran.

1. A quad is dropped if one of its blocks has a thermal or hardware throttle flag, or if the mean
   SM clocks of its two halves differ by more than 1 %, if each half has 20 readings.
2. The result is refused if fewer than half of the quads, or fewer than 4, of the measurement or of
   the control are left.
3. It is refused as drifted if the control's 99 % Student interval lies outside of -0.5 % to
   +0.5 %: A then seems to differ from itself.
4. It is refused as unsteady if the control's sigma is over 0.5 % and its variance is larger than
   the measurement's, beyond the 0.1 % point of the F distribution: the two series, although
   interleaved, then ran under different conditions.
5. "faster" and "slower" need three intervals that exclude 0 (95 % bootstrap intervals of mean and
   median, Student interval) and a mean effect above the noise floor, which is the far end of the
   control's bootstrap interval. Everything else is "no difference shown".
6. If several variants are measured, p of a difference is below 0.05 after Holm's correction.

Simulated with 12 quads of Gaussian noise, these rules claim a difference that is not there in 1 to
2 % of runs and refuse 0.2 % of runs. They show a difference of 1 mde in 42 %, of 1.5 mde in 83 %
and of 2 mde in 98 % of runs (mde: minimum detectable effect).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

import numpy as np

from underpar.core import stats
from underpar.errors import BenchError
from underpar.lab.clocks import ClockSample

Series = Literal["measured", "control"]
Verdict = Literal["faster", "slower", "no difference shown", "refused"]

MIN_KEPT_QUADS = 4
CONTROL_TOLERANCE = 0.005
CONTROL_F_LEVEL = 0.001
SM_CLOCK_TOLERANCE = 0.01
# Of each half of a quad: single readings vary by some percent, so the mean of few says nothing.
MIN_READINGS = 20
# Hardware slowdown, software and hardware thermal slowdown, power brake (NVML clocks event
# reasons). The software power cap, 0x4, is recorded but drops no quad: an H200 runs at that cap
# during all matrix products, and an uneven effect of it shows in the clocks.
THROTTLE_MASK = 0x8 | 0x20 | 0x40 | 0x80


@dataclass(frozen=True)
class Block:
    """One timed block; the control's letters both stand for variant A."""

    series: Series
    quad: int
    letter: str
    seconds: float
    clocks: ClockSample | None = None


@dataclass(frozen=True)
class Dropped:
    """A quad that rule 1 dropped, and why."""

    series: Series
    quad: int
    why: str


@dataclass(frozen=True)
class Summary:
    """Effects of the kept quads: natural log of time(B) / time(A), negative where B is faster.

    mean_interval and median_interval are 95 % BCa bootstrap intervals, student and student_99 are
    Student intervals of the mean at 95 % and 99 %. mde is the minimum detectable mean (alpha 0.05
    two-sided, power 0.8), p is two-sided for mean = 0.
    """

    num_quads: int
    mean: float
    median: float
    sigma: float
    mean_interval: stats.Interval
    median_interval: stats.Interval
    student: stats.Interval
    student_99: stats.Interval
    mde: float
    p: float


@dataclass(frozen=True, kw_only=True)
class Judgement:
    """Effects, drops, summaries and verdict; there are no summaries if too few quads are left."""

    effects: tuple[float, ...]
    control_effects: tuple[float, ...]
    dropped: tuple[Dropped, ...]
    measured: Summary | None
    control: Summary | None
    verdict: Verdict
    reason: str
    p_holm: float | None = None
    """p of the measurement, corrected if several variants were measured; None for one variant."""

    @property
    def ratio(self) -> float:
        """Median of time(B) / time(A) over quads; a refused run has none to quote."""
        return math.exp(self._trusted().median)

    @property
    def ratio_interval(self) -> stats.Interval:
        """95 % BCa interval of ratio; a refused run has none to quote."""
        return _exponential(self._trusted().median_interval)

    @property
    def mean_ratio(self) -> float:
        """Geometric mean of time(B) / time(A) over quads; a refused run has none to quote."""
        return math.exp(self._trusted().mean)

    @property
    def mean_ratio_interval(self) -> stats.Interval:
        """95 % BCa interval of mean_ratio; a refused run has none to quote."""
        return _exponential(self._trusted().mean_interval)

    def as_dict(self) -> dict[str, Any]:
        """Plain values for JSON; a refused run has its effects and no ratio."""
        plain = asdict(self)
        if self.verdict == "refused":
            names = ("measured", "ratio", "ratio_interval", "mean_ratio", "mean_ratio_interval")
            return {**plain, **dict.fromkeys(names)}
        plain.update(ratio=self.ratio, mean_ratio=self.mean_ratio)
        plain["ratio_interval"] = asdict(self.ratio_interval)
        plain["mean_ratio_interval"] = asdict(self.mean_ratio_interval)
        return plain

    def _trusted(self) -> Summary:
        if self.verdict == "refused" or self.measured is None:
            raise BenchError(f"this bench has no ratio to quote: {self.reason}")
        return self.measured


def judge(blocks: Sequence[Block]) -> Judgement:
    """Judge blocks in the order of quads: four in a row form a quad of one series."""
    assert len(blocks) % 4 == 0
    dropped: list[Dropped] = []
    effects: dict[Series, list[float]] = {"measured": [], "control": []}
    for start in range(0, len(blocks), 4):
        quad = blocks[start : start + 4]
        series, number = quad[0].series, quad[0].quad
        assert all((block.series, block.quad) == (series, number) for block in quad)
        why = reason_to_drop(quad)
        if why is None:
            effects[series].append(quad_effect(quad))
        else:
            dropped.append(Dropped(series, number, why))
    measured = control = None
    kept, planned = min(map(len, effects.values())), len(blocks) // 8
    if kept < max(MIN_KEPT_QUADS, planned / 2):
        why = dropped[0].why if dropped else "none were dropped"
        reason = f"refused: {kept} of {planned} quads kept, too few to judge; {why}"
        verdict: Verdict = "refused"
    else:
        measured, control = summarize(effects["measured"]), summarize(effects["control"])
        verdict, reason = decide(measured, control)
    return Judgement(
        effects=tuple(effects["measured"]),
        control_effects=tuple(effects["control"]),
        dropped=tuple(dropped),
        measured=measured,
        control=control,
        verdict=verdict,
        reason=reason,
    )


def correct(judgements: Sequence[Judgement]) -> list[Judgement]:
    """Correct the p values of several variants (Holm 1979): a difference needs less than 0.05."""
    measured = [j.measured for j in judgements]
    if len(judgements) == 1 or None in measured:
        return list(judgements)
    values = [summary.p for summary in measured if summary is not None]
    corrected = [0.0] * len(values)
    reached = 0.0
    for place, index in enumerate(sorted(range(len(values)), key=values.__getitem__)):
        reached = max(reached, min(1.0, (len(values) - place) * values[index]))
        corrected[index] = reached
    return [
        replace(judgement, p_holm=p)
        if p < 0.05 or judgement.verdict not in ("faster", "slower")
        else replace(
            judgement,
            p_holm=p,
            verdict="no difference shown",
            reason=f"{judgement.reason}; p is {p:.2g} for {len(values)} variants",
        )
        for judgement, p in zip(judgements, corrected, strict=True)
    ]


def quad_effect(quad: Sequence[Block]) -> float:
    """Natural log of the time of a quad's B blocks over that of its A blocks."""
    seconds = {letter: sum(b.seconds for b in quad if b.letter == letter) for letter in "AB"}
    return math.log(seconds["B"] / seconds["A"])


def reason_to_drop(quad: Sequence[Block]) -> str | None:
    """Why rule 1 drops this quad, or None; without readings a quad is never dropped."""
    flags = 0
    for block in quad:
        flags |= block.clocks.throttle_flags if block.clocks else 0
    if flags & THROTTLE_MASK:
        return f"throttle flags {flags & THROTTLE_MASK:#x}"
    num_readings = [block.clocks.num_readings if block.clocks else 0 for block in quad]
    if min(sum(num_readings[:2]), sum(num_readings[2:])) < MIN_READINGS:
        return None
    clocks = [block.clocks.sm_mhz if block.clocks else None for block in quad]
    known = [clock for clock in clocks if clock]
    if len(known) < 4:
        return None
    first, second = known[0] + known[1], known[2] + known[3]
    if abs(first - second) > SM_CLOCK_TOLERANCE * min(first, second):
        return f"SM clock {first / 2:.0f} MHz in one half, {second / 2:.0f} MHz in the other"
    return None


def summarize(effects: Sequence[float]) -> Summary:
    """Statistics of the effects of one series."""
    mean = float(np.mean(effects))
    sigma = float(np.std(effects, ddof=1))
    towards = math.copysign(1.0, mean)
    one_sided = stats.paired([towards * effect for effect in effects], [0.0] * len(effects)).p
    return Summary(
        num_quads=len(effects),
        mean=mean,
        median=float(np.median(effects)),
        sigma=sigma,
        mean_interval=stats.bootstrap_bca(effects, "mean"),
        median_interval=stats.bootstrap_bca(effects, "median"),
        student=stats.student_interval(effects),
        student_99=stats.student_interval(effects, 0.99),
        mde=stats.minimum_detectable_effect(sigma, len(effects)),
        p=min(1.0, 2 * one_sided),
    )


def decide(measured: Summary, control: Summary) -> tuple[Verdict, str]:
    """Verdict and its one-line reason by rules 3 to 5."""
    reach = control.student_99
    if reach.low > CONTROL_TOLERANCE or reach.high < -CONTROL_TOLERANCE:
        return "refused", (
            f"refused: control drifted, A against A shows {_percent(control.mean)} "
            f"({_percents(reach)} at 99 %), more than {_percent(CONTROL_TOLERANCE)} from 0"
        )
    same_p = stats.variance_p(control.sigma, measured.sigma, control.num_quads, measured.num_quads)
    if control.sigma > CONTROL_TOLERANCE and same_p < CONTROL_F_LEVEL:
        return "refused", (
            f"refused: control unsteady, its sigma is {_percent(control.sigma)} a quad against "
            f"{_percent(measured.sigma)} of the measurement beside it"
        )
    floor = max(abs(control.mean_interval.low), abs(control.mean_interval.high))
    numbers = (
        f"{_percent(measured.mean)} ({_percents(measured.mean_interval)}), "
        f"noise floor {_percent(floor)}, detectable {_percent(measured.mde)}"
    )
    intervals = (measured.mean_interval, measured.median_interval, measured.student)
    if abs(measured.mean) > floor and all(interval.high < 0 for interval in intervals):
        return "faster", numbers
    if abs(measured.mean) > floor and all(interval.low > 0 for interval in intervals):
        return "slower", numbers
    return "no difference shown", numbers


def _exponential(interval: stats.Interval) -> stats.Interval:
    return stats.Interval(math.exp(interval.low), math.exp(interval.high))


def _percent(effect: float) -> str:
    return f"{100 * math.expm1(effect):+.2f} %"


def _percents(interval: stats.Interval) -> str:
    return f"{_percent(interval.low)} .. {_percent(interval.high)}"
