"""Intervals, gain tests, power and Holm against scipy, published seeds and simulation."""

import json
import math
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats as reference

from underpar.core import stats
from underpar.core.stats import Interval
from underpar.errors import BenchError

# Final BPB by seed of public records; openai/parameter-golf PR 2014, 2135, 1953, 1855.
PR2014 = [1.05740567, 1.05730104, 1.05807084]
PR2135 = [1.05610947, 1.05662016, 1.05679341]
PR1953 = [1.05825, 1.05846, 1.05895]
PR1855 = [1.05989, 1.06125, 1.06209]
# 0.005 nats a token in BPB at the bytes per token of these records.
MARGIN = 0.002285

scores = st.lists(st.floats(-100, 100), min_size=2, max_size=12)
spread_scores = scores.filter(lambda values: max(values) - min(values) > 1e-3)


@pytest.mark.parametrize(
    ("old", "new", "gain", "p", "p_margin"),
    [
        (PR2014, PR2135, 0.00108, 0.0138, 0.99),
        (PR1953, PR2014, 0.00096, 0.0202, 0.99),
        (PR1855, PR2014, 0.00348, 0.0106, 0.096),
        (PR1855, PR2135, 0.00457, 0.0063, 0.029),
    ],
)
def test_welch_gives_the_worked_values(
    old: list[float], new: list[float], gain: float, p: float, p_margin: float
) -> None:
    plain, with_margin = stats.welch(old, new), stats.welch(old, new, MARGIN)
    assert plain.gain == pytest.approx(gain, abs=1e-5)
    # The two older records are published with five decimals only.
    assert plain.p == pytest.approx(p, abs=2e-4)
    assert with_margin.p == pytest.approx(p_margin, rel=0.025)
    assert with_margin.gain == plain.gain and with_margin.interval == plain.interval


@given(spread_scores, spread_scores)
@settings(deadline=None, max_examples=60)
def test_welch_agrees_with_scipy(old: list[float], new: list[float]) -> None:
    ours = stats.welch(old, new)
    theirs = reference.ttest_ind(old, new, equal_var=False, alternative="greater")
    both = reference.ttest_ind(old, new, equal_var=False).confidence_interval(0.95)
    assert ours.t == pytest.approx(theirs.statistic, rel=1e-6, abs=1e-9)
    assert ours.df == pytest.approx(theirs.df, rel=1e-6)
    assert ours.p == pytest.approx(theirs.pvalue, rel=1e-6, abs=1e-12)
    assert ours.interval.low == pytest.approx(both.low, rel=1e-6, abs=1e-8)
    assert ours.interval.high == pytest.approx(both.high, rel=1e-6, abs=1e-8)


@given(st.lists(st.tuples(st.floats(-9, 9), st.floats(-9, 9)), min_size=2, max_size=12))
@settings(deadline=None, max_examples=60)
def test_paired_agrees_with_scipy(pairs: list[tuple[float, float]]) -> None:
    old, new = [a for a, _ in pairs], [b for _, b in pairs]
    if np.ptp(np.subtract(old, new)) < 1e-3:
        return
    ours = stats.paired(old, new, margin=0.25)
    theirs = reference.ttest_rel(np.subtract(old, 0.25), new, alternative="greater")
    both = reference.ttest_rel(old, new).confidence_interval(0.95)
    assert ours.t == pytest.approx(theirs.statistic, rel=1e-6, abs=1e-9)
    assert ours.p == pytest.approx(theirs.pvalue, rel=1e-6, abs=1e-12)
    assert ours.interval.low == pytest.approx(both.low, rel=1e-6, abs=1e-8)
    assert ours.gain == pytest.approx(np.mean(old) - np.mean(new), abs=1e-12)


def test_pairing_finds_what_seed_noise_hides() -> None:
    seeds = np.array([0.0, 0.01, -0.02, 0.03, -0.01])
    old, new = 1.06 + seeds, 1.06 + seeds - 0.001 - 0.0001 * np.arange(5)
    assert stats.paired(old, new).p < 0.01 < 0.3 < stats.welch(old, new).p


@pytest.mark.parametrize("test", [stats.welch, stats.paired])
@pytest.mark.parametrize(
    ("gain", "t", "p"), [(0.3, math.inf, 0.0), (-0.3, -math.inf, 1.0), (0.1, 0.0, 0.5)]
)
def test_runs_without_spread_are_decided_by_sign(
    test: Callable[..., stats.GainTest], gain: float, t: float, p: float
) -> None:
    result = test([0.7 + gain] * 3, [0.7] * 3, margin=0.1)
    assert (result.t, result.p) == (t, p)
    assert result.interval == Interval(result.gain, result.gain)
    assert result.gain == pytest.approx(gain)
    json.dumps(result.as_dict(), allow_nan=False)


