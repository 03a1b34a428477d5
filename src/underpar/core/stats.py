"""Statistics of measurements: intervals, gain tests between sets of runs, power and planning.

Lower is better for every score compared here (BPB, loss), so a gain is mean(old) - mean(new).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from statistics import NormalDist
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from underpar.errors import BenchError

Values = Sequence[float] | NDArray[np.float64]
Statistic = Literal["mean", "median"]
Design = Literal["welch", "pooled", "paired"]

# A spread below this share of the largest value comes from rounding of floats.
_ROUNDING = 1e-12
# Squares and cubes of larger values could overflow.
_LARGEST = 1e75
_MOST_SEEDS = 1_000_000


@dataclass(frozen=True)
class Interval:
    """A confidence interval, in the unit of the values."""

    low: float
    high: float

    def contains(self, value: float) -> bool:
        """Whether value lies in the closed interval."""
        return self.low <= value <= self.high


@dataclass(frozen=True)
class GainTest:
    """A one-sided test of "the gain exceeds the margin", with the two-sided interval of the gain.

    t is infinite if neither side varies; as_dict then writes None.
    """

    test: str
    gain: float
    margin: float
    t: float
    df: float
    p: float
    interval: Interval
    num_old: int
    num_new: int

    def as_dict(self) -> dict[str, Any]:
        """The result as plain JSON values."""
        return {**asdict(self), "t": self.t if math.isfinite(self.t) else None}


@dataclass(frozen=True)
class Difference:
    """How far a treatment is above the base, from so many blocks that have both."""

    value: float
    interval: Interval | None
    num_blocks: int


def bootstrap_bca(
    values: Values,
    statistic: Statistic = "mean",
    resamples: int = 10_000,
    confidence: float = 0.95,
    seed: int = 0,
) -> Interval:
    """Bias-corrected and accelerated bootstrap interval (Efron 1987) of the mean or the median.

    Equal values give the interval of width zero at that value. For few values the interval is
    too narrow (12 normal ones: it holds the mean 90 % of the time, not 95 %), so a claim needs
    student_interval as well.
    """
    sample = np.sort(_checked(values, "values"))
    _check_share(confidence, "confidence")
    if statistic not in ("mean", "median"):
        raise BenchError(f"statistic {statistic!r} is unknown; use 'mean' or 'median'")
    if not 100 <= resamples <= 10_000_000:
        raise BenchError(f"resamples {resamples} is out of range; use 100 to 10,000,000")
    if sample[0] == sample[-1]:
        return Interval(float(sample[0]), float(sample[0]))
    estimates = _resample(sample, statistic, resamples, seed)
    estimate = float(np.mean(sample) if statistic == "mean" else np.median(sample))
    # Ties with the estimate, which are common for a median, count half on either side.
    below = np.mean(estimates < estimate) + 0.5 * np.mean(estimates == estimate)
    normal = NormalDist()
    bias = normal.inv_cdf(float(np.clip(below, 0.5 / resamples, 1 - 0.5 / resamples)))
    acceleration = _acceleration(sample, statistic)
    quantiles = []
    for tail in ((1 - confidence) / 2, (1 + confidence) / 2):
        shift = bias + normal.inv_cdf(tail)
        stretch = 1 - acceleration * shift
        # Beyond its pole, the correction points past the end of the bootstrap distribution.
        level = normal.cdf(bias + shift / stretch) if stretch > 0 else float(shift > 0)
        quantiles.append(float(np.quantile(estimates, level)))
    return Interval(quantiles[0], quantiles[1])


def student_interval(values: Values, confidence: float = 0.95) -> Interval:
    """Two-sided Student t interval of the mean, n - 1 degrees of freedom."""
    sample = _checked(values, "values")
    _check_share(confidence, "confidence")
    mean, variance = _moments(sample, float(np.max(np.abs(sample))))
    return _t_interval(mean, math.sqrt(variance / len(sample)), len(sample) - 1, confidence)


def minimum_detectable_effect(
    sigma: float, n: int, alpha: float = 0.05, power: float = 0.8
) -> float:
    """Smallest mean a two-sided test finds with this power, in the unit of sigma.

    2.80 sigma / sqrt(n) at the defaults from n = 12 on; t quantiles in place of normal ones below.
    """
    _check_plan(sigma, n)
    _check_share(alpha, "alpha")
    _check_share(power, "power")
    if n >= 12:
        normal = NormalDist()
        factor = normal.inv_cdf(1 - alpha / 2) + normal.inv_cdf(power)
    else:
        student = _scipy_stats().t
        factor = float(student.ppf(1 - alpha / 2, n - 1) + student.ppf(power, n - 1))
    return factor * sigma / math.sqrt(n)


def welch(old: Values, new: Values, margin: float = 0.0, confidence: float = 0.95) -> GainTest:
    """One-sided Welch test that mean(old) - mean(new) exceeds margin, for independent runs.

    If neither side varies there is no noise to weigh the gain against: p is 0 above the margin,
    1 below it and 0.5 on it, t is infinite or 0, and the interval has width zero.
    """
    olds, news = _checked(old, "old"), _checked(new, "new")
    scale = float(max(np.max(np.abs(olds)), np.max(np.abs(news))))
    mean_old, variance_old = _moments(olds, scale)
    mean_new, variance_new = _moments(news, scale)
    error_old, error_new = variance_old / len(olds), variance_new / len(news)
    total = error_old + error_new
    # Welch-Satterthwaite in shares of the total: squares of tiny variances would underflow.
    share = error_old / total if total > 0 else 0.5
    df = 1 / (share**2 / (len(olds) - 1) + (1 - share) ** 2 / (len(news) - 1))
    gain, error = mean_old - mean_new, math.sqrt(total)
    t, p = _one_sided(gain - margin, error, df, scale)
    interval = _t_interval(gain, error, df, confidence)
    return GainTest("welch", gain, margin, t, df, p, interval, len(olds), len(news))


def paired(old: Values, new: Values, margin: float = 0.0, confidence: float = 0.95) -> GainTest:
    """One-sided paired t test that mean(old - new) exceeds margin; same seeds in the same order.

    If all differences are equal, p is 0 above the margin, 1 below it and 0.5 on it, as in welch.
    """
    olds, news = _checked(old, "old"), _checked(new, "new")
    if len(olds) != len(news):
        raise BenchError(
            f"a paired test needs the same seeds on both sides, got {len(olds)} old and "
            f"{len(news)} new values; use welch for unpaired runs"
        )
    num, scale = len(olds), float(max(np.max(np.abs(olds)), np.max(np.abs(news))))
    gain, variance = _moments(olds - news, scale)
    error = math.sqrt(variance / num)
    t, p = _one_sided(gain - margin, error, num - 1, scale)
    interval = _t_interval(gain, error, num - 1, confidence)
    return GainTest("paired", gain, margin, t, float(num - 1), p, interval, num, num)


def block_differences(
    values: Mapping[tuple[str, int], float], base: str, confidence: float = 0.95
) -> dict[str, Difference]:
    """What each treatment adds to `base`, from values of (treatment, block): (recipe, seed).

    A value is the sum of a treatment, a block and noise of one spread for all: the randomized block
    design (Fisher 1935). With two treatments it is the paired test. More treatments share their
    noise, so few blocks are enough, and a treatment may lack blocks. Blocks without `base` are left
    out. There is no interval while nothing tells the noise.
    """
    blocks = sorted({block for treatment, block in values if treatment == base})
    cells = [cell for cell in values if cell[1] in blocks]
    others = sorted({treatment for treatment, _ in cells} - {base})
    if not others:
        return {}
    design = np.zeros((len(cells), len(others) + len(blocks)))
    for row, (treatment, block) in enumerate(cells):
        if treatment != base:
            design[row, others.index(treatment)] = 1.0
        design[row, len(others) + blocks.index(block)] = 1.0
    sample = np.array([values[cell] for cell in cells])
    if not np.all(np.abs(sample) <= _LARGEST):
        raise BenchError("a value is not finite")
    # Every treatment shares a block with the base, so the columns are independent.
    inverse = np.linalg.inv(design.T @ design)
    effects = inverse @ design.T @ sample
    residual, df = sample - design @ effects, len(cells) - design.shape[1]
    spread = float(np.sqrt(residual @ residual / df)) if df else math.nan
    if spread <= _ROUNDING * float(np.max(np.abs(sample))):
        spread = 0.0
    differences = {}
    for index, treatment in enumerate(others):
        effect, error = float(effects[index]), spread * math.sqrt(inverse[index, index])
        interval = _t_interval(effect, error, df, confidence) if df else None
        num = sum(cell[0] == treatment for cell in cells)
        differences[treatment] = Difference(effect, interval, num)
    return differences


def power(
    gain: float, sigma: float, n: int, alpha: float = 0.01, design: Design = "welch"
) -> float:
    """Chance that the one-sided test rejects at alpha when the true gain beyond the margin is gain.

    welch and pooled: n runs a side, sigma the seed standard deviation of both sides. paired: n
    pairs, sigma the standard deviation of a pair's difference. welch is the power of the test
    this module runs; pooled is the usual planning figure with 2n - 2 degrees of freedom, which
    promises too much for few runs (0.80 where welch has 0.64 at n = 3).
    """
    _check_plan(sigma, n)
    _check_share(alpha, "alpha")
    if not math.isfinite(gain) or sigma <= 0:
        raise BenchError(f"power needs a finite gain and sigma > 0, got {gain} and {sigma}")
    return _power(gain / sigma, n, alpha, design)


def seeds_needed(
    gain: float,
    sigma: float,
    alpha: float = 0.01,
    power: float = 0.8,
    design: Design = "welch",
) -> int:
    """Fewest runs a side (pairs, for paired) with which the test finds gain with this power."""
    _check_plan(sigma, 2)
    _check_share(alpha, "alpha")
    _check_share(power, "power")
    if not 0 < gain < math.inf or sigma <= 0:
        raise BenchError(f"planning needs a finite gain > 0 and sigma > 0, got {gain} and {sigma}")
    ratio = gain / sigma
    high = 2
    while _power(ratio, high, alpha, design) < power:
        if high >= _MOST_SEEDS:
            raise BenchError(f"gain {gain} at sigma {sigma} needs over {_MOST_SEEDS} seeds")
        high *= 2
    low = high // 2
    while high - low > 1:
        middle = (low + high) // 2
        if _power(ratio, middle, alpha, design) < power:
            low = middle
        else:
            high = middle
    return high


def variance_p(sigma_a: float, sigma_b: float, num_a: int, num_b: int) -> float:
    """One-sided F test that a varies more than b, from sample standard deviations; 1 if neither."""
    _check_plan(sigma_a, num_a)
    _check_plan(sigma_b, num_b)
    if sigma_b == 0:
        return 0.0 if sigma_a > 0 else 1.0
    return float(_scipy_stats().f.sf((sigma_a / sigma_b) ** 2, num_a - 1, num_b - 1))


@cache
def variance_limit(p: float, num_a: int, num_b: int) -> float:
    """The ratio of two mean squares, of so many numbers each, that noise passes with p."""
    return float(_scipy_stats().f.isf(p, num_a, num_b))


def _checked(values: Values, name: str) -> NDArray[np.float64]:
    array = np.asarray(values, dtype=np.float64)
    if array.ndim != 1 or len(array) < 2:
        raise BenchError(f"{name} has shape {array.shape}; at least 2 values in a row are needed")
    if not np.all(np.abs(array) <= _LARGEST):
        raise BenchError(f"{name} holds a value that is not finite or beyond {_LARGEST:g}")
    return array


def _check_share(value: float, name: str) -> None:
    if not 0 < value < 1:
        raise BenchError(f"{name} {value} is out of range; it must lie between 0 and 1")


def _check_plan(sigma: float, n: int) -> None:
    if not 0 <= sigma < math.inf:
        raise BenchError(f"sigma {sigma} is not a finite standard deviation >= 0")
    if n < 2:
        raise BenchError(f"n is {n}; at least 2 measurements are needed")


def _scipy_stats() -> Any:
    try:
        from scipy import stats
    except ImportError as error:
        raise BenchError("scipy is missing: pip install 'underpar[stats]'") from error
    return stats


def _moments(sample: NDArray[np.float64], scale: float) -> tuple[float, float]:
    if np.ptp(sample) <= _ROUNDING * scale:
        return float(sample[0]), 0.0
    return float(np.mean(sample)), float(np.var(sample, ddof=1))


def _one_sided(excess: float, error: float, df: float, scale: float) -> tuple[float, float]:
    if error > 0:
        t = excess / error
        return t, float(_scipy_stats().t.sf(t, df))
    if abs(excess) <= _ROUNDING * scale:
        return 0.0, 0.5
    return math.copysign(math.inf, excess), 0.0 if excess > 0 else 1.0


def _t_interval(mean: float, error: float, df: float, confidence: float) -> Interval:
    _check_share(confidence, "confidence")
    reach = float(_scipy_stats().t.ppf((1 + confidence) / 2, df)) * error
    return Interval(mean - reach, mean + reach)


def _power(ratio: float, n: int, alpha: float, design: Design) -> float:
    stats = _scipy_stats()
    if design == "paired":
        df, center, critical = n - 1, ratio * math.sqrt(n), stats.t.isf(alpha, n - 1)
    elif design == "pooled":
        df, center, critical = 2 * n - 2, ratio * math.sqrt(n / 2), stats.t.isf(alpha, 2 * n - 2)
    elif design == "welch":
        # With equal sizes and variances t is the pooled t and independent of the share that one
        # side has in the total variance, which is Beta distributed and alone sets Welch's df.
        levels = (np.arange(256) + 0.5) / 256
        share = stats.beta.ppf(levels, (n - 1) / 2, (n - 1) / 2)
        critical = stats.t.isf(alpha, (n - 1) / (share**2 + (1 - share) ** 2))
        df, center = 2 * n - 2, ratio * math.sqrt(n / 2)
    else:
        raise BenchError(f"design {design!r} is unknown; use 'welch', 'pooled' or 'paired'")
    return float(np.mean(stats.nct.sf(critical, df, center)))


def _resample(
    sample: NDArray[np.float64], statistic: Statistic, resamples: int, seed: int
) -> NDArray[np.float64]:
    rng = np.random.default_rng(seed)
    estimates = np.empty(resamples)
    # Slices limit the memory for a large sample.
    step = max(1, 2_000_000 // len(sample))
    for start in range(0, resamples, step):
        rows = min(step, resamples - start)
        drawn = sample[rng.integers(0, len(sample), (rows, len(sample)))]  # (rows, n)
        mean = statistic == "mean"
        estimates[start : start + rows] = drawn.mean(1) if mean else np.median(drawn, axis=1)
    return estimates


def _acceleration(ordered: NDArray[np.float64], statistic: Statistic) -> float:
    num = len(ordered)
    index = np.arange(num)
    if statistic == "mean":
        left_out = (ordered.sum() - ordered) / (num - 1)
    else:
        middles = [np.where(index <= k, ordered[k + 1], ordered[k]) for k in _middle(num - 1)]
        left_out = (middles[0] + middles[1]) / 2
    pull = left_out.mean() - left_out
    largest = float(np.max(np.abs(pull)))
    if largest == 0:
        return 0.0
    # Scaled to 1, which changes nothing: cubes of tiny values would underflow.
    pull /= largest
    return float(np.sum(pull**3) / (6 * np.sum(pull**2) ** 1.5))


def _middle(num: int) -> tuple[int, int]:
    return (num - 1) // 2, num // 2
