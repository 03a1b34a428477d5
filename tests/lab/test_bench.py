"""The harness on a made clock: order, drift, control and refusals, exact and without real time."""

import json
import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import numpy as np
import pytest

from underpar.errors import BenchError
from underpar.lab.bench import Bench, BenchResult, Instruments, run_bench, run_benches
from underpar.lab.clocks import ClockSample
from watcher import Watcher


class World:
    """A machine whose calls take exactly what the test says; time moves only by calls."""

    def __init__(
        self,
        cost_a: float = 1000.0,
        cost_b: float = 1000.0,
        extra: Callable[[int, int], float] = lambda call, block: 0.0,
    ) -> None:
        self.costs = {"a": cost_a, "b": cost_b}
        self.extra = extra
        self.now = 0.0
        self.pending = 0.0
        self.num_syncs = 0
        self.block = -1
        self.log: list[str] = []

    def call(self, variant: str) -> Callable[[], None]:
        def run() -> None:
            # Work is only queued, as on an accelerator: without a wait the clock sees none of it.
            self.pending += self.costs[variant] + self.extra(len(self.log), self.block)
            self.log.append(variant)

        return run

    def synchronize(self) -> None:
        self.now += self.pending
        self.pending = 0.0
        self.num_syncs += 1

    def start_sample(self) -> Callable[[], ClockSample | None]:
        self.block += 1
        self.log.append("|")
        return lambda: None

    def bench(self) -> Bench:
        return Bench(
            "toy", "b against a", self.call("a"), self.call("b"), synchronize=self.synchronize
        )

    def run(self, quads: int = 12, seconds: float = 4000.0) -> BenchResult:
        instruments = Instruments(lambda: self.now, self.start_sample)
        return run_bench(self.bench(), quads, seconds, 0.0, instruments=instruments)


def test_blocks_run_in_alternating_order_with_the_control_between() -> None:
    world = World()
    result = world.run(quads=4, seconds=3000.0)
    calls = result.calls_per_block
    ran = "".join(world.log).split("|")[1:]
    # Variant of each block: A B B A measured, four of A as control, then both reversed.
    first, second, control = "abba", "baab", "aaaa"
    order = first + control + control + second + first + control + control + second
    assert ran == [letter * (calls + 1) for letter in order]
    letters = "".join(block.letter for block in result.blocks)
    assert letters == "ABBA" * 2 + "BAAB" * 2 + "ABBA" * 2 + "BAAB" * 2
    kinds = [(block.series, block.quad) for block in result.blocks[::4]]
    assert kinds[:4] == [("measured", 0), ("control", 0), ("control", 1), ("measured", 1)]


def test_the_first_call_of_a_block_is_not_timed() -> None:
    world = World()
    switch = {"at": ""}

    def extra(call: int, block: int) -> float:
        is_first = bool(world.log) and world.log[-1] == "|"
        switch["at"] += "x" if is_first else ""
        return 1e6 if is_first else 0.0

    world.extra = extra
    result = world.run(quads=4)
    assert len(switch["at"]) == len(result.blocks) == 32
    assert {block.seconds for block in result.blocks} == {1000.0 * result.calls_per_block}


def test_the_device_is_waited_for_at_block_edges_only() -> None:
    world = World()
    world.run(quads=4)
    before = world.num_syncs
    world.run(quads=6)
    # Two waits a block; warm-up and calibration are the same in both runs.
    assert (world.num_syncs - before) - before == 2 * 2 * 8


def test_a_block_lasts_as_long_as_asked() -> None:
    for cost_a, cost_b in ((1000.0, 1000.0), (700.0, 13.0), (13.0, 700.0), (9000.0, 9000.0)):
        result = World(cost_a, cost_b).run(quads=4)
        shortest = result.calls_per_block * min(cost_a, cost_b)
        assert shortest >= 4000.0
        assert min(block.seconds for block in result.blocks) == shortest
        assert result.calls_per_block == 1 or shortest < 1.3 * 4000.0


