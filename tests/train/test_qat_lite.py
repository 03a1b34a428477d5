"""QAT-lite by hand: when it acts, what it adds, how little that is; and penalties over ranks."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from thread_ranks import unheard
from underpar.build.levers import lever_settings, plug_levers
from underpar.build.model import build_model
from underpar.core.runtime import Runtime
from underpar.data.batch import Batch
from underpar.data.loader import MicroBatch, micros_of_rank
from underpar.data.made_up import made_up_batch
from underpar.errors import RecipeError
from underpar.levers.qat_lite import BITS, SIGMAS, Lever, Settings
from underpar.levers.ste import round_rows
from underpar.model.gpt import GPT
from underpar.model.network import EAGER
from underpar.quant.rounding import round_tensor
from underpar.quant.schemes import dequantize, parse_scheme
from underpar.recipe import load_recipe
from underpar.schema import ModelSpec
from underpar.train.step import accumulate, sum_penalties

CPU = torch.device("cpu")
ALONE = Runtime(CPU)
DRAWN = [f"blocks.{layer}.attn.{part}.weight" for layer in (7, 8, 9, 10) for part in "qk"]


@pytest.fixture
def model() -> GPT:
    torch.manual_seed(0)
    recipe = load_recipe("pr1894+cpu")
    return build_model(recipe)


def lever_of(model: GPT, **values: Any) -> Lever:
    return Lever(Settings(**values), model.spec)


def by_hand(weight: Tensor) -> np.ndarray:
    """The nearest of 63 multiples of a row's step, one element at a time."""
    out = np.zeros(weight.shape)
    for i, row in enumerate(weight.detach().double().numpy()):
        step = float(np.float16(12.85 * row.std(ddof=1) / 31))
        out[i] = [step * max(-31, min(31, round(x / step))) for x in row]
    return out


def test_the_penalty_is_the_mean_distance_from_the_rounding(model: GPT) -> None:
    value = lever_of(model).penalty(model, 8, 0.775)
    matrices = [model.get_parameter(name) for name in DRAWN]
    distances = [np.square(w.detach().double().numpy() - by_hand(w)).mean() for w in matrices]
    # Half of the way from 0.55 to 1.
    assert value is not None
    assert float(value.detach()) == pytest.approx(0.02 * 0.5 * np.mean(distances), rel=1e-4)


def test_rounding_is_that_of_the_packer() -> None:
    weight = torch.randn(8, 1000, generator=torch.Generator().manual_seed(0))
    weight[0, 0] = 1000.0
    ours = round_rows(weight, BITS, SIGMAS).numpy()
    packed = dequantize(round_tensor(weight.numpy(), parse_scheme("int6:12.85")))
    np.testing.assert_array_equal(ours, packed)
    assert ours[0, 0] == pytest.approx(12.85 * weight[0].numpy().std(ddof=1), rel=1e-3)


def test_a_row_without_deviation_is_harmless() -> None:
    weight = torch.stack((torch.zeros(8), torch.full((8,), 0.25), torch.arange(8.0)))
    assert torch.isfinite(round_rows(weight, BITS, SIGMAS)).all()
    assert not round_rows(weight, BITS, SIGMAS)[0].any()


@pytest.mark.parametrize(
    ("step", "p", "acts"),
    [(0, 0.0, False), (100, 0.549, False), (100, 0.55, True), (101, 0.9, False), (104, 0.9, True)],
)
def test_it_acts_late_and_every_fourth_step(model: GPT, step: int, p: float, acts: bool) -> None:
    assert (lever_of(model).penalty(model, step, p) is not None) == acts


def test_it_rises_from_nothing(model: GPT) -> None:
    lever = lever_of(model, strength=1.0, start=0.5)
    values = [lever.penalty(model, 0, p) for p in (0.5, 0.75, 1.0)]
    first, half, whole = (float(value.detach()) for value in values if value is not None)
    assert first == 0 and whole > 0
    assert half == pytest.approx(whole / 2)


@pytest.mark.parametrize("total", [False, True])
def test_only_the_distance_has_a_gradient(model: GPT, total: bool) -> None:
    value = lever_of(model, total=total).penalty(model, 0, 1.0)
    assert value is not None
    value.backward()
    moved = {name for name, p in model.named_parameters() if p.grad is not None}
    assert moved == set(DRAWN)
    for name in DRAWN:
        weight = model.get_parameter(name)
        share = 8 if total else 8 * weight.numel()
        expected = 2 * 0.02 * (weight.detach().double().numpy() - by_hand(weight)) / share
        assert weight.grad is not None
        assert np.allclose(weight.grad.numpy(), expected, rtol=1e-3, atol=1e-5 * expected.max())


