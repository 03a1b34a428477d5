"""Tuning the small parameters of a rounded model: what it gains, what it touches, what it reads."""

import math
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from thread_ranks import Broken
from tiny import TinyRun
from underpar.build.model import build_model
from underpar.core.runtime import Runtime
from underpar.core.tensor_files import read_tensors
from underpar.data.folder import DataFolder, load_data
from underpar.errors import ArtifactError, RecipeError, RuleError
from underpar.infer.predictor import Predictor
from underpar.model.gpt import GPT
from underpar.model.kv_cache import PackedCache
from underpar.quant.calibration import SelfGenerated, TrainingText
from underpar.quant.rules import quantize_model
from underpar.quant.schemes import dequantize
from underpar.quant.tune import Settings, tune

FEW = Settings(steps=6, lr=0.01)
RULES = ["blocks.*.weight int4:20", "embedding.weight int4:20", "* fp16"]


@pytest.fixture(scope="module")
def data(tiny_data: Path) -> DataFolder:
    return load_data(tiny_data)


@pytest.fixture(scope="module")
def text(data: DataFolder) -> TrainingText:
    return TrainingText(data, num_batches=8, batch_tokens=600)


@pytest.fixture(scope="module")
def teacher(tiny_run: TinyRun) -> GPT:
    model = build_model(tiny_run.recipe)
    model.load_state_dict(read_tensors(tiny_run.folder.weights_file)[0])
    return model


@pytest.fixture
def model(teacher: GPT, tiny_run: TinyRun) -> GPT:
    """The teacher, rounded badly."""
    weights = {name: t.numpy() for name, t in teacher.state_dict().items()}
    rounded = quantize_model(weights, RULES)
    model = build_model(tiny_run.recipe)
    model.load_state_dict({n: torch.from_numpy(dequantize(t)) for n, t in rounded.items()})
    return model


@pytest.fixture
def names(model: GPT) -> list[str]:
    """Vectors, gates and gains."""
    small = [name for name, p in model.named_parameters() if p.numel() <= 1000]
    assert len(small) > 6
    return small


@torch.no_grad()
def nats_apart(model: GPT, teacher: GPT, text: TrainingText, runtime: Runtime) -> float:
    """Divergence a token on batches that tuning never reads."""
    model.set_progress(1.0)
    total, num_tokens = 0.0, 0
    for batch in replace(text, seed=99).batches(model.spec.context, runtime):
        logits, other = (m(batch.inputs, PackedCache(batch.segments)) for m in (model, teacher))
        logs = [z.log_softmax(-1) for z in (logits, other)]
        total += float(F.kl_div(*logs, reduction="sum", log_target=True))
        num_tokens += len(batch.inputs)
    return total / num_tokens


def load(model: GPT, values: dict[str, Tensor]) -> None:
    model.load_state_dict({**model.state_dict(), **values})


def test_a_rounded_model_comes_closer(
    model: GPT, names: list[str], teacher: GPT, text: TrainingText, runtime: Runtime
) -> None:
    before = nats_apart(model, teacher, text, runtime)
    tuned = tune(model, names, teacher, text, runtime, Settings(steps=20, lr=0.01))
    load(model, tuned)
    assert nats_apart(model, teacher, text, runtime) < 0.9 * before


def test_only_what_is_named_is_returned_and_it_fits_fp16(
    model: GPT, names: list[str], teacher: GPT, text: TrainingText, runtime: Runtime
) -> None:
    few = names[:3]
    tuned = tune(model, few, teacher, text, runtime, FEW)
    assert list(tuned) == few
    for name, value in tuned.items():
        parameter = model.get_parameter(name)
        assert value.dtype == torch.float16 and value.shape == parameter.shape
        assert value.isfinite().all() and not torch.equal(value.float(), parameter)


def test_twice_the_same_is_the_same_bits(
    model: GPT, names: list[str], teacher: GPT, text: TrainingText, runtime: Runtime
) -> None:
    tuned, again = (tune(model, names, teacher, text, runtime, FEW) for _ in range(2))
    assert all(torch.equal(tuned[name], again[name]) for name in names)
    other = tune(model, names, teacher, replace(text, seed=5), runtime, FEW)
    assert not all(torch.equal(tuned[name], other[name]) for name in names)


def halves_of(model: GPT, names: list[str]) -> dict[str, Tensor]:
    return {name: model.get_parameter(name).detach().half() for name in names}


@pytest.mark.parametrize("settings", [Settings(steps=4, lr=30.0), Settings(steps=4, lr=1e30)])
def test_what_is_no_better_is_not_taken(
    settings: Settings,
    model: GPT,
    names: list[str],
    teacher: GPT,
    text: TrainingText,
    runtime: Runtime,
) -> None:
    tuned, start = tune(model, names, teacher, text, runtime, settings), halves_of(model, names)
    assert all(torch.equal(tuned[name], start[name]) for name in names)


