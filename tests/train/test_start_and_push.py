"""Other initial weights, and weights that are pushed on before each step."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from underpar.build.model import build_model
from underpar.core.run_folder import RunFolder
from underpar.core.runtime import Runtime
from underpar.core.tensor_files import read_tensors
from underpar.data.folder import load_data
from underpar.errors import RecipeError
from underpar.levers import look_ahead, uniform_init
from underpar.model.gpt import GPT
from underpar.recipe import ModelSpec, load_recipe
from underpar.stages.train import make_trainer, train

SPEC = ModelSpec()


def initialized(**settings: Any) -> GPT:
    torch.manual_seed(3)
    model = build_model(load_recipe("cpu", ["model.num_layers=2"]))
    uniform_init.Lever(uniform_init.Settings(**settings), SPEC).initialize(model)
    return model


def test_matrices_start_uniform_with_half_the_scale() -> None:
    model = initialized()
    for block in model.blocks:
        attn, mlp = block.attn, block.mlp
        for layer in (attn.q, attn.k, attn.v, attn.o, mlp.up):
            expected = 0.5 / math.sqrt(layer.in_features)
            assert float(layer.weight.detach().std()) == pytest.approx(expected, rel=0.05)
            # The largest of a uniform variable is at sqrt(3) standard deviations.
            assert float(layer.weight.detach().abs().max()) <= math.sqrt(3) * expected + 1e-6
        assert not mlp.down.weight.any()
        assert torch.equal(block.attn_scale, torch.ones_like(block.attn_scale))


def test_outputs_may_stay_zero_and_the_rest_is_left_alone() -> None:
    torch.manual_seed(3)
    plain = build_model(load_recipe("cpu", ["model.num_layers=2"]))
    model = initialized(outputs=False, scale=2.0)
    assert not any(block.attn.o.weight.any() for block in model.blocks)
    assert torch.equal(model.embedding.weight, plain.embedding.weight)


def test_a_network_without_such_matrices_is_refused() -> None:
    lever = uniform_init.Lever(uniform_init.Settings(), SPEC)
    with pytest.raises(RecipeError, match="no blocks of q, k, v and up"):
        lever.initialize(torch.nn.Sequential(torch.nn.Linear(2, 2)))


def test_training_starts_from_it_and_the_seed_decides(
    tiny_data: Path, tmp_path: Path, runtime: Runtime
) -> None:
    data = load_data(tiny_data)

    def first_weights(*changes: str) -> torch.Tensor:
        recipe = load_recipe("cpu", ["model.num_layers=1", "levers.ema=true", *changes])
        trainer = make_trainer(recipe, data, RunFolder(tmp_path), runtime)
        weights = trainer.weights()["blocks.0.attn.o.weight"].clone()
        # The average starts there too.
        assert torch.equal(trainer.packed_weights()["blocks.0.attn.o.weight"], weights)
        return weights

    on = "levers.uniform_init=true"
    assert torch.equal(first_weights(on), first_weights(on)) and first_weights(on).any()
    assert not torch.equal(first_weights(on), first_weights(on, "train.seed=5"))


def test_the_push_is_the_published_recursion() -> None:
    lever = look_ahead.Lever(look_ahead.Settings(beta=0.6, decay=0.9, begin=0.2, end=0.8), SPEC)
    weights = {"w": torch.tensor([1.0, -2.0]), "count": torch.tensor(3)}
    lever.start(weights)
    x, m = weights["w"].double().clone(), torch.zeros(2, dtype=torch.float64)
    for step in range(20):
        p, lr_scale = step / 20, 1 - step / 40
        is_on = 0.2 <= p < 0.8
        pushed = x + (0.6 * lr_scale * m if is_on else 0)
        lever.push(weights, p, lr_scale)
        torch.testing.assert_close(weights["w"].double(), pushed)
        # Any optimizer: here gradient descent on |w|^2 / 2.
        weights["w"] -= 0.1 * weights["w"]
        after = 0.9 * pushed
        if p < 0.8:
            m = 0.9 * m + 0.1 * (after - x)
        x = after
        lever.see(weights)
        torch.testing.assert_close(lever.state()["w"].double(), m)
    assert int(weights["count"]) == 3


def test_beta_0_changes_nothing(tiny_data: Path, tmp_path: Path, runtime: Runtime) -> None:
    short = ["model.num_layers=1", "train.budget_steps=8"]
    found = {}
    for name, changes in {
        "plain": [],
        "neutral": ["levers.look_ahead.beta=0.0"],
        "on": ["levers.look_ahead={beta=0.6, decay=0.5}"],
    }.items():
        folder = RunFolder(tmp_path / name)
        train(load_recipe("cpu", [*short, *changes]), tiny_data, folder, runtime)
        found[name] = read_tensors(folder.weights_file)[0]["embedding.weight"]
    assert torch.equal(found["plain"], found["neutral"])
    assert not torch.allclose(found["plain"], found["on"], atol=1e-4)


def test_a_resumed_run_pushes_alike(tiny_data: Path, tmp_path: Path, runtime: Runtime) -> None:
    words = ["model.num_layers=1", "train.budget_steps=8", "levers.look_ahead={decay=0.5}"]
    recipe, data = load_recipe("cpu", words), load_data(tiny_data)
    whole, cut = RunFolder(tmp_path / "whole"), RunFolder(tmp_path / "cut")
    train(recipe, tiny_data, whole, runtime)
    trainer = make_trainer(recipe, data, cut, runtime)
    assert not trainer.run(lambda line: line["step"] == 4)
    assert make_trainer(recipe, data, cut, runtime).run()
    ours, theirs = (read_tensors(folder.weights_file)[0] for folder in (cut, whole))
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"beta": -1.0}, "look_ahead.beta = -1"),
        ({"decay": 1.0}, "look_ahead.decay = 1"),
        ({"begin": 0.8}, "look_ahead.begin = 0.8, end = 0.7"),
    ],
)
def test_a_setting_that_makes_no_sense_is_named(settings: Any, words: str) -> None:
    with pytest.raises(RecipeError, match=words):
        look_ahead.Settings(**settings)
    with pytest.raises(RecipeError, match=r"uniform_init\.scale = 0"):
        uniform_init.Settings(scale=0.0)
