"""Both optimizers together, and the averages of weights: invariants of the published recipes."""

import copy
import math
from dataclasses import replace

import pytest
import torch
from torch import nn

from lever_stacks import batch_of
from underpar.build.model import build_model
from underpar.errors import RecipeError
from underpar.levers import ema, lawa
from underpar.model.gpt import GPT
from underpar.recipe import Recipe, TrainPart, load_recipe
from underpar.schema import GROUPS
from underpar.train import schedule
from underpar.train.groups import group_parameters
from underpar.train.optim import Optimizer
from underpar.train.step import mean_loss

PART = TrainPart()


@pytest.fixture(scope="module")
def start(tiny_recipe: Recipe) -> GPT:
    """A fresh model; copy it before use."""
    torch.manual_seed(0)
    return build_model(tiny_recipe)


def train(model: GPT, optimizer: Optimizer, steps: range, layer_scale: float = 1.0) -> list[float]:
    """Norms before the clip; the first layer's matrices get their gradients times `layer_scale`."""
    norms = []
    for step in steps:
        mean_loss(model, batch_of([40, 30], 64, seed=step)).backward()
        for name, parameter in group_parameters(model)["matrix"].items():
            if name.startswith("blocks.0."):
                assert parameter.grad is not None
                parameter.grad *= layer_scale
        norms.append(float(optimizer.step(1.0, 0.9, decay_scales=dict.fromkeys(GROUPS, 0.5))))
    return norms


def drawn(model: GPT) -> None:
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)


def test_07_the_summed_gradient_is_clipped_and_its_norm_returned(start: GPT) -> None:
    model = copy.deepcopy(start)
    optimizer = Optimizer(model, PART)
    for size in (1.0, 1e-6):
        drawn(model)
        for parameter in model.parameters():
            assert parameter.grad is not None
            parameter.grad *= size
        grads = [p.grad for p in model.parameters() if p.grad is not None]
        before = float(nn.utils.get_total_norm(grads))
        norm = optimizer.step(1.0, 0.9)
        assert float(norm) == pytest.approx(before, rel=1e-5)
        after = float(nn.utils.get_total_norm(grads))
        assert after == pytest.approx(min(before, PART.clip), rel=1e-4)
        assert after <= PART.clip * (1 + 1e-6)


def test_10_momentum_as_published() -> None:
    part = load_recipe("pr2014").train
    expected = {0: 0.92, 750: 0.945, 1500: 0.97, 3000: 0.97, 4999: 0.97}
    for step, momentum in expected.items():
        # In the published run step 1,500 was at 142 of 596 s; it counts steps, not seconds.
        for p in (0.0, 0.238, 1.0):
            assert schedule.momentum(part, p, step) == pytest.approx(momentum, abs=1e-12)
    # As a share of the run: 1,500 of 5,000 steps.
    part = TrainPart(budget_seconds=0, budget_steps=5000, momentum_warmup=0.3)
    for step, momentum in expected.items():
        p = schedule.progress(part, 0.0, step, 0)
        assert schedule.momentum(part, p, step) == pytest.approx(momentum, abs=1e-12)


def test_15_an_average_with_the_published_decay() -> None:
    settings = ema.Settings(**load_recipe("pr2014").levers["ema"])
    average = ema.plug(settings, load_recipe("cpu").model)
    start, constant = torch.tensor([1.0, -2.0]), torch.tensor([3.0, 5.0])
    average.start({"w": start})
    for step in range(1, 301):
        average.update({"w": constant}, step)
        expected = constant + 0.9965**step * (start - constant)
        torch.testing.assert_close(average.average()["w"], expected, rtol=0, atol=1e-5)


