"""Validation: the price that `score` asks, whatever the passes and ranks; a model left alone."""

import copy
import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from underpar.build.levers import resolve_levers
from underpar.build.model import build_model
from underpar.core.runtime import Clock, Runtime
from underpar.data.folder import load_data
from underpar.data.shards import Shard
from underpar.errors import RecipeError
from underpar.infer.predictor import Predictor
from underpar.model.gpt import GPT
from underpar.recipe import Recipe, ScorePart, load_recipe
from underpar.score.scorer import Scorer
from underpar.stages.train import make_validator
from underpar.train import validate
from underpar.train.validate import Validation, Validator

# Documents of up to 2,000 characters are cut; the loop is off at first; smear differs in training.
SETS = ["model.num_layers=2", "model.context=48", "levers.loop={first=1, last=1, start=0.5}"]
SETS += ["levers.smear={init=0.3, bos_mask=false}", "levers.partial_rope=true"]


@pytest.fixture(scope="module")
def recipe() -> Recipe:
    return resolve_levers(load_recipe("baseline+cpu", SETS))


@pytest.fixture(scope="module")
def shard(tiny_data: Path) -> Shard:
    return load_data(tiny_data).val


def model_of(recipe: Recipe, seed: int) -> GPT:
    """A model whose every weight matters, in the middle of training, its loop off."""
    torch.manual_seed(seed)
    model = build_model(recipe)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.1 * torch.randn_like(parameter)
    model.set_progress(0.1)
    return model


def validator_of(recipe: Recipe, shard: Shard, runtime: Runtime, tokens: int = 4096) -> Validator:
    part = ScorePart(batch_tokens=tokens)
    return make_validator(replace(recipe, score=part), shard, runtime)


def scored(model: GPT, shard: Shard, runtime: Runtime) -> tuple[float, int, int]:
    """What `score` says of these weights."""
    again = copy.deepcopy(model)
    again.set_progress(1.0)
    predictor, part = Predictor(again, runtime.device, []), ScorePart(batch_tokens=1500)
    score = Scorer(predictor, shard, runtime, Clock(), part).run()
    return score.bpb, score.num_bytes, score.num_targets


def test_live_and_averaged_weights_cost_what_score_says(
    recipe: Recipe, shard: Shard, runtime: Runtime
) -> None:
    live, average = (model_of(recipe, seed) for seed in (0, 1))
    validation = validator_of(recipe, shard, runtime).run(live, average.state_dict())
    for model, bpb in ((live, validation.live_bpb), (average, validation.average_bpb)):
        expected, num_bytes, num_targets = scored(model, shard, runtime)
        assert bpb == pytest.approx(expected, rel=1e-6)
        assert (validation.num_bytes, validation.num_targets) == (num_bytes, num_targets)
    assert validation.live_bpb != pytest.approx(validation.average_bpb, rel=1e-3)
    assert validator_of(recipe, shard, runtime).run(live, None).average_bpb is None


@pytest.mark.parametrize(("mode", "progress"), [(True, 1.0), (False, 0.1)])
@torch.no_grad()
def test_mode_and_visits_of_training_would_cost_something_else(
    mode: bool, progress: float, recipe: Recipe, shard: Shard, runtime: Runtime
) -> None:
    model, validator = model_of(recipe, 0), validator_of(recipe, shard, runtime)
    validation = validator.run(model, None)
    model.train(mode).set_progress(progress)
    nats = float(validator._price(model).sum()) / validation.num_targets
    assert nats != pytest.approx(validation.live_nats, rel=5e-6)


def test_a_uniform_model_costs_log_v_a_target(
    recipe: Recipe, shard: Shard, runtime: Runtime
) -> None:
    model = build_model(recipe)
    torch.nn.init.zeros_(model.embedding.weight)
    validation = validator_of(recipe, shard, runtime).run(model, None)
    assert validation.live_nats == pytest.approx(math.log(512), rel=1e-6)
    assert validation.num_targets == shard.num_tokens - 1
    assert validation.live_bpb == pytest.approx(
        9 * validation.num_targets / shard.num_bytes, rel=1e-6
    )


