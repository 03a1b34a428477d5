"""The Python interface, as the README shows it."""

import inspect
import math
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import underpar
from tiny import TinyRun
from trained import TRANSFORM_NAMES, any_text, lossless
from underpar.api import Model
from underpar.codec.lanes import encode_documents
from underpar.data.folder import load_data
from underpar.data.texts import tokens_and_spans
from underpar.errors import (
    ArtifactError,
    CodecError,
    DataError,
    RecipeError,
    RuleError,
    UnderparError,
)
from underpar.infer.generate import Sampling
from underpar.recipe import from_tree, merge, to_tree

TEXT = "It is a truth universally acknowledged. \u00e9\u4e2d"


@pytest.fixture(scope="module")
def model(tiny_run: TinyRun) -> Model:
    return underpar.load(tiny_run.folder.artifact_file)


@pytest.fixture(scope="module")
def held_out(tiny_run: TinyRun) -> list[bytes]:
    data = load_data(tiny_run.data)
    return [data.tokenizer.decode(data.val.doc(i)) for i in range(data.val.num_documents)]


def with_levers(model: Model, *levers: str) -> Model:
    """The model as if its recipe had named these levers of scoring."""
    tree = merge(to_tree(model.recipe), {"levers": {name: {} for name in levers}})
    return replace(model, artifact=replace(model.artifact, recipe=from_tree(tree)))


def test_load_score_generate_compress(tiny_run: TinyRun) -> None:
    model = underpar.load(str(tiny_run.folder.artifact_file))
    score = model.score(TEXT)
    assert score.num_bytes == len(TEXT.encode())
    assert 0 < score.bpb < 20
    assert isinstance(model.generate("Once upon", max_tokens=4), str)
    data = b"any bytes \xff\x00"
    assert model.decompress(model.compress(data)) == data
    assert model.decompress(model.compress(TEXT, exact=True)) == TEXT.encode()


def test_text_may_be_str_or_bytes(model: Model) -> None:
    assert model.decompress(model.compress(TEXT)) == TEXT.encode()
    assert model.compress(TEXT) == model.compress(TEXT.encode())
    assert model.score(TEXT).bits == model.score(TEXT.encode()).bits
    for wrong in (7, None, [7]):
        with pytest.raises(DataError, match=r"as str or bytes, not (int|NoneType)"):
            model.score(wrong)
    with pytest.raises(DataError, match="not int"):
        model.compress(7)
    with pytest.raises(DataError, match="lone surrogate at character 3"):
        model.compress("abc\ud800")


def test_a_score_is_the_codes_length(model: Model) -> None:
    text = TEXT * 20
    payload = encode_documents(model.predictor, [model.tokenizer.encode(text.encode())], 1)
    assert 8 * len(payload) == pytest.approx(model.score(text).bits, abs=16)


def test_an_empty_text_has_no_score(model: Model) -> None:
    for texts in ("", b"", [], ["a", ""]):
        with pytest.raises(DataError, match="empty"):
            model.score(texts)


@pytest.mark.parametrize("adapt", [False, True])
def test_many_texts_score_as_the_command_scores_them(
    model: Model, tiny_run: TinyRun, held_out: list[bytes], adapt: bool
) -> None:
    name = "adapt" if adapt else "plain"
    ledger = tiny_run.folder.read_json(tiny_run.folder.score_file(name))["ledger"]
    score = model.score(held_out, adapt=adapt)
    assert score.num_bytes == sum(map(len, held_out))
    # The command scores no end of the last document, as nothing follows it.
    for row, entry in zip(ledger[:-1], score.entries[:-1], strict=True):
        assert asdict(entry) == row | {"bits": pytest.approx(row["bits"], rel=1e-5)}
    assert score.entries[-1].num_targets == ledger[-1]["num_targets"] + 1


def test_many_texts_cost_what_each_costs_alone(model: Model, held_out: list[bytes]) -> None:
    together = model.score(held_out[:3])
    alone = [model.score(text).bits for text in held_out[:3]]
    assert [entry.bits for entry in together.entries] == pytest.approx(alone, rel=1e-5)


@pytest.mark.parametrize("lever", ["lora_ttt", "match"])
def test_every_engine_of_scoring_takes_texts(
    model: Model, held_out: list[bytes], lever: str
) -> None:
    bare = replace(model.recipe, levers={**model.recipe.levers})
    del bare.levers["adapt_scales"]
    bare_model = replace(model, artifact=replace(model.artifact, recipe=bare))
    score = with_levers(bare_model, lever).score(held_out[:4], adapt=True)
    assert [entry.num_bytes for entry in score.entries] == [len(text) for text in held_out[:4]]
    assert score.bits != model.score(held_out[:4]).bits


def test_adapting_leaves_the_model_as_it_was(model: Model, held_out: list[bytes]) -> None:
    before = model.predictor.state_hash()
    model.score(held_out[:2], adapt=True)
    assert model.predictor.state_hash() == before
    recipe = replace(model.recipe, levers={"ema": model.recipe.levers["ema"]})
    with pytest.raises(RuleError, match="does not say how to adapt"):
        replace(model, artifact=replace(model.artifact, recipe=recipe)).score("a", adapt=True)


