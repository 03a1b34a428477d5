"""Sampling: greedy, nucleus, seeds, and text that runs past the context."""

import pytest
import torch

import underpar
from tiny import TinyRun
from underpar.api import Model
from underpar.errors import UnderparError
from underpar.infer.generate import Sampling, choose


@pytest.fixture(scope="module")
def model(tiny_run: TinyRun) -> Model:
    return underpar.load(tiny_run.folder.artifact_file)


def test_same_seed_same_text(model: Model) -> None:
    first = model.generate("The ", max_tokens=40, seed=3)
    assert first == model.generate("The ", max_tokens=40, seed=3)
    assert first != model.generate("The ", max_tokens=40, seed=4)
    assert first


def test_streaming_gives_the_same_text(model: Model) -> None:
    pieces = list(model.stream("A", max_tokens=30, seed=1))
    assert len(pieces) > 5
    assert "".join(pieces) == model.generate("A", max_tokens=30, seed=1)


def test_text_can_outgrow_the_context(model: Model) -> None:
    length = 3 * model.recipe.model.context
    long_prompt = "word " * length
    assert model.generate("Once", max_tokens=length, temperature=1.0, top_p=1.0)
    assert isinstance(model.generate(long_prompt, max_tokens=5), str)


def test_zero_tokens_is_empty(model: Model) -> None:
    assert model.generate("x", max_tokens=0) == ""


def test_temperature_zero_is_greedy() -> None:
    log_probs = torch.tensor([0.1, 0.6, 0.3]).log()
    generator = torch.Generator().manual_seed(0)
    assert {choose(log_probs, Sampling(temperature=0), generator) for _ in range(5)} == {1}


def test_the_nucleus_keeps_the_likeliest_share() -> None:
    log_probs = torch.tensor([0.5, 0.3, 0.15, 0.05]).log()
    generator = torch.Generator().manual_seed(0)
    drawn = {choose(log_probs, Sampling(temperature=1, top_p=0.7), generator) for _ in range(300)}
    assert drawn == {0, 1}


@pytest.mark.parametrize(
    "bad", [{"temperature": -1}, {"top_p": 0}, {"top_p": 2}, {"max_tokens": -1}]
)
def test_senseless_options_are_refused(model: Model, bad: dict[str, float]) -> None:
    with pytest.raises(UnderparError, match=next(iter(bad))):
        model.generate("x", **bad)