@pytest.mark.parametrize("tokens", [1, 700, 10**6])
def test_passes_do_not_matter(
    tokens: int, recipe: Recipe, shard: Shard, runtime: Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = model_of(recipe, 0)
    expected = validator_of(recipe, shard, runtime).run(model, None).live_nats
    # Also where logits come in slices.
    monkeypatch.setattr(validate, "ROWS", 100)
    again = validator_of(recipe, shard, runtime, tokens).run(model, None)
    assert again.live_nats == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("world", [2, 3])
@torch.no_grad()
def test_shares_of_ranks_add_up_to_the_same_bits(
    world: int, recipe: Recipe, shard: Shard, runtime: Runtime
) -> None:
    model = model_of(recipe, 0)
    whole = validator_of(recipe, shard, runtime, 700)._price(model.eval())
    ranks = [Runtime(runtime.device, rank, world) for rank in range(world)]
    shares = [validator_of(recipe, shard, rank, 700)._price(model) for rank in ranks]
    assert all(share.any() for share in shares)
    assert torch.equal(sum(shares, torch.zeros(())), whole)
    # Each pass has one owner.
    assert (torch.stack(shares) != 0).sum(0).tolist() == [1] * len(whole)


def state_of(model: GPT) -> tuple[list[object], list[torch.Tensor]]:
    """Everything about a model but its values, and copies of those."""
    tensors = list(model.state_dict().values())
    modes = [module.training for module in model.modules()]
    grads = [p.grad is None for p in model.parameters()]
    pointers = [t.data_ptr() for t in tensors]
    return [modes, grads, pointers, model.plan], [t.clone() for t in tensors]


@pytest.mark.parametrize("breaks", [False, True])
def test_the_model_comes_back_as_it_was(
    breaks: bool,
    recipe: Recipe,
    shard: Shard,
    runtime: Runtime,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model, average = model_of(recipe, 0), model_of(recipe, 1).state_dict()
    model.blocks[0].eval()
    about, values = state_of(model)
    before = {name: weight.clone() for name, weight in average.items()}
    random = torch.get_rng_state()
    validator = validator_of(recipe, shard, runtime)
    if breaks:
        price, calls = validator._price, iter((0, 1))

        def fail_at_the_second(model: GPT) -> torch.Tensor:
            if next(calls):
                raise RuntimeError("no memory")
            return price(model)

        monkeypatch.setattr(validator, "_price", fail_at_the_second)
        with pytest.raises(RuntimeError, match="no memory"):
            validator.run(model, average)
    else:
        validator.run(model, average)
    about_again, values_again = state_of(model)
    assert about_again == about and torch.is_grad_enabled()
    assert all(torch.equal(a, b) for a, b in zip(values, values_again, strict=True))
    assert all(torch.equal(weight, average[name]) for name, weight in before.items())
    assert torch.equal(torch.get_rng_state(), random)


def test_weights_of_another_model_are_refused(
    recipe: Recipe, shard: Shard, runtime: Runtime
) -> None:
    model = model_of(recipe, 0)
    _, values = state_of(model)
    with pytest.raises(RuntimeError, match="embedding"):
        validator_of(recipe, shard, runtime).run(model, {})
    assert all(torch.equal(a, b) for a, b in zip(values, state_of(model)[1], strict=True))


def test_plain_values() -> None:
    validation = Validation(math.log(2), None, num_bytes=50, num_targets=100, seconds=0.5)
    assert validation.as_dict() == {
        "live_bpb": pytest.approx(2.0),
        "average_bpb": None,
        "live_nats": math.log(2),
        "average_nats": None,
        "num_bytes": 50,
        "num_targets": 100,
        "validation_seconds": 0.5,
    }
    averaged = replace(validation, average_nats=2 * math.log(2))
    assert averaged.average_bpb == pytest.approx(4.0)


def test_a_negative_interval_is_refused() -> None:
    with pytest.raises(RecipeError, match="validate_every_seconds = -1"):
        load_recipe("cpu", ["train.validate_every_seconds=-1"])
