"""Fitting scales and biases of logits: what it gains, what it reads, and that it finds the best."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from tiny import TinyRun
from underpar.build.model import build_model
from underpar.core.runtime import Runtime
from underpar.core.tensor_files import read_tensors
from underpar.data.folder import DataFolder, load_data
from underpar.errors import ArtifactError, RuleError
from underpar.model.gpt import GPT
from underpar.quant import logit_fit
from underpar.quant.logit_fit import Numbers, UnreadText, fit_logits
from underpar.quant.rules import quantize_model
from underpar.quant.schemes import dequantize
from underpar.schema import TrainPart

RULES = ["blocks.*.weight int4:20", "embedding.weight int4:20", "* fp16"]
START = Numbers((1.0,) * 3, (0.0,) * 3)
# Steps of the tiny run, and some of the text behind them.
NUM_STEPS, MOST_TOKENS = 30, 5000


@pytest.fixture(scope="module")
def data(tiny_data: Path) -> DataFolder:
    return load_data(tiny_data)


@pytest.fixture(scope="module")
def part(tiny_run: TinyRun) -> TrainPart:
    return tiny_run.recipe.train


@pytest.fixture(scope="module")
def text(data: DataFolder, part: TrainPart) -> UnreadText:
    return UnreadText(data, part, NUM_STEPS, MOST_TOKENS)


@pytest.fixture
def model(tiny_run: TinyRun) -> GPT:
    """The tiny model, rounded badly."""
    weights, _ = read_tensors(tiny_run.folder.weights_file)
    rounded = quantize_model({name: t.numpy() for name, t in weights.items()}, RULES)
    model = build_model(tiny_run.recipe)
    model.load_state_dict({n: torch.from_numpy(dequantize(t)) for n, t in rounded.items()})
    return model


@pytest.fixture
def classes(model: GPT) -> torch.Tensor:
    return torch.arange(model.spec.vocab_size) % 3


def read_ids(text: UnreadText, runtime: Runtime) -> np.ndarray:
    return np.concatenate([batch.inputs.numpy() for batch in text.batches(64, runtime)])


def test_it_gains_repeats_and_leaves_the_model_alone(
    model: GPT, classes: torch.Tensor, text: UnreadText, runtime: Runtime
) -> None:
    model.train()
    before = {name: t.clone() for name, t in model.state_dict().items()}
    fit = fit_logits(model, classes, START, text, runtime)
    assert fit.nats is not None and fit.nats[1] < fit.nats[0] - 1e-4
    assert fit.numbers != START
    for value in (*fit.numbers.scales, *fit.numbers.biases):
        assert value == round(value, 4)
    assert fit_logits(model, classes, START, text, runtime) == fit
    assert model.training
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, before[name])
    assert all(parameter.grad is None for parameter in model.parameters())


def test_held_out_text_changes_nothing(
    model: GPT, classes: torch.Tensor, data: DataFolder, part: TrainPart, runtime: Runtime
) -> None:
    texts = [
        UnreadText(folder, part, NUM_STEPS, MOST_TOKENS)
        for folder in (data, replace(data, val=None))  # type: ignore[arg-type]
    ]
    first, second = (fit_logits(model, classes, START, text, runtime) for text in texts)
    assert first == second
    with pytest.raises(RuleError, match="the manifest says"):
        UnreadText(replace(data, train=data.val), part, 0, MOST_TOKENS)
    with pytest.raises(RuleError, match="expected a DataFolder"):
        UnreadText(data.val, part, 0, MOST_TOKENS)  # type: ignore[arg-type]


def test_the_text_is_what_the_run_would_have_read_next(
    data: DataFolder, part: TrainPart, text: UnreadText, runtime: Runtime
) -> None:
    before = UnreadText(data, part, 0, NUM_STEPS * 2048)
    assert part.micro_batch_tokens == 1024 and part.num_micro_batches == 2
    assert before.places == [(step, micro) for step in range(NUM_STEPS) for micro in range(2)]
    assert text.places == [(30, 0), (30, 1), (31, 0), (31, 1), (32, 0)]
    # Places of tokens, in place of tokens: none comes twice.
    numbered = replace(data.train, tokens=np.arange(data.train.num_tokens))
    marked = replace(data, train=numbered)
    old, new = (read_ids(replace(t, data=marked), runtime) for t in (before, text))
    assert not set(old) & set(new) and len(set(new)) == len(new) == 5 * 1024
    # All there is, once.
    whole = UnreadText(marked, part, NUM_STEPS, 10**9)
    rest = read_ids(whole, runtime)
    assert len(rest) == len(set(rest)) <= data.train.num_tokens - len(old)
    assert len(rest) > data.train.num_tokens - len(old) - 2048
    shares = [read_ids(whole, Runtime(torch.device("cpu"), rank, 2)) for rank in range(2)]
    assert sorted(np.concatenate(shares)) == sorted(rest)


@pytest.mark.parametrize("more", [0, 1, 10_000])
def test_a_run_that_read_everything_keeps_what_was_given(
    model: GPT, classes: torch.Tensor, data: DataFolder, part: TrainPart, more: int
) -> None:
    # The last step that is read once and whole.
    last = data.train.num_tokens // 2048
    assert UnreadText(data, part, last - 1, MOST_TOKENS).places == [(last - 1, 0), (last - 1, 1)]
    text = UnreadText(data, part, last + more, MOST_TOKENS)
    start = Numbers((0.9, 1.0, 1.1), (0.0, 0.5, 0.0))
    fit = fit_logits(model, classes, start, text, Runtime(torch.device("cpu")))
    assert not text.places and fit.numbers == start and fit.nats is None


@pytest.mark.parametrize(
    "fitted", [Numbers((1.0,) * 3, (0.0, 3.0, 0.0)), Numbers((1.0, -0.1, 1.0), (0.0,) * 3)]
)
def test_what_shows_no_gain_is_not_kept(
    model: GPT,
    classes: torch.Tensor,
    text: UnreadText,
    runtime: Runtime,
    monkeypatch: pytest.MonkeyPatch,
    fitted: Numbers,
) -> None:
    monkeypatch.setattr(logit_fit.LogitProblem, "descend", lambda *_: fitted)
    fit = fit_logits(model, classes, START, text, runtime)
    assert fit.numbers == START and fit.nats is not None and fit.nats[0] == fit.nats[1]


def test_broken_weights_are_said(
    model: GPT, classes: torch.Tensor, text: UnreadText, runtime: Runtime
) -> None:
    with torch.no_grad():
        model.embedding.weight[5] = torch.nan
    with pytest.raises(ArtifactError, match="logits are NaN or infinite"):
        fit_logits(model, classes, START, text, runtime)


def test_slope_and_curvature_are_those_of_autograd(model: GPT, runtime: Runtime) -> None:
    torch.manual_seed(0)
    vocab = model.spec.vocab_size
    one_hot = F.one_hot(torch.arange(vocab) * 3 // vocab, 3).float()
    example = logit_fit.Example(torch.randn(40, model.spec.dim), torch.randint(vocab, (40,)))
    values = torch.tensor([1.1, 0.9, 1.0, 0.2, 0.0, -0.3])

    def nats(values: torch.Tensor) -> Any:
        scales, biases = one_hot @ values[:3], one_hot @ values[3:]
        logits = model.head(example.hidden) * scales + biases
        return F.cross_entropy(logits, example.targets, reduction="sum")

    with torch.no_grad():
        problem = logit_fit.LogitProblem(model, one_hot, runtime)
        sums = problem.measure(example, logit_fit.as_numbers(values))
    slope = torch.autograd.functional.jacobian(nats, values)
    curvature = torch.autograd.functional.hessian(nats, values)
    close: dict[str, Any] = {"rtol": 1e-3, "atol": 1e-3, "check_dtype": False}
    torch.testing.assert_close(sums.nats, nats(values).detach(), **close)
    torch.testing.assert_close(sums.slope, slope, **close)
    torch.testing.assert_close(sums.curvature, curvature, **close)
    assert float(sums.num_tokens) == 40


def test_it_ends_at_the_minimum(
    model: GPT, classes: torch.Tensor, text: UnreadText, runtime: Runtime
) -> None:
    fits = [fit_logits(model, classes, START, text, runtime, num_steps) for num_steps in (2, 6)]
    few, many = (np.array((*fit.numbers.scales, *fit.numbers.biases)) for fit in fits)
    assert np.abs(few - many).max() < 5e-3
