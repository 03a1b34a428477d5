"""The size of an artifact foretold: close to packed files, and logged while a run trains."""

import json
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tiny import TinyRun
from underpar.artifact.budget import read_budget
from underpar.artifact.pack import Artifact, pack
from underpar.artifact.size_before_training import forecast
from underpar.artifact.size_while_training import (
    MOST_HALVES,
    SizeForecast,
    tensor_rows,
    tensor_steps,
)
from underpar.build.levers import resolve_levers
from underpar.build.model import build_model, weight_shapes
from underpar.core.run_folder import RunFolder
from underpar.core.runtime import Runtime
from underpar.core.tensor_files import read_tensors
from underpar.data.folder import load_data
from underpar.data.loader import MicroBatch
from underpar.data.made_up import made_up_batch
from underpar.model.network import Eager
from underpar.quant.rounding import as_rows, stored_steps
from underpar.quant.rules import quantize_model
from underpar.quant.schemes import parse_scheme
from underpar.recipe import Recipe, load_recipe
from underpar.stages.train import make_trainer
from underpar.submit.bundle import bundle
from underpar.train.optim import Optimizer
from underpar.train.step import mean_loss

CODE_BYTES = 10_000
TOKENIZER = np.random.default_rng(1).bytes(3000)
# Rounded without a calibration, as recipes have them.
PLAIN = 'quant.rules=["embedding.weight int7:14", "blocks.*.weight int6:12.85", "* fp16"]'
TABLES = PLAIN.replace('"* fp16"', '"levers.*.table.weight int8", "* fp16"')
WIDEST = 'quant.rules=["*.weight int8", "*.gate int8", "* fp16"]'
LOGS = 'quant.rules=["embedding.weight int8:20+log", "*.weight int6:12.85+log", "* fp16"]'
CLIPPED = 'quant.rules=["embedding.weight ternary:32", "*.weight clip5", "* fp16"]'
CASES = [
    ("baseline+cpu", [PLAIN, "model.num_layers=3", "model.dim=128"]),
    ("pr2014+cpu", [WIDEST]),
    ("pr1219+cpu", [TABLES]),
    ("pr1894+cpu", [LOGS]),
    ("demo", [CLIPPED, "model.num_layers=2"]),
]


def recipe_of(name: str, sets: list[str]) -> Recipe:
    return resolve_levers(load_recipe(name, sets))


def forecast_of(recipe: Recipe, tokenizer: bytes = TOKENIZER) -> SizeForecast:
    return SizeForecast(recipe, weight_shapes(recipe), tokenizer, lambda: CODE_BYTES)


def packed_bytes(recipe: Recipe, weights: dict[str, Tensor], tokenizer: bytes = TOKENIZER) -> int:
    arrays = {name: weight.float().numpy() for name, weight in weights.items()}
    tensors = quantize_model(arrays, recipe.quant.rules)
    data = pack(Artifact(recipe, tokenizer, tensors))
    return read_budget(data, CODE_BYTES, recipe.limits.cap_bytes).total_bytes


def gaussian_weights(recipe: Recipe) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = weight_shapes(recipe)
    return {name: 0.1 * torch.randn(shape, generator=generator) for name, shape in shapes.items()}


@pytest.mark.parametrize(("name", "sets"), CASES)
def test_gaussian_weights_take_what_is_forecast(name: str, sets: list[str]) -> None:
    recipe = recipe_of(name, sets)
    weights = gaussian_weights(recipe)
    # Without the code, whose bytes are no guess.
    forecast = forecast_of(recipe).total_bytes(weights) - CODE_BYTES
    assert forecast == pytest.approx(packed_bytes(recipe, weights) - CODE_BYTES, rel=0.005)


def trained_weights(recipe: Recipe) -> dict[str, Tensor]:
    """After a few steps on made-up text."""
    torch.manual_seed(0)
    model = build_model(recipe)
    optimizer = Optimizer(model, recipe.train)
    rng = np.random.default_rng(0)
    for _ in range(4):
        batch = made_up_batch(MicroBatch(256, 64), recipe.model.vocab_size, rng, "documents")
        mean_loss(model, batch).backward()
        optimizer.step(1.0, 0.9)
    return model.state_dict()


@pytest.mark.parametrize(("name", "sets"), CASES)
def test_trained_weights_take_what_is_forecast(name: str, sets: list[str]) -> None:
    recipe = recipe_of(name, sets)
    weights = trained_weights(recipe)
    forecast = forecast_of(recipe).total_bytes(weights) - CODE_BYTES
    assert forecast == pytest.approx(packed_bytes(recipe, weights) - CODE_BYTES, rel=0.005)


