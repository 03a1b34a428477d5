"""SGD on priced tokens: the steps themselves, and what each adapter of this kind may change."""

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lever_stacks import CPU, batch_of, randomized, stack_with
from underpar.errors import RecipeError, RuleError
from underpar.infer.predictor import Predictor
from underpar.infer.sgd import SGD, Descent, backward, gradients_on
from underpar.levers import lever_module
from underpar.model import sliced_head
from underpar.model.gpt import GPT
from underpar.train.step import mean_loss

ADAPTERS = ("adapt_scales", "adapt_bias", "ttt_e2e", "stream_sgd")
SMALL = stack_with("softcap", "loop")


def open_predictor(*names: str, **changes: Any) -> Predictor:
    adapters = []
    for name in names:
        module = lever_module(name)
        adapters.append(module.plug(module.Settings(**changes), SMALL.model))
    return Predictor(randomized(SMALL), CPU, adapters)


def changed_by(predictor: Predictor) -> set[str]:
    """Weights that differ after one chunk was priced and learned from."""
    before = {name: w.clone() for name, w in predictor.model.state_dict().items()}
    batch = batch_of([60, 90], predictor.context)
    predictor.nll(batch)
    predictor.adapt(batch)
    after = predictor.model.state_dict()
    return {name for name in before if not torch.equal(before[name], after[name])}


@given(
    momentum=st.sampled_from([0.0, 0.5, 0.9]),
    clip=st.sampled_from([0.0, 0.5, 100.0]),
    num_steps=st.integers(1, 5),
    horizon=st.integers(0, 6),
)
@settings(deadline=None, max_examples=30)
def test_steps_are_those_of_torch(
    momentum: float, clip: float, num_steps: int, horizon: int
) -> None:
    torch.manual_seed(0)
    ours = {name: torch.randn(shape) for name, shape in (("a", (3, 4)), ("b", (5,)))}
    theirs = [p.clone() for p in ours.values()]
    adapter = SGD(Descent(0.1, momentum, clip, horizon_chunks=horizon), ("*",))
    parameters = adapter.parameters(ours)
    optimizer = torch.optim.SGD(theirs, lr=0.1, momentum=momentum)
    for step in range(num_steps):
        for mine, other in zip(parameters, theirs, strict=True):
            mine.grad = torch.randn(mine.shape)
            other.grad = mine.grad.clone()
        adapter.update(parameters)
        if clip:
            torch.nn.utils.clip_grad_norm_(theirs, clip)
        # Spec: lr (1 + cos(pi k / (K - 1))) / 2, and the last chunk is not trained on.
        falls = horizon and step < horizon - 1
        scale = (1 + np.cos(np.pi * step / (horizon - 1))) / 2 if falls else float(horizon == 0)
        optimizer.param_groups[0]["lr"] = 0.1 * scale
        optimizer.step()
    for mine, other in zip(parameters, theirs, strict=True):
        torch.testing.assert_close(mine, other)


def test_a_clipped_step_is_as_long_as_the_clip() -> None:
    parameter = torch.zeros(100)
    adapter = SGD(Descent(lr=0.5, clip=2.0), ("w",))
    (tensor,) = adapter.parameters({"w": parameter, "other": torch.zeros(2)})
    tensor.grad = torch.full((100,), 7.0)
    adapter.update([tensor])
    assert float(parameter.norm()) == pytest.approx(0.5 * 2.0, rel=1e-4)


def test_the_rate_falls_by_chunk_not_by_step() -> None:
    parameter = torch.zeros(1)
    adapter = SGD(Descent(lr=1.0, momentum=0.0, clip=0.0, epochs=2, horizon_chunks=3), ("w",))
    (tensor,) = adapter.parameters({"w": parameter})
    steps = []
    for _ in range(8):
        before = float(parameter)
        tensor.grad = -torch.ones(1)
        adapter.update([tensor])
        steps.append(float(parameter) - before)
    assert steps == pytest.approx([1, 1, 0.5, 0.5, 0, 0, 0, 0])


@pytest.mark.parametrize("num_chunks", [1, 2, 5, 344])
def test_the_cosine_starts_at_the_peak_and_ends_at_zero(num_chunks: int) -> None:
    scales = [Descent(horizon_chunks=num_chunks).scale(k) for k in range(num_chunks + 2)]
    assert scales[num_chunks - 1 :] == [0.0] * 3
    assert num_chunks == 1 or scales[0] == 1.0
    assert scales == sorted(scales, reverse=True)
    assert Descent().scale(10**6) == 1.0


def test_a_tensor_without_gradient_stays() -> None:
    used, unused = torch.ones(2), torch.ones(2)
    adapter = SGD(Descent(), ("*",))
    parameters = adapter.parameters({"used": used, "unused": unused})
    used.grad = torch.ones(2)
    adapter.update(parameters)
    assert not torch.equal(used, torch.ones(2))
    assert torch.equal(unused, torch.ones(2))


def test_gradients_in_slices_are_those_of_the_mean(monkeypatch: pytest.MonkeyPatch) -> None:
    model = randomized(SMALL)
    batch = batch_of([50, 70], 128)
    mean_loss(model, batch).backward()
    whole = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    monkeypatch.setattr(sliced_head, "ROWS", 32)
    named = dict(model.named_parameters())
    with gradients_on(list(named.values())):
        backward(model, batch, len(batch.targets), torch.float32)
        assert {n for n, p in named.items() if p.grad is not None} == set(whole)
        for name, grad in whole.items():
            torch.testing.assert_close(named[name].grad, grad, rtol=1e-4, atol=1e-6)
    assert all(p.grad is whole[n] for n, p in named.items() if n in whole)