def test_welch_with_one_constant_side_keeps_the_other_sides_degrees() -> None:
    result = stats.welch([1.0, 1.2, 1.1, 1.3], [0.9, 0.9])
    assert result.df == pytest.approx(3)
    assert 0 < result.p < 0.05


def test_gain_test_is_plain_data() -> None:
    plain = stats.welch(PR2014, PR2135).as_dict()
    assert json.loads(json.dumps(plain, allow_nan=False)) == plain
    assert plain["interval"].keys() == {"low", "high"} and plain["num_old"] == 3


@given(scores, st.sampled_from(["mean", "median"]), st.floats(0.5, 0.999))
@settings(deadline=None, max_examples=60)
def test_bootstrap_stays_inside_the_sample(
    values: list[float], statistic: stats.Statistic, confidence: float
) -> None:
    interval = stats.bootstrap_bca(values, statistic, resamples=200, confidence=confidence)
    slack = 1e-9 * max(abs(value) for value in values)
    assert min(values) - slack <= interval.low <= interval.high <= max(values) + slack


@pytest.mark.parametrize("statistic", ["mean", "median"])
@pytest.mark.parametrize("skew", [0.1, 1.0])
def test_bootstrap_agrees_with_scipy(statistic: stats.Statistic, skew: float) -> None:
    values = np.random.default_rng(5).lognormal(0, skew, 41)
    ours = stats.bootstrap_bca(values, statistic)
    theirs = reference.bootstrap(
        (values,),
        {"mean": np.mean, "median": np.median}[statistic],
        n_resamples=10_000,
        method="BCa",
        rng=np.random.default_rng(1),
    ).confidence_interval
    width = theirs.high - theirs.low
    assert ours.low == pytest.approx(theirs.low, abs=0.05 * width)
    assert ours.high == pytest.approx(theirs.high, abs=0.05 * width)


def test_bootstrap_is_repeatable_and_ignores_order() -> None:
    values = [0.3, 0.1, 0.4, 0.15, 0.9, 0.26]
    assert stats.bootstrap_bca(values) == stats.bootstrap_bca(values[::-1])
    assert stats.bootstrap_bca(values) != stats.bootstrap_bca(values, seed=1)


def test_bootstrap_does_not_care_for_the_size_of_a_slice() -> None:
    values = np.random.default_rng(0).normal(size=40_000)
    interval = stats.bootstrap_bca(values, resamples=200)
    half = 1.96 * values.std() / math.sqrt(len(values))
    assert interval.high - interval.low == pytest.approx(2 * half, rel=0.2)


@pytest.mark.parametrize("value", [0.0, 0.1, -3e-120])
def test_equal_values_give_intervals_of_no_width(value: float) -> None:
    for statistic in ("mean", "median"):
        assert stats.bootstrap_bca([value] * 3, statistic) == Interval(value, value)
    assert stats.student_interval([value] * 3) == Interval(value, value)


def test_bootstrap_of_tiny_values_is_the_scaled_one() -> None:
    large = stats.bootstrap_bca([1.0, 2.0, 4.0, 7.0])
    small = stats.bootstrap_bca([1e-120, 2e-120, 4e-120, 7e-120])
    assert small.low == pytest.approx(large.low * 1e-120)
    assert small.high == pytest.approx(large.high * 1e-120)


def test_coverage_of_both_intervals_on_skewed_samples() -> None:
    rng = np.random.default_rng(7)
    hits = {"bootstrap": 0, "student": 0}
    trials = 300
    for trial in range(trials):
        values = rng.exponential(1.0, 30)
        bootstrap = stats.bootstrap_bca(values, resamples=600, seed=trial)
        hits["bootstrap"] += bootstrap.contains(1.0)
        hits["student"] += stats.student_interval(values).contains(1.0)
    # Nominal 95 %; 30 skewed values cost either some of it, and the trial count +-2.5 %.
    assert 0.89 <= hits["bootstrap"] / trials <= 0.985
    assert 0.88 <= hits["student"] / trials <= 0.985


@given(spread_scores)
@settings(deadline=None, max_examples=40)
def test_student_interval_agrees_with_scipy(values: list[float]) -> None:
    ours = stats.student_interval(values, 0.9)
    theirs = reference.ttest_1samp(values, 0).confidence_interval(0.9)
    assert ours.low == pytest.approx(theirs.low, rel=1e-6, abs=1e-8)
    assert ours.high == pytest.approx(theirs.high, rel=1e-6, abs=1e-8)


