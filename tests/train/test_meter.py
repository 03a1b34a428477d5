"""FLOPs against counted ones, peaks by name, speed between lines."""

import numpy as np
import pytest
import torch

from underpar.build.model import build_model
from underpar.core.runtime import Clock
from underpar.data.batch import segments_from_starts
from underpar.lab.flops import count_flops
from underpar.model.gpt import GPT
from underpar.model.kv_cache import PackedCache
from underpar.recipe import Recipe, load_recipe
from underpar.schema import ModelSpec
from underpar.train.meter import Meter, flops_per_token, peak_flops, peak_of


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