def test_a_run_ends_with_the_size_of_its_artifact(tiny_run: TinyRun) -> None:
    logged = json.loads(tiny_run.folder.validation_file.read_text())["forecast_bytes"]
    packed = json.loads(tiny_run.folder.budget_file.read_text())["total_bytes"]
    code_bytes = len(bundle(tiny_run.recipe))
    assert logged - code_bytes == pytest.approx(packed - code_bytes, rel=0.005)


def test_the_forecast_of_a_recipe_agrees() -> None:
    for name, sets in CASES[:2]:
        recipe = recipe_of(name, sets)
        before = forecast(recipe, weight_shapes(recipe), CODE_BYTES, TOKENIZER).total_bytes
        live = forecast_of(recipe).total_bytes(gaussian_weights(recipe))
        assert live == pytest.approx(before, rel=0.005)


@pytest.mark.parametrize("rule", ["int6:12.85", "int2", "clip4", "ternary:8", "int8:20", "int8/1"])
@pytest.mark.parametrize("shape", [(40, 24), (3, 5, 8), (24,), (7, 8)])
def test_steps_are_those_of_the_packer(rule: str, shape: tuple[int, ...]) -> None:
    scheme = parse_scheme(rule)
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(3))
    rows = tensor_rows(weight, scheme)
    expected = as_rows(weight.numpy(), scheme)
    assert np.array_equal(rows.numpy(), expected)
    steps = tensor_steps(rows, scheme).numpy()[:, 0]
    assert steps == pytest.approx(stored_steps(expected, scheme), rel=2**-10)


def test_one_column_and_runs_that_do_not_fit_have_a_size() -> None:
    column = torch.tensor([[31.0], [62.0]])
    assert tensor_steps(column, parse_scheme("int6:12.85")).tolist() == [[1.0], [2.0]]
    assert tensor_rows(torch.ones(3, 5), parse_scheme("ternary:4")).shape == (3, 5)


def test_rounding_with_feedback_counts_like_plain_rounding() -> None:
    plain = recipe_of("baseline+cpu", [PLAIN])
    with_feedback = recipe_of("baseline+cpu", [PLAIN.replace("int6", "gptq6")])
    weights = gaussian_weights(plain)
    sizes = [forecast_of(recipe).total_bytes(weights) for recipe in (plain, with_feedback)]
    assert sizes[1] == pytest.approx(sizes[0], abs=20)


def test_grids_fill_the_cap_as_far_as_their_integers_go() -> None:
    grids = 'quant.rules=["blocks.*.weight grid8", "* fp16"]'
    recipe = recipe_of("baseline+cpu", [grids, "limits.cap_bytes=400000"])
    weights = gaussian_weights(recipe)
    assert forecast_of(recipe).total_bytes(weights) == 400_000
    num_grid = sum(w.numel() for n, w in weights.items() if n.startswith("blocks.") and w.ndim > 1)
    others = {n: w for n, w in weights.items() if not n.startswith("blocks.") or w.ndim == 1}
    roomy = forecast_of(recipe_of("baseline+cpu", [grids])).total_bytes(weights)
    halves = 2 * sum(w.numel() for w in others.values())
    assert CODE_BYTES + num_grid < roomy < 16_000_000
    # Halves, tokenizer, header: nothing else is in it.
    assert roomy < CODE_BYTES + num_grid + halves + len(TOKENIZER) + 3000
    # What is no grid may be too much already.
    tight = recipe_of("baseline+cpu", [grids, "limits.cap_bytes=20000"])
    assert forecast_of(tight).total_bytes(weights) > 20_000


def test_large_matrices_are_counted_in_part() -> None:
    recipe = recipe_of("baseline+cpu", [PLAIN])
    weights = trained_weights(recipe)
    whole = forecast_of(recipe).total_bytes(weights)
    in_part = replace(forecast_of(recipe), most_counted=1 << 12).total_bytes(weights)
    assert in_part != whole
    assert in_part == pytest.approx(whole, rel=0.01)


def test_many_halves_are_squeezed_in_part() -> None:
    recipe = recipe_of("baseline+cpu", ['quant.rules=["* fp16"]', "model.mlp_dim=256"])
    weights = gaussian_weights(recipe)
    assert sum(w.numel() for w in weights.values()) > 2 * MOST_HALVES
    forecast, packed = forecast_of(recipe).total_bytes(weights), packed_bytes(recipe, weights)
    assert forecast == pytest.approx(packed, rel=0.02)