def test_linear_drift_cancels_exactly_in_every_quad() -> None:
    result = World(extra=lambda call, block: 3.0 * call).run(quads=8)
    seconds = [block.seconds for block in result.blocks]
    assert seconds == sorted(seconds) and seconds[-1] > 1.5 * seconds[0]
    assert set(result.effects) == set(result.control_effects) == {0.0}
    assert result.verdict == "no difference shown" and result.ratio == 1


def test_quadratic_drift_cancels_exactly_between_two_quads() -> None:
    result = World(extra=lambda call, block: 0.5 * call**2).run(quads=8)
    for series in ("measured", "control"):
        gaps = []
        for quad in range(8):
            mine = [b for b in result.blocks if (b.series, b.quad) == (series, quad)]
            gaps.append(sum(b.seconds if b.letter == "B" else -b.seconds for b in mine))
        assert gaps[0] < 0 and gaps == [gaps[0], -gaps[0]] * 4
    assert result.effects[0] < 0 < result.effects[1]
    biggest = max(abs(effect) for effect in result.effects)
    assert abs(np.mean(result.effects)) < 0.15 * biggest


def test_one_order_alone_would_have_believed_the_drift() -> None:
    result = World(extra=lambda call, block: 0.5 * call**2).run(quads=8)
    assert all(effect < 0 for effect in result.effects[::2])
    assert result.verdict == "no difference shown"


def test_variants_share_a_and_its_control() -> None:
    world = World(cost_b=900.0)
    world.costs["c"] = 1100.0
    one = world.bench()
    other = replace(one, b=world.call("c"), label_b="C")
    instruments = Instruments(lambda: world.now, world.start_sample)
    progress = Watcher()
    faster, slower = run_benches([one, other], 4, 4000.0, 0.0, progress, instruments)
    assert (faster.verdict, slower.verdict) == ("faster", "slower")
    assert slower.ratio == pytest.approx(1.1) and slower.label_b == "C"
    for result in (faster, slower):
        kinds = [(block.series, block.quad) for block in result.blocks[::4]]
        assert sorted(kinds) == sorted((s, q) for s in ("measured", "control") for q in range(4))
        assert result.median_seconds("A") == 1000.0
    controls = [[b for b in r.blocks if b.series == "control"] for r in (faster, slower)]
    assert controls[0] == controls[1]
    # All blocks: three series of four quads, the order turned round in every other quad.
    ran = [block[0] for block in "".join(world.log).split("|")[1:]]
    first = "abba" + "acca" + "aaaa"
    assert "".join(ran[:24]) == first + "aaaa" + "caac" + "baab"
    assert len(ran) == 3 * 4 * 4 and progress.tasks[0].total == 12


@pytest.mark.parametrize("factor", [1.1, 0.9])
def test_a_true_tenth_is_found_under_drift_and_noise(factor: float) -> None:
    rng = np.random.default_rng(0)
    noise = rng.normal(0, 4.0, 100_000)
    world = World(1000.0, 1000.0 * factor, lambda call, block: 0.1 * call + noise[call])
    result = world.run()
    assert result.verdict == ("slower" if factor > 1 else "faster")
    assert result.ratio == pytest.approx(factor, rel=0.01)
    assert result.mean_ratio == pytest.approx(factor, rel=0.01)
    assert result.measured is not None and result.measured.student.contains(
        math.log(result.mean_ratio)
    )


def test_a_against_a_shows_nothing() -> None:
    for seed in range(3):
        noise = np.random.default_rng(seed).normal(0, 10.0, 100_000)
        world = World()
        world.extra = partial(lambda noise, call, block: noise[call], noise)
        result = world.run()
        assert result.verdict == "no difference shown"
        assert result.ratio == pytest.approx(1, abs=0.01)