def test_a_model_adapts_to_texts_as_scoring_adapts(model: Model, held_out: list[bytes]) -> None:
    # A step after each document.
    tree = merge(to_tree(model.recipe), {"score": {"adapt_tokens": 1}})
    model = replace(model, artifact=replace(model.artifact, recipe=from_tree(tree)))
    first, second, third = held_out[:3]
    adapted = model.adapted_to([first, second])
    scored = model.score(held_out[:3], adapt=True)
    assert adapted.score(third).bits == pytest.approx(scored.entries[2].bits, rel=1e-6)
    assert adapted.score(third).bits != model.score(third).bits
    # Adapting goes on from there.
    further = model.adapted_to(first).adapted_to(second)
    assert further.score(third).bits == pytest.approx(adapted.score(third).bits, rel=1e-3)
    assert adapted.predictor.state_hash() != model.predictor.state_hash()


def test_only_a_model_that_read_the_same_decompresses(model: Model, held_out: list[bytes]) -> None:
    text = held_out[1] * 2
    adapted = model.adapted_to(held_out[0], ["stream_sgd"], {"levers.stream_sgd.lr": 0.1})
    compressed = adapted.compress(text)
    again = model.adapted_to(held_out[0], ["stream_sgd"], {"levers.stream_sgd.lr": 0.1})
    assert again.decompress(compressed) == text
    with pytest.raises(CodecError, match="compressed with artifact"):
        model.decompress(compressed)


def test_adapters_that_begin_anew_cannot_stay(model: Model) -> None:
    with pytest.raises(RuleError, match="begin anew with each text"):
        model.adapted_to(TEXT, ["lora_ttt"])
    biased = model.adapted_to(TEXT, ["adapt_bias"])
    assert biased.adapted_to(TEXT, ["adapt_bias"]).score(TEXT).bits < model.score(TEXT).bits
    with pytest.raises(RuleError, match="go on with the same levers"):
        biased.adapted_to(TEXT, ["stream_sgd"])
    with pytest.raises(RecipeError, match="no such lever"):
        model.adapted_to(TEXT, ["stream_sdg"])


@pytest.mark.parametrize("name", TRANSFORM_NAMES)
@settings(deadline=None, max_examples=60)
@given(raw=st.one_of(any_text.map(str.encode), st.binary(max_size=40)))
def test_spans_of_tokens_make_up_the_text(name: str, raw: bytes) -> None:
    tokenizer = lossless(name)
    ids, spans = tokens_and_spans(raw, tokenizer)
    assert b"".join(spans) == raw
    assert ids == [*tokenizer.encode(raw).tolist(), tokenizer.bos_id]


def test_log_probs_name_every_token_and_add_up(model: Model) -> None:
    tokens = model.log_probs(TEXT)
    assert b"".join(token.text for token in tokens) == TEXT.encode()
    assert (tokens[-1].token, tokens[-1].text) == (model.tokenizer.bos_id, b"")
    assert sum(token.bits for token in tokens) == pytest.approx(model.score(TEXT).bits)
    adapted = model.log_probs(TEXT * 9, adapt=True)
    assert sum(t.bits for t in adapted) == pytest.approx(model.score(TEXT * 9, adapt=True).bits)


def test_the_likeliest_next_tokens(model: Model) -> None:
    tokens = model.next_tokens("It is a", model.tokenizer.vocab_size)
    assert sum(math.exp(token.log_prob) for token in tokens) == pytest.approx(1, abs=1e-4)
    assert model.next_tokens("It is a", 3) == tokens[:3]
    first = model.generate("It is a", max_tokens=1, temperature=0)
    assert first.encode() == tokens[0].text
    # The same price as in a text.
    priced = model.log_probs("It is a" + first)[-2]
    assert priced.token == tokens[0].token
    assert priced.log_prob == pytest.approx(tokens[0].log_prob, abs=1e-4)


def test_what_is_printed_is_short(model: Model) -> None:
    assert repr(model).startswith("Model(") and len(repr(model)) < 100
    assert f"{model.num_weights:,} weights" in repr(model)
    score = model.score(TEXT)
    assert f"{score.bpb:.4f} bits per byte" in repr(score) and len(repr(score)) < 100


def test_defaults_of_generating_are_those_of_the_command() -> None:
    defaults = {**asdict(Sampling()), "prompt": ""}
    for method in (Model.generate, Model.stream):
        parameters = list(inspect.signature(method).parameters.values())[1:]
        assert {p.name: p.default for p in parameters} == defaults


def test_what_is_loaded_is_what_was_packed(tiny_run: TinyRun, tmp_path: Path) -> None:
    data = bytearray(tiny_run.folder.artifact_file.read_bytes())
    place = int(np.random.default_rng(0).integers(len(data)))
    data[place] ^= 1
    (tmp_path / "bad.upar").write_bytes(bytes(data))
    with pytest.raises(ArtifactError, match=r"bad\.upar"):
        underpar.load(tmp_path / "bad.upar")
    with pytest.raises(UnderparError, match=r"none\.upar"):
        underpar.load(tmp_path / "none.upar")