def test_flags_and_gradients_come_back_after_an_error() -> None:
    asked, still = torch.ones(2, requires_grad=True), torch.ones(2)
    grad = asked.grad = torch.ones(2)
    with pytest.raises(ZeroDivisionError), gradients_on([asked, still]):
        assert asked.grad is None and still.requires_grad
        (asked * still).sum().backward()
        1 / 0  # noqa: B018
    assert asked.requires_grad and asked.grad is grad
    assert not still.requires_grad and still.grad is None


@pytest.mark.parametrize("name", ADAPTERS)
def test_a_zero_rate_leaves_the_state(name: str) -> None:
    rates = {"lr": 0.0} | ({"cap_lr": 0.0} if name == "adapt_scales" else {})
    predictor = open_predictor(name, **rates)
    state = predictor.state_hash()
    assert changed_by(predictor) == set()
    assert predictor.state_hash() == state


@pytest.mark.parametrize("name", ADAPTERS)
def test_text_that_was_not_priced_is_refused(name: str) -> None:
    predictor = open_predictor(name)
    state = predictor.state_hash()
    with pytest.raises(RuleError, match="not been priced"):
        predictor.adapt(batch_of([60], predictor.context))
    assert predictor.state_hash() == state


@pytest.mark.parametrize("name", ADAPTERS)
def test_learning_helps_with_the_same_text(name: str) -> None:
    predictor = open_predictor(name)
    batch = batch_of([60, 90], predictor.context)
    before = predictor.nll(batch).mean()
    predictor.adapt(batch)
    assert predictor.nll(batch).mean() < before


@pytest.mark.parametrize(
    ("share", "first"), [(0.25, 8), (0.5, 5), (0.09, 10), (1.0, 0), (1e-9, 10)]
)
def test_end_to_end_changes_the_last_mlps_and_nothing_else(share: float, first: int) -> None:
    assert SMALL.model.num_layers == 11
    layers = range(first, 11)
    wanted = {f"blocks.{i}.mlp.{part}.weight" for i in layers for part in ("up", "down")}
    assert changed_by(open_predictor("ttt_e2e", share=share)) == wanted


def test_floats_do_not_shift_the_first_block() -> None:
    spec = dataclasses.replace(SMALL.model, num_layers=10)
    module = lever_module("ttt_e2e")
    patterns = module.plug(module.Settings(share=0.9), spec).patterns
    # Each layer by its name in a GPT and in the main network of an H-Net.
    assert patterns[:2] == ("blocks.1.mlp.*", "main.blocks.1.mlp.*") and len(patterns) == 2 * 9


def test_the_stream_changes_every_weight_that_has_a_gradient() -> None:
    predictor = open_predictor("stream_sgd")
    # A step on the soft cap is less than the last bit of 30.
    named = set(dict(predictor.model.named_parameters())) - {"levers.softcap.cap_both"}
    assert changed_by(predictor) - {"levers.softcap.cap_both"} == named


def test_patterns_choose() -> None:
    predictor = open_predictor("stream_sgd", patterns=("blocks.0.attn.*", "embedding.*"))
    attention = {f"blocks.0.attn.{part}.weight" for part in "qkvo"}
    assert changed_by(predictor) == attention | {"embedding.weight"}
    with pytest.raises(RecipeError, match=r"nothing\.\*"):
        open_predictor("stream_sgd", patterns=("nothing.*",))


def test_a_bias_of_zeros_is_no_bias_and_the_learned_one_is_all_that_changes() -> None:
    plain, biased = open_predictor(), open_predictor("adapt_bias")
    batch = batch_of([60, 90], plain.context)
    assert torch.equal(plain.log_probs(batch), biased.log_probs(batch))
    assert changed_by(biased) == {"levers.adapt_bias.bias"}
    logs, before = biased.log_probs(batch), plain.log_probs(batch)
    bias = biased.model.state_dict()["levers.adapt_bias.bias"]
    seen = torch.bincount(batch.targets, minlength=len(bias))
    assert bias[seen.argmax()] > 0
    torch.testing.assert_close(logs.exp().sum(-1), torch.ones(len(logs)))
    assert not torch.allclose(logs, before)
    stepper = biased.stepper(1)
    for t in range(20):
        stepped = stepper.step(batch.inputs[t : t + 1])[0]
        torch.testing.assert_close(stepped, logs[t], rtol=0, atol=1e-4)


def test_a_bias_is_attached_once() -> None:
    module = lever_module("adapt_bias")
    model: GPT = randomized(SMALL)
    for again in (False, True):
        adapter = module.plug(module.Settings(), SMALL.model)
        if again:
            with pytest.raises(AssertionError):
                adapter.attach(model)
        else:
            adapter.attach(model)


@pytest.mark.parametrize("name", ["adapt_bias", "ttt_e2e", "stream_sgd"])
@pytest.mark.parametrize(
    "wrong", [{"lr": -1.0}, {"momentum": 1.0}, {"clip": -0.1}, {"epochs": 0}, {"epochs": 10**9}]
)
def test_wrong_settings_are_refused(name: str, wrong: dict[str, float]) -> None:
    (key,) = wrong
    with pytest.raises(RecipeError, match=rf"levers\.{name}\.{key} = "):
        lever_module(name).Settings(**wrong)


@pytest.mark.parametrize("wrong", [{"horizon_chunks": -1}, {"share": 0.0}, {"share": 1.5}])
def test_wrong_settings_of_the_last_mlps_are_refused(wrong: dict[str, float]) -> None:
    (key,) = wrong
    with pytest.raises(RecipeError, match=rf"levers\.ttt_e2e\.{key} = "):
        lever_module("ttt_e2e").Settings(**wrong)