def test_minimum_detectable_effect_follows_the_law() -> None:
    assert stats.minimum_detectable_effect(0.003, 12) == pytest.approx(0.0024, abs=5e-5)
    assert stats.minimum_detectable_effect(0.003, 32) == pytest.approx(0.0015, abs=5e-5)
    law = stats.minimum_detectable_effect(1.0, 100)
    assert law == pytest.approx(0.28, abs=2e-4)
    quantiles = reference.t.ppf(0.975, 7) + reference.t.ppf(0.8, 7)
    assert stats.minimum_detectable_effect(1.0, 8) == pytest.approx(quantiles / math.sqrt(8))
    assert stats.minimum_detectable_effect(0.0, 8) == 0


def test_pooled_power_gives_the_planning_figures() -> None:
    # 80 % power at about 0.0016 for three runs a side and 0.0010 for five, sigma 0.0004.
    assert stats.power(0.0016, 0.0004, 3, design="pooled") == pytest.approx(0.80, abs=0.03)
    assert stats.power(0.0010, 0.0004, 5, design="pooled") == pytest.approx(0.80, abs=0.03)
    # The expected t meets the critical 3.75 and 2.90 at 0.0012 and 0.0007: a coin toss.
    assert stats.power(0.0012, 0.0004, 3, design="pooled") == pytest.approx(0.5, abs=0.06)
    assert stats.power(0.0007, 0.0004, 5, design="pooled") == pytest.approx(0.5, abs=0.06)


@pytest.mark.parametrize(("gain", "num"), [(4.0, 3), (2.5, 5), (0.0, 4), (3.0, 2)])
def test_welch_power_agrees_with_simulation(gain: float, num: int) -> None:
    rng = np.random.default_rng(11)
    old, new = rng.normal(gain, 1, (40_000, num)), rng.normal(0, 1, (40_000, num))
    test = reference.ttest_ind(old, new, axis=1, equal_var=False, alternative="greater")
    assert stats.power(gain, 1.0, num) == pytest.approx(np.mean(test.pvalue < 0.01), abs=0.01)


def test_paired_power_agrees_with_simulation() -> None:
    rng = np.random.default_rng(12)
    test = reference.ttest_1samp(rng.normal(1.5, 1, (40_000, 6)), 0, axis=1, alternative="greater")
    simulated = np.mean(test.pvalue < 0.05)
    assert stats.power(1.5, 1.0, 6, 0.05, "paired") == pytest.approx(simulated, abs=0.01)


@given(
    st.floats(0.05, 20),
    st.sampled_from(["welch", "pooled", "paired"]),
    st.sampled_from([0.01, 0.05]),
)
@settings(deadline=None, max_examples=30)
def test_seeds_needed_is_the_smallest_number(
    gain: float, design: stats.Design, alpha: float
) -> None:
    num = stats.seeds_needed(gain, 1.0, alpha, design=design)
    assert stats.power(gain, 1.0, num, alpha, design) >= 0.8
    assert num == 2 or stats.power(gain, 1.0, num - 1, alpha, design) < 0.8


def test_seeds_needed_for_known_gains() -> None:
    assert stats.seeds_needed(0.0016, 0.0004, design="pooled") == 3
    assert stats.seeds_needed(0.0016, 0.0004) == 4
    normal = 2 * ((reference.norm.isf(0.01) + reference.norm.isf(0.2)) / 0.02) ** 2
    assert stats.seeds_needed(0.02, 1.0) == pytest.approx(normal, rel=0.01)


def test_variance_p_agrees_with_simulation_and_knows_zero() -> None:
    assert stats.variance_p(2.0, 1.0, 12, 10) == pytest.approx(reference.f.sf(4.0, 11, 9))
    assert stats.variance_p(1.0, 0.0, 5, 5) == 0 and stats.variance_p(0.0, 0.0, 5, 5) == 1


@pytest.mark.parametrize("bad", [[], [1.0], [1.0, math.nan], [1.0, math.inf], [1.0, 1e300]])
def test_samples_that_cannot_be_used_are_refused(bad: list[float]) -> None:
    for attempt in (
        lambda: stats.bootstrap_bca(bad),
        lambda: stats.student_interval(bad),
        lambda: stats.welch([1.0, 2.0], bad),
        lambda: stats.welch(bad, [1.0, 2.0]),
        lambda: stats.paired(bad, bad),
    ):
        with pytest.raises(BenchError):
            attempt()