def test_a_model_like_its_teacher_stays_as_it_is(
    names: list[str], teacher: GPT, text: TrainingText, runtime: Runtime
) -> None:
    halves = deepcopy(teacher)
    load(halves, {name: value.float() for name, value in halves_of(teacher, names).items()})
    same = deepcopy(halves)
    tuned, start = tune(same, names, halves, text, runtime, FEW), halves_of(same, names)
    assert all(torch.equal(tuned[name], start[name]) for name in names)


@pytest.mark.parametrize("breaks", [False, True])
def test_both_models_come_back_as_they_were(
    breaks: bool,
    model: GPT,
    names: list[str],
    teacher: GPT,
    text: TrainingText,
    runtime: Runtime,
) -> None:
    model.train().set_progress(0.1)
    model.blocks[0].eval()
    model.get_parameter(names[0]).requires_grad_(False)
    model.get_parameter(names[1]).grad = torch.ones_like(model.get_parameter(names[1]))

    def state(network: GPT) -> list[Any]:
        modules = [m.training for m in network.modules()]
        about = [(p.requires_grad, id(p.grad), p.data_ptr()) for p in network.parameters()]
        return [modules, about, network.plan]

    both = (model, teacher)
    about, random = [state(each) for each in both], torch.get_rng_state()
    weights = [{n: w.clone() for n, w in each.state_dict().items()} for each in both]
    if breaks:
        # After some steps, with gradients everywhere.
        with pytest.raises(ZeroDivisionError):
            tune(model, names, teacher, text, replace(runtime, world=2, transport=Broken(3)), FEW)
    else:
        tune(model, names, teacher, text, runtime, FEW)
    assert [state(each) for each in both] == about
    assert torch.equal(torch.get_rng_state(), random)
    for each, before in zip(both, weights, strict=True):
        assert all(torch.equal(w, before[n]) for n, w in each.state_dict().items())


def test_ranks_add_up_their_gradients(
    model: GPT,
    names: list[str],
    teacher: GPT,
    text: TrainingText,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sent: list[list[Tensor]] = []

    def keep(tensors: Any, runtime: Runtime) -> None:
        sent.append([t.clone() for t in tensors])

    monkeypatch.setattr("underpar.quant.tune.sum_over_ranks", keep)
    once = Settings(steps=1, lr=0.01)
    cpu = torch.device("cpu")
    for rank in (Runtime(cpu), Runtime(cpu, 0, 2), Runtime(cpu, 1, 2)):
        tune(model, names, teacher, text, rank, once)
    # Each rank prices what it holds back, takes a step, and prices that again.
    assert [len(tensors) for tensors in sent] == 3 * [1, len(names), 1]
    alone, first, second = sent[1::3]
    # Batches 0 and 1 are held back. Batch 2 is the first that one rank learns from, and the first
    # of two ranks, whose share of the mean is a half.
    for whole, half, other in zip(alone, first, second, strict=True):
        torch.testing.assert_close(whole, 2 * half, rtol=1e-4, atol=1e-8)
        assert not torch.equal(half, other)


def test_no_steps_need_no_text(
    model: GPT, names: list[str], teacher: GPT, runtime: Runtime
) -> None:
    none: Any = None
    tuned = tune(model, names, teacher, none, runtime, Settings(steps=0))
    assert all(torch.equal(tuned[n], value) for n, value in halves_of(model, names).items())


def test_its_own_text_will_do(model: GPT, names: list[str], teacher: GPT, runtime: Runtime) -> None:
    writer = Predictor(deepcopy(teacher), runtime.device, [])
    written = SelfGenerated(writer.stepper, num_batches=2, num_lanes=2, lane_tokens=64)
    tuned = tune(model, names, teacher, written, runtime, FEW)
    assert list(tuned) == names


def test_other_text_and_too_little_are_refused(
    model: GPT,
    names: list[str],
    teacher: GPT,
    text: TrainingText,
    data: DataFolder,
    runtime: Runtime,
) -> None:
    for other in ([data.val], data, data.val):
        with pytest.raises(RuleError, match="expected TrainingText or SelfGenerated"):
            tune(model, names, teacher, other, runtime, FEW)  # type: ignore[arg-type]
    with pytest.raises(RecipeError, match="tuning on 1 batches of text: expected 2"):
        tune(model, names, teacher, replace(text, num_batches=1), runtime, FEW)


def test_what_cannot_be_tuned_is_refused(
    model: GPT, names: list[str], teacher: GPT, text: TrainingText, runtime: Runtime
) -> None:
    with torch.no_grad():
        model.blocks[1].mlp_scale.mul_(math.inf)
    with pytest.raises(ArtifactError, match="logits are NaN or infinite"):
        tune(model, names, teacher, text, runtime, FEW)
    for bad in ({"steps": -1}, {"lr": 0.0}, {"lr": math.nan}):
        with pytest.raises(RecipeError, match="tuning of"):
            Settings(**bad)  # type: ignore[arg-type]