def test_a_harness_that_favours_a_letter_is_refused() -> None:
    def extra(call: int, block: int) -> float:
        # Slow exactly where the letter B stands, whatever variant runs there.
        number = block // 4
        even = number % 4 in (0, 1)
        inner = block % 4 in (1, 2)
        return 20.0 if block >= 0 and inner == even else 0.0

    result = World(cost_b=900.0, extra=extra).run()
    assert result.verdict == "refused"
    assert "control drifted" in result.reason and "+2.00 %" in result.reason
    with pytest.raises(BenchError, match="control drifted"):
        _ = result.ratio
    plain = json.loads(json.dumps(result.as_dict(), allow_nan=False))
    assert plain["ratio"] is None and plain["measured"] is None
    assert len(plain["blocks"]) == 96 and plain["verdict"] == "refused"


def test_throttled_quads_are_dropped_and_reported() -> None:
    world = World(cost_b=900.0)

    def start_sample() -> Callable[[], ClockSample]:
        world.start_sample()
        flags = 0x40 if world.block == 1 else 0x4
        return lambda: ClockSample(9, 1500.0, 3201.0, 690.0, 55.0, flags)

    instruments = Instruments(lambda: world.now, start_sample)
    result = run_bench(world.bench(), 12, 4000.0, 0.0, instruments=instruments)
    assert [(drop.series, drop.quad) for drop in result.dropped] == [("measured", 0)]
    assert len(result.effects) == 11 and result.verdict == "faster"
    assert result.blocks[1].clocks == ClockSample(9, 1500.0, 3201.0, 690.0, 55.0, 0x40)


def test_a_red_check_stops_everything() -> None:
    world = World()

    def fail() -> None:
        raise ValueError("results differ by 3")

    bench = replace(world.bench(), check=fail)
    with pytest.raises(BenchError, match="ValueError: results differ by 3"):
        run_bench(bench, instruments=Instruments(lambda: world.now, world.start_sample))
    assert world.log == []


def test_a_green_check_runs_once_and_first() -> None:
    world = World()
    bench = replace(world.bench(), check=lambda: world.log.append("check"))
    instruments = Instruments(lambda: world.now, world.start_sample)
    run_bench(bench, 4, 4000.0, 0.0, instruments=instruments)
    assert world.log[0] == "check" and world.log.count("check") == 1


def test_warm_up_alternates_for_the_time_asked() -> None:
    world = World()
    instruments = Instruments(lambda: world.now, world.start_sample)
    run_bench(world.bench(), 4, 1000.0, 50_000.0, instruments=instruments)
    assert "".join(world.log).startswith("ab" * 25 + "aabb|")


def test_progress_counts_every_quad() -> None:
    world = World()
    progress = Watcher()
    instruments = Instruments(lambda: world.now, world.start_sample)
    run_bench(world.bench(), 4, 4000.0, 0.0, progress, instruments)
    [task] = progress.tasks
    assert (task.name, task.total) == ("toy", 8)
    assert [completed for completed, _ in task.updates] == list(range(1, 9))


def test_result_says_what_was_measured_with() -> None:
    world = World()
    plain = world.run(quads=4).as_dict()
    assert plain["name"] == "toy" and plain["what"] == "b against a"
    assert plain["label_a"] == "A" and plain["label_b"] == "B"
    assert plain["versions"].keys() >= {"python", "numpy", "torch"}
    assert len(plain["blocks"]) == 32 and plain["blocks"][0]["clocks"] is None
    assert json.loads(json.dumps(plain, allow_nan=False))["control"]["mean"] == 0


@pytest.mark.parametrize(
    ("quads", "block", "warmup", "word"),
    [
        (3, 1.0, 0.0, "quads is 3"),
        (2, 1.0, 0.0, "quads is 2"),
        (12, 0.0, 0.0, "block of 0"),
        (12, math.nan, 0.0, "block of nan"),
        (12, 1.0, -1.0, "warm-up of -1"),
        (12, 1.0, math.inf, "warm-up of inf"),
    ],
)
def test_settings_that_cannot_be_run_are_refused(
    quads: int, block: float, warmup: float, word: str
) -> None:
    world = World()
    with pytest.raises(BenchError, match=word):
        run_bench(world.bench(), quads, block, warmup)
    assert world.log == []


def test_calls_that_take_no_time_are_refused() -> None:
    with pytest.raises(BenchError, match="more work per call"):
        World(0.0, 0.0).run()
