"""What every lever must do, with no code for any one of them."""

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from underpar import pipeline
from underpar.build import build_model, plug_levers, resolve_levers
from underpar.data.loader import Batch, pack_documents
from underpar.infer.predictor import Predictor
from underpar.levers import LEVERS, lever_module
from underpar.model.gpt import GPT
from underpar.quant.rules import match_rules
from underpar.recipe import Recipe, load_recipe
from underpar.run import RunFolder
from underpar.runtime import Runtime
from underpar.seams import LeverModule
from underpar.train.checkpoint import read_tensors
from underpar.train.groups import group_parameters

ALL = list(LEVERS)
MODEL = [name for name in ALL if lever_module(name).STAGE == "model"]


def recipe_with(name: str) -> Recipe:
    return load_recipe("cpu", [f"levers.{name}=true", "quant.rules=['*.weight int6', '* fp16']"])


def randomized(recipe: Recipe) -> GPT:
    torch.manual_seed(0)
    model = build_model(recipe)
    for name, parameter in model.named_parameters():
        if parameter.ndim > 1 or name.startswith("levers."):
            nn.init.normal_(parameter, std=0.3)
    return model


def batch_of(lengths: list[int], context: int, seed: int = 0) -> Batch:
    rng = np.random.default_rng(seed)
    docs = [np.append(1, rng.integers(4, 500, n)) for n in lengths]
    return pack_documents(docs, 1, context)[0]


@pytest.fixture(params=ALL)
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def lever(name: str) -> LeverModule:
    return lever_module(name)


def test_a_lever_says_what_it_is(lever: LeverModule) -> None:
    doc = lever.__doc__ or ""
    assert "Source:" in doc
    assert "Legal:" in doc
    assert any(mark in doc for mark in ("PR ", "arXiv"))
    assert lever.STAGE in ("data", "model", "train", "quant", "infer")
    assert lever.Settings() == lever.Settings()


def test_a_lever_trains_packs_and_scores(
    name: str, data_for: Callable[[Recipe], Path], tmp_path: Path, runtime: Runtime
) -> None:
    recipe = load_recipe("cpu", [f"levers.{name}=true", "train.budget_steps=3"])
    data = data_for(recipe)
    folder = RunFolder(tmp_path / "run")
    assert pipeline.train_run(recipe, data, folder, runtime)
    pipeline.pack_run(folder)
    score = pipeline.score_artifact(folder.artifact_file, data, runtime).score
    assert np.isfinite(score.bpb)
    assert plug_levers(recipe, lever_module(name).STAGE)[name] is not None


@pytest.mark.parametrize("name", MODEL)
def test_model_levers_are_causal_and_keep_documents_apart(name: str) -> None:
    model = randomized(recipe_with(name))
    predictor = Predictor(model, torch.device("cpu"), [])
    lengths = [30, 40]
    whole = predictor.log_probs(batch_of(lengths, predictor.context))
    batch = batch_of(lengths, predictor.context)
    other = Batch(batch.inputs.clone(), batch.targets, batch.segments)
    other.inputs[50:] = (other.inputs[50:] + 7) % 500
    changed = predictor.log_probs(other)
    assert torch.equal(changed[:50], whole[:50])
    assert not torch.equal(changed[50:], whole[50:])
    other.inputs[:31] = (other.inputs[:31] + 3) % 500
    assert torch.equal(predictor.log_probs(other)[31:50], whole[31:50])


@pytest.mark.parametrize("name", MODEL)
def test_the_neutral_state_is_the_model_without_the_lever(name: str) -> None:
    with_lever = randomized(recipe_with(name))
    module: object = with_lever.levers[name]
    module.neutral_()  # type: ignore[attr-defined]
    without = randomized(load_recipe("cpu"))
    shared = {k: v for k, v in with_lever.state_dict().items() if not k.startswith("levers.")}
    without.load_state_dict(shared)
    batch = batch_of([25, 60], 128)
    ours, theirs = (
        Predictor(m, torch.device("cpu"), []).log_probs(batch) for m in (with_lever, without)
    )
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", MODEL)
def test_model_levers_are_grouped_quantized_and_reached_by_gradients(name: str) -> None:
    recipe = recipe_with(name)
    model = randomized(recipe)
    own = {n for n, _ in model.named_parameters() if n.startswith(f"levers.{name}.")}
    assert own
    grouped = {n for members in group_parameters(model).values() for n in members}
    assert own <= grouped
    assert own <= set(match_rules(list(model.state_dict()), recipe.quant.rules))
    from underpar.train.step import mean_loss

    mean_loss(model, batch_of([40], 128)).backward()
    dead = [n for n, p in model.named_parameters() if p.grad is None or not p.grad.any()]
    assert dead == []


@pytest.mark.parametrize("name", MODEL)
def test_stepping_equals_pricing_with_the_lever(name: str) -> None:
    predictor = Predictor(randomized(recipe_with(name)), torch.device("cpu"), [])
    batch = batch_of([150], predictor.context)
    priced = predictor.nll(batch)
    stepper = predictor.stepper(1)
    for t in range(len(batch.inputs)):
        stepped = -stepper.step(batch.inputs[t : t + 1])[0, batch.targets[t]]
        assert abs(float(stepped - priced[t])) < 1e-4


def test_an_average_is_what_gets_packed(tiny_data: Path, tmp_path: Path, runtime: Runtime) -> None:
    recipe = load_recipe("cpu", ["levers.ema=true", "train.budget_steps=3"])
    folder = RunFolder(tmp_path)
    pipeline.train_run(recipe, tiny_data, folder, runtime)
    weights, _ = read_tensors(folder.weights_file)
    checkpoint, _ = read_tensors(folder.checkpoint_file)
    assert not torch.equal(weights["embedding.weight"], checkpoint["model/embedding.weight"])
    assert torch.equal(weights["embedding.weight"], checkpoint["average0/embedding.weight"])
    assert json.loads(folder.about_file.read_text())["recipe_hash"] == resolve_levers(recipe).hash