def test_15_an_average_of_constant_weights_approaches_them_in_closed_form() -> None:
    # Shares 1 / (1 + h t): what is left of the start is the product of t / (t + 1/h).
    horizon, num_steps = 0.06, 300
    average = ema.plug(ema.Settings(horizon), load_recipe("cpu").model)
    start, constant = torch.tensor([1.0, -2.0]), torch.tensor([3.0, 5.0])
    average.start({"w": start})
    for step in range(1, num_steps + 1):
        average.update({"w": constant}, step)
        rest = 1 / horizon
        gone = math.lgamma(step + 1) + math.lgamma(1 + rest) - math.lgamma(step + 1 + rest)
        expected = constant + math.exp(gone) * (start - constant)
        torch.testing.assert_close(average.average()["w"], expected, rtol=0, atol=1e-5)


def test_15_latest_weights_are_the_mean_of_their_snapshots() -> None:
    average = lawa.plug(lawa.Settings(every=3, window=4), load_recipe("cpu").model)
    average.start({"w": torch.tensor(1000.0)})
    for step in range(1, 26):
        average.update({"w": torch.tensor(float(step))}, step)
        # Multiples of 3, and the weights of now.
        taken = [*range(3, step, 3), step][-4:]
        assert float(average.average()["w"]) == pytest.approx(sum(taken) / len(taken))


def test_15_snapshots_begin_below_a_learning_rate() -> None:
    # The rates fall from step 1 on, below a half after step 10.
    average = lawa.plug(lawa.Settings(every=3, window=12, below=0.5), load_recipe("cpu").model)
    average.start({"w": torch.tensor(1000.0)})
    for step in range(1, 21):
        average.update({"w": torch.tensor(float(step))}, step, 1.0 - step / 20)
        taken = [*(s for s in range(3, step, 3) if s > 10), step]
        assert float(average.average()["w"]) == pytest.approx(sum(taken) / len(taken))


def test_15_a_share_of_the_average_is_mixed_with_the_last_weights() -> None:
    weights = {"w": torch.tensor([1.0, -2.0])}
    plain, mixed = (ema.plug(ema.Settings(share=s), load_recipe("cpu").model) for s in (1.0, 0.6))
    for average in (plain, mixed):
        average.start(weights)
    torch.manual_seed(0)
    for step in range(1, 9):
        weights["w"].copy_(torch.randn(2))
        for average in (plain, mixed):
            average.update(weights, step)
    expected = 0.6 * plain.average()["w"] + 0.4 * weights["w"]
    torch.testing.assert_close(mixed.average()["w"], expected)
    # A resumed run goes on from the average itself.
    assert torch.equal(mixed.state()["w"], plain.average()["w"])


def drawn_steps(optimizer: Optimizer, model: GPT, seeds: range) -> None:
    """Steps on made-up gradients that the clip leaves alone."""
    for seed in seeds:
        torch.manual_seed(seed)
        for parameter in model.parameters():
            parameter.grad = 1e-6 * torch.randn_like(parameter)
        optimizer.step(1.0, 0.9)