def test_settings_that_cannot_be_used_are_refused() -> None:
    good = [1.0, 2.0, 3.0]
    for attempt, word in (
        (lambda: stats.paired(good, good[:2]), "3 old and 2 new"),
        (lambda: stats.bootstrap_bca(good, "mode"), "mode"),  # type: ignore[arg-type]
        (lambda: stats.bootstrap_bca(good, resamples=10), "resamples"),
        (lambda: stats.bootstrap_bca(good, confidence=95), "confidence"),
        (lambda: stats.student_interval(good, 1.0), "confidence"),
        (lambda: stats.welch(good, good, confidence=0.0), "confidence"),
        (lambda: stats.minimum_detectable_effect(-1.0, 12), "sigma"),
        (lambda: stats.minimum_detectable_effect(1.0, 1), "at least 2"),
        (lambda: stats.minimum_detectable_effect(1.0, 12, alpha=0), "alpha"),
        (lambda: stats.power(1.0, 0.0, 3), "sigma > 0"),
        (lambda: stats.power(math.nan, 1.0, 3), "finite gain"),
        (lambda: stats.power(1.0, 1.0, 3, design="z"), "design"),  # type: ignore[arg-type]
        (lambda: stats.seeds_needed(0.0, 1.0), "gain > 0"),
        (lambda: stats.seeds_needed(1e-5, 1.0), "seeds"),
    ):
        with pytest.raises(BenchError, match=word) as caught:
            attempt()
        assert "\n" not in str(caught.value)


@given(spread_scores, st.integers(0, 2**31))
@settings(deadline=None, max_examples=40)
def test_two_treatments_in_blocks_are_a_paired_test(old: list[float], seed: int) -> None:
    new = list(np.array(old) + np.random.default_rng(seed).random(len(old)))
    values = {("old", block): value for block, value in enumerate(old)}
    values |= {("new", block): value for block, value in enumerate(new)}
    (found,) = stats.block_differences(values, "old").values()
    expected = stats.paired(new, old)
    assert found.num_blocks == len(old)
    assert found.value == pytest.approx(expected.gain, abs=1e-9)
    assert found.interval is not None
    assert found.interval.low == pytest.approx(expected.interval.low, abs=1e-8)
    assert found.interval.high == pytest.approx(expected.interval.high, abs=1e-8)


def test_treatments_share_their_noise_and_the_luck_of_a_block_cancels() -> None:
    rng = np.random.default_rng(0)
    gains = {"base": 0.0, **{f"t{i}": 0.01 * i for i in range(1, 9)}}
    luck, num_inside, num = rng.normal(0, 50, 3), 0, 0
    widths: dict[str, list[float]] = {"alone": [], "together": []}
    for _ in range(100):
        values = {
            (name, block): 1 + gain + luck[block] + rng.normal(0, 0.01)
            for name, gain in gains.items()
            for block in range(3)
        }
        found = stats.block_differences(values, "base")
        for name, difference in found.items():
            assert difference.interval is not None
            num_inside += difference.interval.contains(gains[name])
            num += 1
        pair = {cell: value for cell, value in values.items() if cell[0] in ("base", "t1")}
        for key, rows in (("alone", stats.block_differences(pair, "base")), ("together", found)):
            interval = rows["t1"].interval
            assert interval is not None
            widths[key].append(interval.high - interval.low)
    # 95 % of 800; rows of one draw share the base, so the count varies more than a binomial one.
    assert 0.91 < num_inside / num < 0.985
    # Two degrees of freedom for a row alone, sixteen for all together.
    assert np.mean(widths["together"]) < 0.6 * np.mean(widths["alone"])


def test_blocks_may_be_missing() -> None:
    values = {("a", 1): 1.0, ("a", 2): 2.0, ("b", 1): 1.5, ("b", 2): 2.5, ("c", 2): 2.25}
    found = stats.block_differences(values, "a")
    assert found["b"].value == pytest.approx(0.5) and found["c"].value == pytest.approx(0.25)
    assert (found["b"].num_blocks, found["c"].num_blocks) == (2, 1)
    assert found["c"].interval == Interval(found["c"].value, found["c"].value)
    # A block without the base says nothing about it.
    assert stats.block_differences({("a", 1): 1.0, ("b", 2): 2.0}, "a") == {}
    (single,) = stats.block_differences({("a", 1): 1.0, ("b", 1): 2.0}, "a").values()
    assert single.value == pytest.approx(1.0) and single.interval is None
    with pytest.raises(BenchError, match="not finite"):
        stats.block_differences({("a", 1): 1.0, ("b", 1): math.nan}, "a")
