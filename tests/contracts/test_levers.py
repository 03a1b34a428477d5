"""What every lever must do, without code for any single lever.

Levers of scoring have more contracts in test_scoring_levers.py, text transforms in
test_transforms.py.
"""

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from lever_stacks import (
    ALL,
    CPU,
    MODEL,
    batch_of,
    groups_of,
    lever_of,
    randomized,
    stack_with,
    stack_without,
)
from underpar.build.levers import resolve_levers
from underpar.build.model import build_model
from underpar.core.run_folder import RunFolder
from underpar.core.runtime import Runtime
from underpar.core.tensor_files import read_tensors
from underpar.data.batch import Batch
from underpar.infer.predictor import Predictor
from underpar.levers import lever_module
from underpar.model.gpt import GPT
from underpar.model.kv_cache import PackedCache
from underpar.quant.rules import match_rules, quantize_model
from underpar.recipe import Recipe, load_recipe
from underpar.seams import LeverModule
from underpar.stages.pack import pack_run
from underpar.stages.score import score_artifact
from underpar.stages.train import train
from underpar.train.groups import group_of, group_parameters
from underpar.train.step import mean_loss

# Largest difference in nats between two computations of the same prices in fp32.
TOLERANCE = 1e-4

# Model levers together in few stacks; the others one by one, because some exclude each other.
SMALL_STACKS = groups_of(MODEL) + [(name,) for name in ALL if name not in MODEL]


@pytest.fixture(params=ALL)
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def lever(name: str) -> LeverModule:
    return lever_module(name)


def log_probs(model: GPT, batch: Batch) -> torch.Tensor:
    return Predictor(model, CPU, []).log_probs(batch)


def test_a_lever_says_what_it_is(lever: LeverModule) -> None:
    doc = " ".join((lever.__doc__ or "").split())
    marks = [doc.index(mark) for mark in ("Source: ", "Legal: ", "Cost: ")]
    assert 0 < marks[0] < marks[1] < marks[2]
    assert any(mark in doc for mark in ("PR ", "arXiv"))
    assert lever.STAGE in ("data", "model", "train", "quant", "infer")
    # Every setting has a default, and none can be changed after the recipe was read.
    assert dataclasses.is_dataclass(lever.Settings())
    with pytest.raises(dataclasses.FrozenInstanceError):
        lever.Settings().anything = 1


@pytest.mark.parametrize("names", SMALL_STACKS, ids=lambda names: f"{len(names)}-{names[0]}")
def test_levers_train_pack_and_score(
    names: tuple[str, ...], data_for: Callable[[Recipe], Path], tmp_path: Path, runtime: Runtime
) -> None:
    train_pack_score(names, data_for, tmp_path, runtime)


@pytest.mark.slow
def test_a_lever_trains_packs_and_scores_alone(
    name: str, data_for: Callable[[Recipe], Path], tmp_path: Path, runtime: Runtime
) -> None:
    train_pack_score((name,), data_for, tmp_path, runtime)


def train_pack_score(
    names: tuple[str, ...], data_for: Callable[[Recipe], Path], path: Path, runtime: Runtime
) -> None:
    short = ["train.budget_steps=2", "train.num_micro_batches=1", "train.micro_batch_tokens=256"]
    if {lever_module(lever_of(name)).STAGE for name in names} <= {"data", "infer"}:
        # The other levers may name layers.
        short.append("model.num_layers=3")
    levers = stack_with(*names).levers
    recipe = dataclasses.replace(load_recipe("cpu", short), levers=levers)
    data = data_for(recipe)
    folder = RunFolder(path / "run")
    assert train(recipe, data, folder, runtime)["finished"]
    pack_run(folder)
    score = score_artifact(folder.artifact_file, data, runtime).score
    assert np.isfinite(score.bpb)
    assert set(folder.read_recipe().levers) >= {lever_of(name) for name in names}


@pytest.mark.parametrize("name", MODEL)
def test_model_levers_are_causal_and_keep_documents_apart(name: str) -> None:
    model = randomized(stack_with(name))
    batch = batch_of([30, 40], 128)
    whole = log_probs(model, batch)
    other = Batch(batch.inputs.clone(), batch.targets, batch.segments)
    other.inputs[50:] = (other.inputs[50:] + 7) % 500
    changed = log_probs(model, other)
    assert torch.equal(changed[:50], whole[:50])
    assert not torch.equal(changed[50:], whole[50:])
    other.inputs[:31] = (other.inputs[:31] + 3) % 500
    assert torch.equal(log_probs(model, other)[31:50], whole[31:50])


@pytest.mark.parametrize("name", MODEL)
def test_a_lever_changes_the_network(name: str) -> None:
    with_lever, without = randomized(stack_with(name)), randomized(stack_without(name))
    share_weights(with_lever, without)
    batch = batch_of([60], 128)
    assert not torch.allclose(log_probs(with_lever, batch), log_probs(without, batch))


@pytest.mark.parametrize("name", MODEL)
def test_the_neutral_state_is_the_model_without_the_lever(name: str) -> None:
    module: Any = lever_module(lever_of(name))
    with_lever = randomized(stack_with(name, settings=getattr(module, "NEUTRAL", None)))
    without = randomized(stack_without(name))
    share_weights(with_lever, without)
    lever: Any = with_lever.levers[lever_of(name)]
    assert hasattr(module, "NEUTRAL") or hasattr(lever, "neutral_")
    if hasattr(lever, "neutral_"):
        lever.neutral_()
    if hasattr(lever, "agree_"):
        lever.agree_(with_lever.blocks, without.blocks)
    batch = batch_of([25, 60], 128)
    ours, theirs = log_probs(with_lever, batch), log_probs(without, batch)
    torch.testing.assert_close(ours, theirs, rtol=0, atol=TOLERANCE)


