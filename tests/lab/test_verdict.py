"""The rules by which timed blocks are dropped, refused or believed."""

import json
import math
from collections.abc import Callable

import numpy as np
import pytest

from underpar.errors import BenchError
from underpar.lab.clocks import ClockSample
from underpar.lab.verdict import (
    Block,
    Judgement,
    Series,
    correct,
    judge,
    quad_effect,
    reason_to_drop,
    summarize,
)

Clocks = Callable[[Series, int, int], ClockSample | None]


def no_clocks(series: Series, quad: int, position: int) -> ClockSample | None:
    return None


def reading(sm_mhz: float | None = 1500.0, flags: int = 0) -> ClockSample:
    return ClockSample(10, sm_mhz, 3201.0, 690.0, 55.0, flags)


def make_blocks(
    effects: list[float], control: list[float], clocks: Clocks = no_clocks
) -> list[Block]:
    blocks = []
    series: Series
    for quad, pair in enumerate(zip(effects, control, strict=True)):
        for series, effect in (("measured", pair[0]), ("control", pair[1])):
            for position, letter in enumerate("ABBA" if quad % 2 == 0 else "BAAB"):
                seconds = 2.0 * (math.exp(effect) if letter == "B" else 1.0)
                sample = clocks(series, quad, position)
                blocks.append(Block(series, quad, letter, seconds, sample))
    return blocks


def noise(sigma: float, seed: int, num: int = 12, mean: float = 0.0) -> list[float]:
    values = np.random.default_rng(seed).normal(0, sigma, num)
    return list(values - values.mean() + mean)


def judged(mean: float, seed: int = 0, sigma: float = 0.003) -> Judgement:
    return judge(make_blocks(noise(sigma, seed, mean=mean), noise(sigma, seed + 100)))


def test_effect_of_a_quad_is_the_log_of_summed_times() -> None:
    quad = [
        Block("measured", 0, letter, seconds)
        for letter, seconds in zip("ABBA", (1.0, 2.0, 4.0, 2.0), strict=True)
    ]
    assert quad_effect(quad) == math.log(2)


@pytest.mark.parametrize(
    ("mean", "verdict"),
    [(0.1, "slower"), (-0.1, "faster"), (-0.005, "faster"), (0.0005, "no difference shown")],
)
def test_verdict_follows_the_effect(mean: float, verdict: str) -> None:
    result = judged(mean)
    assert result.verdict == verdict
    assert result.mean_ratio == pytest.approx(math.exp(mean))
    assert result.ratio == pytest.approx(math.exp(np.median(result.effects)))
    assert result.ratio_interval.contains(result.ratio)
    assert result.mean_ratio_interval.contains(result.mean_ratio)


def test_a_difference_must_hold_among_all_variants() -> None:
    small, large = judged(-0.0028), judged(-0.05)
    assert (small.verdict, large.verdict) == ("faster", "faster")
    [alone] = correct([small])
    assert alone is small and alone.p_holm is None
    assert small.measured is not None and small.measured.p < 0.05
    many = correct([large, *[small] * 49])
    ps = [judgement.p_holm or 0.0 for judgement in many]
    # The smallest p counts 50 times, the others 49 times or as much as one before them.
    assert ps[1] == pytest.approx(49 * small.measured.p) and len(set(ps[1:])) == 1
    assert [j.verdict for j in many] == ["faster"] + ["no difference shown"] * 49
    assert "50 variants" in many[1].reason
    refused = judge(make_blocks([0.0] * 12, [0.02] * 12))
    assert correct([refused, large])[0].verdict == "refused"


def test_summary_has_both_intervals_sigma_and_detectable_effect() -> None:
    effects = noise(0.003, 3, mean=0.01)
    summary = summarize(effects)
    assert summary.num_quads == 12 and summary.mean == pytest.approx(0.01)
    assert summary.sigma == pytest.approx(np.std(effects, ddof=1))
    assert summary.mde == pytest.approx(2.8 * summary.sigma / math.sqrt(12), rel=1e-3)
    for interval in (summary.mean_interval, summary.student, summary.student_99):
        assert interval.low < 0.01 < interval.high
    assert summary.student_99.low < summary.student.low < summary.mean_interval.low
    assert summary.p < 1e-4
    assert summarize([-effect for effect in effects]).p == pytest.approx(summary.p)
    assert summarize([0.0] * 4).p == 1 and summarize([0.5] * 4).p == 0


