"""The entropy-weighted loss by hand: its weights, its gradient, and the loss that is shown."""

import json
import math
from pathlib import Path

import pytest
import torch
from torch import Tensor

from lever_stacks import batch_of
from underpar.build.model import build_model
from underpar.compile.regions import Sharing
from underpar.compile.traced_run import TracedRun
from underpar.core.run_folder import RunFolder
from underpar.core.runtime import Runtime
from underpar.errors import RecipeError
from underpar.levers.entropy_weight import NEUTRAL, Lever, Settings
from underpar.model.gpt import GPT
from underpar.model.kv_cache import PackedCache
from underpar.model.network import EAGER, Eager
from underpar.recipe import load_recipe
from underpar.stages.train import train
from underpar.train.step import mean_loss

BATCH = batch_of([9, 30], 128)


@pytest.fixture
def model() -> GPT:
    torch.manual_seed(0)
    model = build_model(load_recipe("cpu", ["model.num_layers=1"]))
    with torch.no_grad():
        # Away from the first state, where all predictions are nearly alike.
        model.embedding.weight.normal_(std=0.3)
        model.blocks[0].mlp.down.weight.normal_(std=0.1)
    return model


def gradient_of(model: GPT, run: Eager, *levers: Lever) -> tuple[Tensor, Tensor]:
    """The loss that is shown, and the gradient of the embedding."""
    model.zero_grad()
    loss = mean_loss(model, BATCH, run, levers)
    loss.backward()
    assert model.embedding.weight.grad is not None
    return loss.detach(), model.embedding.weight.grad.clone()


def lever_with(model: GPT, settings: Settings | None = None) -> Lever:
    return Lever(settings or Settings(), model.spec)


def test_unsure_tokens_weigh_more(model: GPT) -> None:
    logits = torch.tensor([[9.0, 0.0, 0.0], [1.0, 1.0, 1.0], [2.0, 2.0, -9.0], [0.0, 5.0, 0.0]])
    # Entropies of about 0.002, 1.10, 0.69 and 0.08 nats: the mean is 0.47.
    weights = lever_with(model).weigh(logits, torch.zeros(4).long())
    assert weights.tolist() == [0.5, 1.5, 1.5, 0.5]


def test_the_gradient_is_that_of_the_weighted_mean_and_the_loss_is_plain(model: GPT) -> None:
    logits = model(BATCH.inputs, PackedCache(BATCH.segments)).double()
    probs = logits.softmax(-1)
    entropy = [-sum(p * math.log(p) for p in row if p > 0) for row in probs.tolist()]
    limit = sum(entropy) / len(entropy)
    weights = torch.tensor([1.5 if value > limit else 0.5 for value in entropy])
    assert 0 < (weights > 1).sum() < len(weights)
    nats = -probs[torch.arange(len(probs)), BATCH.targets].log()
    model.zero_grad()
    ((weights * nats).sum() / weights.sum()).backward()
    expected = model.embedding.weight.grad
    assert expected is not None
    expected = expected.clone()
    plain_loss, plain = gradient_of(model, EAGER)
    loss, grad = gradient_of(model, EAGER, lever_with(model))
    torch.testing.assert_close(loss, plain_loss)
    torch.testing.assert_close(grad, expected, rtol=1e-4, atol=1e-6)
    assert (grad - plain).abs().max() > 1e-3 * plain.abs().max()


def test_equal_weights_are_the_plain_loss(model: GPT) -> None:
    plain, neutral = (
        gradient_of(model, EAGER),
        gradient_of(model, EAGER, lever_with(model, NEUTRAL)),
    )
    torch.testing.assert_close(neutral, plain, rtol=1e-4, atol=1e-7)


def test_weights_of_levers_are_multiplied(model: GPT) -> None:
    twice = gradient_of(model, EAGER, lever_with(model), lever_with(model))
    squared = gradient_of(model, EAGER, lever_with(model, Settings(unsure=2.25, sure=0.25)))
    torch.testing.assert_close(twice, squared)


def test_it_is_traced_as_it_computes(model: GPT) -> None:
    run = TracedRun(Sharing(lambda graph, examples: graph))
    for settings in (Settings(), Settings(unsure=3.0), NEUTRAL):
        levers = (lever_with(model, settings),)
        traced, eager = gradient_of(model, run, *levers), gradient_of(model, EAGER, *levers)
        torch.testing.assert_close(traced, eager, rtol=1e-4, atol=1e-6)


def test_training_uses_it(tiny_data: Path, tmp_path: Path, runtime: Runtime) -> None:
    short = ["model.num_layers=1", "train.budget_steps=2"]

    def losses_with(name: str, *changes: str) -> list[float]:
        folder = RunFolder(tmp_path / name)
        train(load_recipe("cpu", [*short, *changes]), tiny_data, folder, runtime)
        lines = map(json.loads, folder.metrics_file.read_text().splitlines())
        return [line["loss"] for line in lines if "loss" in line]

    plain = losses_with("plain")
    weighted = losses_with("weighted", "levers.entropy_weight.sure=0.25")
    # The first loss is that of the same weights; the next ones are not.
    assert weighted[0] == pytest.approx(plain[0], abs=1e-5)
    assert abs(weighted[-1] - plain[-1]) > 1e-4


@pytest.mark.parametrize("value", [0.0, -1.0, 1e9, float("nan")])
def test_a_weight_that_makes_no_sense_is_named(value: float) -> None:
    with pytest.raises(RecipeError, match=r"entropy_weight\.sure"):
        Settings(sure=value)