def share_weights(source: GPT, target: GPT) -> None:
    """Give `target` those weights of `source` that it has."""
    weights = source.state_dict()
    target.load_state_dict({name: weights[name] for name in target.state_dict()})


@pytest.mark.parametrize("name", MODEL)
def test_every_parameter_is_grouped_quantized_and_packed(name: str) -> None:
    recipe = stack_with(name)
    model = randomized(recipe)
    lever_weights = {n for n, _ in model.named_parameters() if n.startswith("levers.")}
    trained = {n for n, p in model.named_parameters() if p.requires_grad}
    groups = [set(members) for members in group_parameters(model).values()]
    assert lever_weights & trained <= set().union(*groups)
    assert sum(len(g) for g in groups) == len(trained)
    assert lever_weights <= set(match_rules(list(model.state_dict()), recipe.quant.rules))
    weights = {n: t.numpy() for n, t in model.state_dict().items()}
    assert set(quantize_model(weights, recipe.quant.rules)) == set(weights)


@pytest.mark.parametrize("name", MODEL)
def test_gradient_reaches_every_element_that_is_not_dead_by_layout(name: str) -> None:
    model = randomized(stack_with(name)).train()
    mean_loss(model, batch_of([90, 60], 128)).backward()
    lever: Any = model.levers[lever_of(name)]
    dead = lever.dead(model.plan) if hasattr(lever, "dead") else {}
    for full, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        assert parameter.grad is not None, full
        assert parameter.grad.any(), full
        name_in_lever = full.removeprefix(f"levers.{lever_of(name)}.")
        if name_in_lever == full:
            continue
        untouched = parameter.grad == 0
        if group_of(full, parameter) == "embed":
            # Rows of tokens that are not in the batch get no gradient; every channel gets one.
            untouched = untouched.all(dim=0)
        expected = dead.get(name_in_lever, torch.zeros_like(untouched))
        assert torch.equal(untouched, expected), full


@pytest.mark.parametrize("name", MODEL)
def test_stepping_equals_pricing_with_the_lever(name: str) -> None:
    predictor = Predictor(randomized(stack_with(name)), CPU, [])
    batch = batch_of([150], predictor.context)
    priced = predictor.nll(batch)
    stepper = predictor.stepper(1)
    for t in range(len(batch.inputs)):
        stepped = -stepper.step(batch.inputs[t : t + 1])[0, batch.targets[t]]
        assert abs(float(stepped - priced[t])) < TOLERANCE


@pytest.mark.parametrize("name", MODEL)
def test_the_stream_stays_half_precision_under_autocast(name: str) -> None:
    model = build_model(stack_with(name))
    kinds = []
    for block in model.blocks:
        block.register_forward_pre_hook(lambda _, args: kinds.append(args[1].x.dtype))
    batch = batch_of([20], 128)
    with torch.autocast("cpu", dtype=torch.bfloat16), torch.no_grad():
        hidden = model.hidden(batch.inputs, PackedCache(batch.segments))
    assert {hidden.dtype, *kinds} == {torch.bfloat16}


@pytest.mark.parametrize("names", groups_of(MODEL), ids=lambda names: f"{len(names)}-{names[0]}")
def test_compiled_equals_eager(names: tuple[str, ...]) -> None:
    compare_compiled(names)


@pytest.mark.slow
@pytest.mark.parametrize("name", MODEL)
def test_compiled_equals_eager_alone(name: str) -> None:
    compare_compiled((name,))


def compare_compiled(names: tuple[str, ...]) -> None:
    model = randomized(stack_with(*names)).train()
    batch = batch_of([25, 60], 128)
    # The other partitioner looks for what to compute again, which takes long and changes no value.
    backend = "aot_eager_default_partitioner"
    compiled = torch.compile(mean_loss, backend=backend, fullgraph=True, dynamic=False)
    losses, grads = [], []
    for loss_of in (mean_loss, compiled):
        model.zero_grad()
        losses.append(loss_of(model, batch))
        losses[-1].backward()
        grads.append({n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None})
    torch._dynamo.reset()
    torch.testing.assert_close(losses[0], losses[1], rtol=0, atol=TOLERANCE)
    torch.testing.assert_close(grads[0], grads[1], rtol=1e-3, atol=TOLERANCE)


def test_an_average_is_what_gets_packed(tiny_data: Path, tmp_path: Path, runtime: Runtime) -> None:
    short = ["model.num_layers=2", "levers.ema=true", "train.budget_steps=3"]
    recipe = load_recipe("cpu", short)
    folder = RunFolder(tmp_path)
    train(recipe, tiny_data, folder, runtime)
    weights, _ = read_tensors(folder.weights_file)
    checkpoint, _ = read_tensors(folder.checkpoint_file)
    assert not torch.equal(weights["embedding.weight"], checkpoint["model/embedding.weight"])
    assert torch.equal(weights["embedding.weight"], checkpoint["average0/embedding.weight"])
    assert json.loads(folder.about_file.read_text())["recipe_hash"] == resolve_levers(recipe).hash
