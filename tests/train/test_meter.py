"""FLOPs against counted ones, peaks by name, speed between lines."""

from pathlib import Path

import numpy as np
import pytest
import torch

from underpar.build.model import build_model
from underpar.core.run_folder import RunFolder
from underpar.core.runtime import Clock, Runtime
from underpar.data.batch import segments_from_starts
from underpar.lab.flops import count_flops
from underpar.model.gpt import GPT
from underpar.model.kv_cache import PackedCache
from underpar.recipe import Recipe, load_recipe
from underpar.schema import ModelSpec
from underpar.stages import train as stages_train
from underpar.train import meter
from underpar.train.meter import (
    SLOW_SHARE,
    WATCHED_SECONDS,
    Meter,
    SpeedWatch,
    flops_per_token,
    peak_flops,
    peak_of,
)
from watcher import Watcher


def counted_forward(model: GPT, num_tokens: int, context: int) -> float:
    with torch.device("meta"):
        tokens = torch.zeros(num_tokens, dtype=torch.int64)
    cache = PackedCache(segments_from_starts(np.array([0]), num_tokens, context).to("meta"))
    with torch.no_grad():
        return count_flops(lambda: model(tokens, cache)) / num_tokens


@pytest.mark.parametrize("context", [512, 2048])
def test_the_analytic_count_is_the_counted_one(context: int) -> None:
    spec = ModelSpec()
    with torch.device("meta"):
        model = GPT(spec)
    counted = counted_forward(model, 2048, context)
    assert flops_per_token(spec, model.plan, context) == pytest.approx(3 * counted, rel=0.02)


@pytest.mark.parametrize("mlp_dim", [2048, (*[1024] * 3, *[3072] * 4, *[512] * 4)])
def test_repeated_visits_count(mlp_dim: int | tuple[int, ...]) -> None:
    recipe = Recipe(model=ModelSpec(mlp_dim=mlp_dim), levers={"loop": {}})
    with torch.device("meta"):
        model = build_model(recipe)
    plans = {}
    for p in (0.0, 1.0):
        model.set_progress(p)
        plans[len(model.plan)] = flops_per_token(recipe.model, model.plan, 2048)
        counted = counted_forward(model, 2048, 2048)
        assert plans[len(model.plan)] == pytest.approx(3 * counted, rel=0.02)
    assert len(plans) == 2


def test_the_published_recipe_is_near_its_count() -> None:
    # Its levers add products of their own, which the analytic count leaves out.
    recipe = load_recipe("pr2014")
    with torch.device("meta"):
        model = build_model(recipe)
    counted = 3 * counted_forward(model, 3072, 3072)
    assert flops_per_token(recipe.model, model.plan, 3072) == pytest.approx(counted, rel=0.05)


def test_backward_takes_twice_the_forward() -> None:
    x, w = (torch.zeros(64, 64, requires_grad=True) for _ in range(2))
    forward = count_flops(lambda: x @ w)
    both = count_flops(lambda: (x @ w).backward(torch.ones(64, 64)))
    assert both == 3 * forward


@pytest.mark.parametrize(
    ("name", "peak"),
    [
        ("NVIDIA H200", 989e12),
        ("NVIDIA H100 80GB HBM3", 989e12),
        ("NVIDIA H100 PCIe", 756e12),
        ("NVIDIA H100 NVL", 835e12),
        ("NVIDIA GH200 480GB", 989e12),
        ("NVIDIA A100-SXM4-80GB", 312e12),
        ("NVIDIA L40S", 362e12),
        ("NVIDIA L4", 121e12),
        ("NVIDIA GeForce RTX 4090", 165e12),
        ("NVIDIA H20", None),
        ("Tesla T4", None),
        ("", None),
    ],
)
def test_peaks_by_name(name: str, peak: float | None) -> None:
    assert peak_of(name) == peak


def test_a_cpu_has_no_known_peak() -> None:
    assert peak_flops(torch.device("cpu")) is None


def test_speed_is_that_of_the_last_interval() -> None:
    meter = Meter(Clock("train"), peak=1e6)
    assert meter.read(1000, 2.0, 100.0)["tokens_per_second"] == pytest.approx(500)
    line = meter.read(3000, 3.0, 100.0)
    assert line["tokens_per_second"] == pytest.approx(2000)
    assert line["mfu"] == pytest.approx(0.2)


def test_a_resumed_run_measures_from_its_start() -> None:
    meter = Meter(Clock("train"))
    meter.start(10_000, 50.0)
    line = meter.read(10_500, 51.0, 1.0)
    assert line["tokens_per_second"] == pytest.approx(500)
    assert "mfu" not in line


def test_phases_are_fields_of_the_line() -> None:
    clock = Clock("train")
    meter = Meter(clock)
    with clock.phase("checkpoint"):
        pass
    line = meter.read(1, 1.0, 1.0)
    spent = {name: line[name] for name in ("train_seconds", "checkpoint_seconds")}
    assert sum(spent.values()) <= sum(clock.read().values())
    assert min(spent.values()) > 0


def watched(*lines: tuple[float, float], figure: float = 100e9) -> list[str]:
    """What a watch says to lines of the clock and the operations so far."""
    watch = SpeedWatch(lambda: figure)
    return [note for line in lines if (note := watch.see(*line))]


def test_a_run_far_slower_than_the_machine_says_so_once() -> None:
    slow = 0.9 * SLOW_SHARE * 100e9
    [note] = watched(*((t, slow * t) for t in np.arange(0.0, 50.0, 2.0)))
    assert note.startswith("far slower than this machine is: training does 2.7 GFLOP/s, products")
    assert "matrices reach 100 ('underpar doctor')" in note


def test_a_run_that_becomes_slow_says_so() -> None:
    fast = [(t, 30e9 * t) for t in np.arange(0.0, 41.0, 2.0)]
    assert watched(*fast) == []
    seconds, flops = fast[-1]
    assert len(watched(*fast, *((seconds + t, flops + 1e9 * t) for t in (4, 8, 12)))) == 1


def test_a_short_stretch_and_a_resumed_run_are_not_judged_by_what_was_before() -> None:
    assert watched((0, 0), (0.99 * WATCHED_SECONDS, 1.0)) == []
    # The clock and the operations of a resumed run begin where it was stopped.
    assert watched((1e4, 1e12), (1e4 + WATCHED_SECONDS, 1e12 + 50e9 * WATCHED_SECONDS)) == []


def test_a_short_run_measures_nothing() -> None:
    watch = SpeedWatch(lambda: pytest.fail("measured"))
    assert watch.see(0, 0) is watch.see(0.9 * WATCHED_SECONDS, 1.0) is None


def test_training_prints_that_it_is_slow(
    tiny_data: Path, tmp_path: Path, runtime: Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(meter, "WATCHED_SECONDS", 1e-9)
    monkeypatch.setattr(stages_train, "matmul_flops", lambda _: 1e18)
    watcher = Watcher()
    recipe = load_recipe("cpu", ["train.budget_steps=3", "model.num_layers=1"])
    stages_train.train(recipe, tiny_data, RunFolder(tmp_path / "run"), runtime, watcher)
    assert sum("far slower than this machine" in note for note in watcher.notes) == 1
