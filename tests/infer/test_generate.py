"""Sampling: greedy, nucleus, seeds, text past the context, and text behind a transform."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

import underpar
from tiny import TinyRun
from trained import OPERATORS, TRANSFORM_NAMES, any_text, lossless, lossy
from underpar.api import Model
from underpar.errors import UnderparError
from underpar.infer.generate import Sampling, TextWriter, choose, generate


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


def test_top_k_keeps_the_likeliest_tokens() -> None:
    log_probs = torch.tensor([0.1, 0.2, 0.4, 0.3]).log()
    generator = torch.Generator().manual_seed(0)
    sampling = Sampling(temperature=1, top_p=1, top_k=2)
    assert {choose(log_probs, sampling, generator) for _ in range(300)} == {2, 3}
    # The probability that top_p keeps is that of the tokens that top_k has left.
    sampling = Sampling(temperature=1, top_p=0.5, top_k=2)
    assert {choose(log_probs, sampling, generator) for _ in range(300)} == {2}


@pytest.mark.parametrize(
    "bad",
    [
        {"temperature": -1},
        {"top_p": 0},
        {"top_p": 2},
        {"max_tokens": -1},
        {"top_k": -1},
        {"stop": ""},
        {"stop": ["a", ""]},
    ],
)
def test_senseless_options_are_refused(model: Model, bad: dict[str, Any]) -> None:
    with pytest.raises(UnderparError, match=next(iter(bad))):
        model.generate("x", **bad)


@pytest.mark.parametrize("name", TRANSFORM_NAMES)
@settings(deadline=None, max_examples=60)
@given(data=st.data())
def test_text_ends_before_the_first_stop(name: str, data: st.DataObject) -> None:
    tokenizer = lossless(name)
    text = data.draw(st.text("abB .", max_size=30), "text")
    stops = data.draw(st.lists(st.text("abB .", min_size=1, max_size=4), max_size=3), "stops")
    tokens = tokenizer.encode(text.encode()).tolist()
    predictor = Scripted([*tokens, tokenizer.bos_id], tokenizer.vocab_size)
    sampling = Sampling(max_tokens=500, temperature=0, stop=tuple(stops))
    ends = [text.index(stop) for stop in stops if stop in text]
    written = "".join(generate(predictor, tokenizer, "", sampling))
    assert written == text[: min(ends, default=len(text))]


def test_text_waits_no_longer_than_a_stop_asks_for() -> None:
    tokenizer = lossless("identity")
    tokens = tokenizer.encode(b"one two three").tolist()
    predictor = Scripted([*tokens, tokenizer.bos_id], tokenizer.vocab_size)
    sampling = Sampling(max_tokens=500, temperature=0, stop=("tw.", "#"))
    pieces = list(generate(predictor, tokenizer, "", sampling))
    assert "".join(pieces) == "one two three"
    assert len([piece for piece in pieces if piece]) > 3


def write_all(writer: TextWriter, tokens: np.ndarray | list[int]) -> str:
    return "".join([*(writer.write(int(token)) for token in tokens), writer.finish()])


@pytest.mark.parametrize("name", TRANSFORM_NAMES)
@settings(deadline=None, max_examples=80)
@given(text=any_text)
@example(text="The Big Red NASA\n\nA iPhone \ue001 The\ue004 \ue005\ue006A")
def test_tokens_one_by_one_give_the_text(name: str, text: str) -> None:
    for tokenizer in (lossless(name), lossless(name, cross_words=True), lossy(name)):
        assert write_all(TextWriter(tokenizer), tokenizer.encode(text.encode())) == text


@pytest.mark.parametrize("name", TRANSFORM_NAMES)
def test_words_do_not_wait_for_the_end(name: str) -> None:
    tokenizer = lossless(name)
    writer = TextWriter(tokenizer)
    written = ""
    for num_done in range(5):
        for token in tokenizer.encode(b" One TWO Three"):
            written += writer.write(int(token))
        # Only the last word may still be open.
        assert written.startswith(" One TWO Three" * num_done + " One TWO")


@pytest.mark.parametrize("name", [name for name in TRANSFORM_NAMES if name != "identity"])
@settings(deadline=None, max_examples=100)
@given(data=st.data())
def test_an_impossible_sequence_is_still_text(name: str, data: st.DataObject) -> None:
    tokenizer = lossless(name)
    operators = st.integers(4, 3 + len(tokenizer.transform.symbols))
    tokens = data.draw(st.lists(st.one_of(operators, st.integers(0, tokenizer.vocab_size - 1))))
    text = write_all(TextWriter(tokenizer), tokens)
    letters = tokenizer.written(tokens).decode("utf-8", "replace").lower()
    lowered = text.lower()
    for operator in OPERATORS:
        letters, lowered = letters.replace(operator, ""), lowered.replace(operator, "")
    assert lowered.replace(" ", "") == letters.replace(" ", "")


class Scripted:
    """A predictor that is sure of each next token."""

    device = torch.device("cpu")
    context = 1000

    def __init__(self, tokens: list[int], vocab_size: int) -> None:
        self._left = iter(tokens)
        self._vocab_size = vocab_size

    def stepper(self, num_lanes: int) -> Scripted:
        return self

    def step(self, tokens: torch.Tensor) -> torch.Tensor:
        log_probs = torch.full((1, self._vocab_size), -50.0)
        log_probs[0, next(self._left)] = 0.0
        return log_probs

    def reset(self, lanes: torch.Tensor) -> None:
        pass


@pytest.mark.parametrize("name", TRANSFORM_NAMES)
def test_text_behind_a_transform_is_generated_as_text(name: str) -> None:
    tokenizer = lossless(name)
    prompt, rest = "It was the", " NASA launch of an iPhone, at Cape Canaveral."
    tokens = tokenizer.encode((prompt + rest).encode()).tolist()
    predictor = Scripted([*tokens, tokenizer.bos_id], tokenizer.vocab_size)
    sampling = Sampling(max_tokens=500, temperature=0)
    assert "".join(generate(predictor, tokenizer, prompt, sampling)) == rest