def test_a_drifted_control_is_refused_and_quotes_no_ratio() -> None:
    result = judge(make_blocks(noise(0.003, 0, mean=-0.1), noise(0.003, 1, mean=0.02)))
    assert result.verdict == "refused"
    assert result.reason.startswith("refused: control drifted") and "+2.02 %" in result.reason
    for quote in (
        lambda: result.ratio,
        lambda: result.ratio_interval,
        lambda: result.mean_ratio,
        lambda: result.mean_ratio_interval,
    ):
        with pytest.raises(BenchError, match="control drifted"):
            quote()
    plain = result.as_dict()
    assert plain["ratio"] is None and plain["measured"] is None and plain["mean_ratio"] is None
    assert plain["control"]["mean"] == pytest.approx(0.02)
    assert len(plain["effects"]) == 12


def test_a_control_within_the_tolerance_passes_but_raises_the_noise_floor() -> None:
    control = noise(0.0001, 1, mean=0.004)
    beyond = judge(make_blocks(noise(0.0001, 0, mean=0.005), control))
    within = judge(make_blocks(noise(0.0001, 0, mean=0.003), control))
    assert beyond.verdict == "slower"
    assert within.verdict == "no difference shown"
    assert within.measured is not None and within.measured.student.low > 0


def test_an_unsteady_control_is_refused() -> None:
    result = judge(make_blocks(noise(0.001, 0, mean=-0.1), noise(0.02, 1)))
    assert result.verdict == "refused" and "control unsteady" in result.reason
    # The same ratio of spreads far below the tolerance harms nothing.
    assert judge(make_blocks(noise(1e-5, 0, mean=-0.1), noise(2e-4, 1))).verdict == "faster"
    # A measurement noisier than its control is its own finding, not a broken harness.
    assert judge(make_blocks(noise(0.02, 0, mean=-0.1), noise(0.001, 1))).verdict == "faster"


def test_noisy_but_honest_controls_are_rarely_refused() -> None:
    rng = np.random.default_rng(4)
    refused = sum(
        judge(make_blocks(*rng.normal(0, 0.03, (2, 8)).tolist())).verdict == "refused"
        for _ in range(60)
    )
    assert refused <= 3


@pytest.mark.parametrize("flags", [0x8, 0x20, 0x40, 0x80, 0x24])
def test_a_quad_under_a_throttle_flag_is_dropped(flags: int) -> None:
    def clocks(series: Series, quad: int, position: int) -> ClockSample:
        hit = series == "measured" and quad == 2 and position == 3
        return reading(flags=flags if hit else 0x4)

    effects = noise(0.003, 0, mean=-0.02)
    effects[2] = 5.0
    result = judge(make_blocks(effects, noise(0.003, 1), clocks))
    assert [(drop.series, drop.quad) for drop in result.dropped] == [("measured", 2)]
    assert "throttle" in result.dropped[0].why
    assert len(result.effects) == 11 and max(result.effects) < 0.1
    assert len(result.control_effects) == 12 and result.verdict == "faster"


@pytest.mark.parametrize(
    ("clocks", "dropped"),
    [
        ((1500, 1500, 1480, 1480), True),
        ((1480, 1480, 1500, 1500), True),
        ((1500, 1400, 1400, 1500), False),
        ((1500, 1500, 1490, 1490), False),
        ((None, 1500, 1400, 1400), False),
    ],
)
def test_a_quad_is_dropped_by_the_clock_of_its_halves(
    clocks: tuple[float | None, ...], dropped: bool
) -> None:
    quad = [Block("control", 0, "A", 1.0, reading(clock)) for clock in clocks]
    assert (reason_to_drop(quad) is not None) == dropped


def test_few_readings_drop_no_quad() -> None:
    for num, is_dropped in ((9, False), (10, True)):
        clocks = [
            ClockSample(num, mhz, None, None, None, 0) for mhz in (1500.0, 1500.0, 1600.0, 1600.0)
        ]
        quad = [Block("measured", 0, *pair) for pair in zip("ABBA", [1.0] * 4, clocks, strict=True)]
        assert (reason_to_drop(quad) is not None) == is_dropped


def test_too_few_quads_left_is_refused() -> None:
    def clocks(series: Series, quad: int, position: int) -> ClockSample:
        return reading(flags=0x40 if series == "control" and quad < 7 else 0)

    result = judge(make_blocks(noise(0.003, 0), noise(0.003, 1), clocks))
    assert result.verdict == "refused" and "5 of 12 quads" in result.reason
    assert result.measured is None and len(result.dropped) == 7
    with pytest.raises(BenchError, match="too few"):
        _ = result.ratio
    json.dumps(result.as_dict(), allow_nan=False)


def test_blocks_without_readings_are_never_dropped() -> None:
    assert judge(make_blocks(noise(0.003, 0), noise(0.003, 1))).dropped == ()


def test_as_dict_is_plain_json() -> None:
    plain = judged(-0.05).as_dict()
    again = json.loads(json.dumps(plain, allow_nan=False))
    assert again["ratio"] == plain["ratio"] and again["measured"] == plain["measured"]
    assert again["ratio_interval"].keys() == {"low", "high"}