def test_as_published_it_is_far_too_small_to_act() -> None:
    # A query matrix at full size, as it starts; 36 million elements share a clipped norm of 0.3.
    weight = nn.init.orthogonal_(torch.empty(512, 512), generator=torch.Generator().manual_seed(0))
    distance = float((weight - round_rows(weight, BITS, SIGMAS)).abs().mean())
    loss_gradient = 0.3 / 36e6**0.5
    published = 2 * 0.02 * distance / (8 * weight.numel())
    assert published < 1e-5 * loss_gradient
    assert 0.1 < published * weight.numel() / loss_gradient < 10


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"layers": ()}, "levers.qat_lite.layers is empty"),
        ({"strength": -1.0}, "levers.qat_lite.strength = -1.0: expected 0 or more"),
        ({"start": 1.0}, "levers.qat_lite.start = 1.0: expected 0 up to 1"),
        ({"every": 0}, "levers.qat_lite.every = 0: expected at least 1"),
        ({"layers": (11,)}, "levers.qat_lite: layer 11 is not one of 0 to 10"),
    ],
)
def test_bad_settings_are_refused(values: dict[str, Any], message: str) -> None:
    with pytest.raises(RecipeError, match=message) as caught:
        Lever(Settings(**values), ModelSpec())
    assert "\n" not in str(caught.value)


def test_the_published_recipe_takes_it() -> None:
    recipe = load_recipe("pr1894", ["levers.qat_lite=true"])
    assert lever_settings(recipe)["qat_lite"] == Settings()
    assert list(plug_levers(recipe, "train")) == ["qat_lite"]


class Constant:
    """A penalty of so many times the sum of the embeddings, in even steps."""

    def __init__(self, factor: float) -> None:
        self.factor = factor

    def penalty(self, model: nn.Module, step: int, p: float) -> Tensor | None:
        return None if step % 2 else self.factor * p * model.get_parameter("embedding.weight").sum()


def test_penalties_add_up(model: GPT) -> None:
    levers = [Constant(1.0), Constant(2.0)]
    total = float(model.embedding.weight.detach().sum())
    value = sum_penalties(levers, model, 0, 0.5)
    assert value is not None
    assert float(value.detach()) == pytest.approx(1.5 * total, rel=1e-5)
    assert sum_penalties(levers, model, 1, 0.5) is None
    assert sum_penalties([], model, 0, 0.5) is None


def batches_of(rank: int, world: int) -> Iterator[Batch]:
    rng = np.random.default_rng(0)
    made = [made_up_batch(MicroBatch(64, 32), 512, rng, "documents") for _ in range(4)]
    return iter(made[rank::world])


def gradients_of(
    model: GPT, runtime: Runtime = ALONE, penalty: Any = None
) -> tuple[float, dict[str, Tensor]]:
    model.zero_grad()
    loss = accumulate(
        model,
        batches_of(runtime.rank, runtime.world),
        [0.25] * (4 // runtime.world),
        runtime,
        EAGER,
        penalty,
    )
    grads = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    return float(loss), grads


def test_a_penalty_joins_the_gradient_and_not_the_loss(model: GPT) -> None:
    loss, plain = gradients_of(model)
    asked: list[int] = []

    def penalty() -> Tensor | None:
        asked.append(1)
        return sum_penalties([Constant(2.0)], model, 0, 0.5)

    with_it, grads = gradients_of(model, penalty=penalty)
    # Once a step, not once a micro-batch.
    assert asked == [1]
    assert with_it == loss
    torch.testing.assert_close(grads["embedding.weight"], plain["embedding.weight"] + 1.0)
    del grads["embedding.weight"], plain["embedding.weight"]
    torch.testing.assert_close(grads, plain)
    _, same = gradients_of(model, penalty=lambda: None)
    torch.testing.assert_close({n: same[n] for n in plain}, plain)


@pytest.mark.parametrize("world", [2, 4])
def test_ranks_count_a_penalty_once(model: GPT, world: int) -> None:
    def penalty() -> Tensor | None:
        return sum_penalties([Constant(2.0)], model, 0, 0.5)

    _, expected = gradients_of(model, penalty=penalty)
    # The sum over ranks, taken here by hand.
    parts = [gradients_of(model, unheard(rank, world), penalty)[1] for rank in range(world)]
    summed = {name: torch.stack([part[name] for part in parts]).sum(0) for name in expected}
    torch.testing.assert_close(summed, expected)


def test_the_last_rank_has_the_last_micro_batch() -> None:
    for world in (1, 2, 4, 8):
        assert micros_of_rank(8, world - 1, world)[-1] == 7