def test_broken_weights_do_not_end_a_run() -> None:
    recipe = recipe_of("baseline+cpu", [CLIPPED, "model.num_layers=1"])
    weights = gaussian_weights(recipe)
    whole = forecast_of(recipe).total_bytes(weights)
    for value in (float("nan"), float("inf")):
        broken = {name: torch.full_like(weight, value) for name, weight in weights.items()}
        assert 0 < forecast_of(recipe).total_bytes(broken) < whole


def test_the_code_is_counted_once_and_late() -> None:
    asked: list[int] = []

    def count_code() -> int:
        asked.append(1)
        return CODE_BYTES

    recipe = recipe_of("baseline+cpu", [PLAIN, "model.num_layers=1"])
    weights = gaussian_weights(recipe)
    live = SizeForecast(recipe, weight_shapes(recipe), TOKENIZER, count_code)
    assert not asked
    assert live.total_bytes(weights) == live.total_bytes(weights)
    assert asked == [1]


class Slow(Eager):
    """Takes half a second of a made-up clock per micro-batch; a step has two of them."""

    def __init__(self, now: list[float]) -> None:
        self.now = now

    def end(self, *args: Any) -> Any:
        """Wait, and compute the loss."""
        self.now[0] += 0.5
        return super().end(*args)


def test_metrics_say_the_size_where_it_is_due(
    tiny_data: Path, tmp_path: Path, runtime: Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    sets = ["train.budget_steps=0", "train.budget_seconds=9", "model.num_layers=1"]
    sets += ["train.validate_every_seconds=4", "train.checkpoint_seconds=3", "levers.ema=true"]
    recipe = recipe_of("baseline+cpu", sets)
    now = [5.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    data = load_data(tiny_data)
    trainer = make_trainer(recipe, data, RunFolder(tmp_path), runtime)
    size_of = trainer.size_of
    assert size_of is not None
    seen: list[dict[str, Tensor]] = []

    def slow_size_of(weights: Mapping[str, Tensor]) -> int:
        now[0] += 100.0
        seen.append({name: weight.clone() for name, weight in weights.items()})
        return size_of(weights)

    trainer.runner, trainer.size_of = Slow(now), slow_size_of
    assert trainer.run()
    lines = list(trainer.folder.metrics())
    # The clock of training stands still meanwhile.
    assert [line["seconds"] for line in lines] == [1, 2, 3, 4, 5, 6, 7, 8, 9]
    # Three seconds after the last one, and with a validation (4 and 8).
    assert [line["step"] for line in lines if "forecast_bytes" in line] == [3, 4, 7, 8]
    final = json.loads(trainer.folder.validation_file.read_text())
    weights, _ = read_tensors(trainer.folder.weights_file)
    # Of what will be packed: the average.
    assert all(torch.equal(seen[-1][name], weight) for name, weight in weights.items())
    assert final["forecast_bytes"] == size_of(weights)


def test_a_resumed_run_forecasts_where_an_unbroken_one_does(
    tiny_data: Path, tmp_path: Path, runtime: Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    sets = ["train.budget_steps=8", "train.checkpoint_seconds=3", "model.num_layers=1"]
    recipe, data = recipe_of("baseline+cpu", sets), load_data(tiny_data)
    now = [5.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])

    def run(stop_at: int) -> list[dict[str, float]]:
        trainer = make_trainer(recipe, data, RunFolder(tmp_path), runtime)
        trainer.size_of = lambda weights: 7

        trainer.runner = Slow(now)
        trainer.run(lambda line: line["step"] == stop_at)
        return list(trainer.folder.metrics())

    assert [line["step"] for line in run(4) if "forecast_bytes" in line] == [3]
    assert [line["step"] for line in run(0) if "forecast_bytes" in line] == [3, 6]


def test_a_trainer_needs_no_forecast(tiny_data: Path, tmp_path: Path, runtime: Runtime) -> None:
    recipe = recipe_of("baseline+cpu", ["train.budget_steps=2", "train.checkpoint_seconds=0"])
    data = load_data(tiny_data)
    trainer = make_trainer(recipe, data, RunFolder(tmp_path), runtime)
    trainer.size_of = None
    assert trainer.run()
    assert not any("forecast_bytes" in line for line in trainer.folder.metrics())
    assert "forecast_bytes" not in json.loads(trainer.folder.validation_file.read_text())