def test_adam_steps_every_second_time_on_the_sum_of_gradients(start: GPT) -> None:
    model, by_hand = copy.deepcopy(start), copy.deepcopy(start)
    part = replace(PART, adam_every=2)
    optimizer = Optimizer(model, part)
    groups = group_parameters(by_hand)
    oracle = torch.optim.AdamW(
        [
            {"params": [*groups["embed"].values()], "lr": PART.embed_lr, "weight_decay": 0.085},
            {"params": [*groups["scalar"].values()], "lr": PART.scalar_lr, "weight_decay": 0.02},
        ],
        betas=PART.adam_betas,
        eps=1e-8,
    )
    adams = {**groups["embed"], **groups["scalar"]}
    found = dict(model.named_parameters())
    for seed in range(5):
        torch.manual_seed(seed)
        for parameter in by_hand.parameters():
            drawn = 1e-6 * torch.randn_like(parameter)
            parameter.grad = drawn if parameter.grad is None else parameter.grad + drawn
        if seed % 2:
            oracle.step()
            oracle.zero_grad()
        drawn_steps(optimizer, model, range(seed, seed + 1))
        for name, expected in adams.items():
            torch.testing.assert_close(found[name], expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize("stop", [1, 2, 3])
def test_settings_of_both_optimizers_resume_exactly(start: GPT, stop: int) -> None:
    part = replace(PART, adam_every=3, neuron_beta=0.9, query_rows=24)
    whole, first = copy.deepcopy(start), copy.deepcopy(start)
    drawn_steps(Optimizer(whole, part), whole, range(5))
    optimizer = Optimizer(first, part)
    drawn_steps(optimizer, first, range(stop))
    kept = {name: tensor.clone() for name, tensor in optimizer.state().items()}
    again = Optimizer(first, part)
    again.load(kept)
    drawn_steps(again, first, range(stop, 5))
    for a, b in zip(whole.parameters(), first.parameters(), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("stop", [1, 7, 12, 13])
def test_15_a_resumed_average_is_the_same(stop: int) -> None:
    weights = {"w": torch.zeros(3, dtype=torch.float16)}
    whole, first, second = (lawa.LatestWeights(lawa.Settings(every=3, window=4)) for _ in range(3))
    for average in (whole, first, second):
        average.start(weights)
    torch.manual_seed(0)
    for step in range(1, 21):
        # The weights change in place, as a model's do.
        weights["w"].copy_(torch.randn(3))
        whole.update(weights, step)
        (first if step <= stop else second).update(weights, step)
        if step == stop:
            second.load({name: t.clone() for name, t in first.state().items()})
    assert whole.average()["w"].dtype == torch.float32
    assert second.average()["w"].tolist() == whole.average()["w"].tolist()
    assert second.state().keys() == whole.state().keys()


def test_19_groups_have_the_published_sizes() -> None:
    with torch.device("meta"):
        model = build_model(load_recipe("pr2014"))
    groups = group_parameters(model)
    sizes = {name: sum(p.numel() for p in group.values()) for name, group in groups.items()}
    assert sizes == {"embed": 4_194_304, "matrix": 31_719_424, "scalar": 31_943}
    assert sum(p.numel() for p in model.parameters()) == sum(sizes.values()) + 2
    members = [name for group in groups.values() for name in group]
    assert len(members) == len(set(members))


@pytest.mark.parametrize("row_norm", [False, True])
def test_20_scaling_a_layers_gradients_does_nothing(start: GPT, row_norm: bool) -> None:
    models = [copy.deepcopy(start) for _ in range(2)]
    part = replace(PART, clip=0.0, row_norm=row_norm)
    norms = [
        train(model, Optimizer(model, part), range(4), scale)
        for model, scale in zip(models, (1.0, 0.025 / 0.03), strict=True)
    ]
    # Not Adam's tables: it takes whole steps by the sign of gradients that are next to nothing.
    before, *after = (group_parameters(model)["matrix"] for model in (start, *models))
    torch.testing.assert_close(after[0], after[1], rtol=0, atol=1e-4)
    assert all(not torch.allclose(after[0][name], before[name], atol=1e-2) for name in before)
    # With a clip it would change all other gradients.
    assert norms[0][-1] > norms[1][-1] * 1.001


def test_decay_follows_rate_and_scale_in_every_group(start: GPT) -> None:
    model = copy.deepcopy(start)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    scales = {"matrix": 0.25, "embed": 0.5, "scalar": 0.75}
    Optimizer(model, PART).step(lr_scale=0.5, momentum=0.9, decay_scales=scales)
    for group, members in group_parameters(model).items():
        rate, decay = getattr(PART, f"{group}_lr"), getattr(PART, f"{group}_decay")
        for name, parameter in members.items():
            expected = before[name] * (1 - rate * 0.5 * decay * scales[group])
            torch.testing.assert_close(parameter.detach(), expected, rtol=1e-6, atol=0)


def test_a_resumed_optimizer_goes_on_as_if_it_had_not_stopped(start: GPT) -> None:
    whole, first = copy.deepcopy(start), copy.deepcopy(start)
    expected = train(whole, Optimizer(whole, PART), range(6))
    optimizer = Optimizer(first, PART)
    norms = train(first, optimizer, range(3))
    saved = {name: tensor.clone() for name, tensor in optimizer.state().items()}
    second = copy.deepcopy(first)
    resumed = Optimizer(second, PART)
    # What it did before must leave nothing behind.
    drawn(second)
    resumed.step(0.0, 0.9)
    second.load_state_dict(first.state_dict())
    resumed.load(saved)
    kept = {name: tensor.clone() for name, tensor in saved.items()}
    norms += train(second, resumed, range(3, 6))
    assert norms == expected
    ours, theirs = second.state_dict(), whole.state_dict()
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    # The table that was loaded stays the caller's own.
    assert all(torch.equal(saved[name], kept[name]) for name in kept)


def test_loading_the_state_of_no_steps_forgets_all(start: GPT) -> None:
    model = copy.deepcopy(start)
    optimizer = Optimizer(model, PART)
    fresh = {name: tensor.clone() for name, tensor in optimizer.state().items()}
    train(model, optimizer, range(2))
    assert optimizer.state().keys() > fresh.keys()
    model.load_state_dict(start.state_dict())
    optimizer.load(fresh)
    assert optimizer.state().keys() == fresh.keys()
    other = copy.deepcopy(start)
    assert train(model, optimizer, range(3)) == train(other, Optimizer(other, PART), range(3))


def test_adam_may_update_matrices_too(start: GPT) -> None:
    part = TrainPart(matrix_optimizer="adam", matrix_lr=0.01, matrix_decay=0.1, clip=0.0)
    optimizer = Optimizer(start, part)
    weight = start.blocks[0].attn.q.weight
    before = weight.detach().clone()
    for parameter in start.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step(1.0, 0.9)
    assert not optimizer.muon.momenta
    # The first step of Adam is the rate, against the sign of the gradient.
    torch.testing.assert_close(weight, before * (1 - 0.01 * 0.1) - 0.01)
    assert "adam.blocks.0.attn.q.weight.exp_avg" in optimizer.state()


def test_groups_of_adam_may_have_betas_of_their_own(start: GPT) -> None:
    part = replace(PART, embed_betas=(0.5, 0.95), scalar_betas=(0.9, 0.997))
    moments = {}
    for name, settings in (("one", PART), ("own", part)):
        model = copy.deepcopy(start)
        optimizer = Optimizer(model, settings)
        torch.manual_seed(1)
        drawn(model)
        optimizer.step(1.0, 0.9)
        moments[name] = optimizer.state()
    scalar = next(n for n in group_parameters(start)["scalar"])
    for parameter, betas in (("embedding.weight", (0.5, 0.95)), (scalar, (0.9, 0.997))):
        first, second = f"adam.{parameter}.exp_avg", f"adam.{parameter}.exp_avg_sq"
        # After one step the moments are (1 - beta) times the gradient and its square.
        for key, beta, usual in zip((first, second), betas, PART.adam_betas, strict=True):
            ratio = (1 - beta) / (1 - usual)
            torch.testing.assert_close(moments["own"][key], ratio * moments["one"][key])
    assert torch.equal(
        moments["own"]["muon.blocks.0.attn.q.weight"], moments["one"]["muon.blocks.0.attn.q.weight"]
    )


@pytest.mark.parametrize("betas", [(0.9,), (0.9, 1.0), (-0.1, 0.9), (0.9, 0.9, 0.9)])
def test_betas_that_make_no_sense_are_named(betas: tuple[float, ...]) -> None:
    with pytest.raises(RecipeError, match=r"train\.scalar_betas = \[.*expected two numbers"):
        replace(PART, scalar_betas=betas)


def test_cautious_decay_reaches_the_optimizer(start: GPT) -> None:
    optimizer = Optimizer(copy.deepcopy(start), replace(PART, cautious_decay=True))
    assert optimizer.muon.cautious and not Optimizer(start, PART).muon.cautious
