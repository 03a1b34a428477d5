"""Tokenizers: exact round trips over anything, the model's own ids, refusals."""

import hashlib
import random
import re
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from trained import (
    TRANSFORM_NAMES,
    VOCAB_SIZE,
    any_bytes,
    any_text,
    byte_tokenizer,
    demo_lines,
    demo_texts,
    lossless,
    lossy,
    messy_text,
    own_ids,
    train_with,
)
from underpar.data.tokens.byte260 import CONTENT, ByteTokenizer
from underpar.data.tokens.split import _SAFE
from underpar.data.tokens.tokenizer import (
    SentencePieceTokenizer,
    Tokenizer,
    open_tokenizer,
    read_model,
)
from underpar.data.transforms import IDENTITY
from underpar.errors import DataError

ODD_TEXT = (
    "\u2581 a\u2581\u2581b\x00  \t\n\n\r\n\u00bd\ufb01e\u0301\ufeff\U0001f600\u2585\u2047 <s>"
)


def round_trips(tokenizer: Tokenizer, data: bytes) -> bool:
    ids = tokenizer.encode(data)
    return tokenizer.decode(ids) == data and ids.dtype == np.int32 and not (ids < 4).any()


@settings(deadline=None, max_examples=200)
@given(any_text)
def test_text_round_trips_alone_and_in_batches(text: str) -> None:
    tokenizer = lossless()
    ids = tokenizer.encode(text.encode())
    assert round_trips(tokenizer, text.encode())
    assert tokenizer.token_bytes[ids].sum() == len(text.encode())
    batch = tokenizer.encode_texts([text, "x", text])
    first, _, last = np.split(batch.tokens, np.cumsum(batch.counts)[:-1])
    assert first.tolist() == last.tolist() == [1, *ids]


@pytest.mark.parametrize("make", [lossless, lossy, byte_tokenizer])
@settings(deadline=None, max_examples=100)
@given(data=any_bytes)
def test_any_bytes_round_trip(make: Any, data: bytes) -> None:
    assert round_trips(make(), data)


@pytest.mark.parametrize("name", TRANSFORM_NAMES)
@settings(deadline=None, max_examples=60)
@given(text=messy_text)
def test_a_lossy_model_is_still_exact_when_asked(name: str, text: str) -> None:
    assert round_trips(lossy(name), text.encode())


@pytest.mark.parametrize(
    "data",
    [
        b"",
        ODD_TEXT.encode(),
        bytes(range(256)),
        b"\xed\xa0\x80",
        b"\xe2\x96",
        b"\xe2\x96\x81",
        b"\xf4\x90\x80\x80",
        b"<0x41><s></s><pad><unk>",
        b"\xee\x80\x81A \xee\x80A \xee B",
        b"x" * 70_000,
    ],
)
def test_known_hard_cases_round_trip(data: bytes) -> None:
    for name in TRANSFORM_NAMES:
        assert round_trips(lossless(name), data)
        assert round_trips(lossless(name, cross_words=True), data)
        assert round_trips(lossy(name), data)


def test_real_text_round_trips_and_is_compressed() -> None:
    texts = demo_texts()
    pieces = lossless().encode_texts(texts)
    documents = np.split(pieces.tokens, np.cumsum(pieces.counts)[:-1])
    assert [lossless().decode(ids).decode() for ids in documents] == texts
    assert sum(len(text.encode()) for text in texts) / len(pieces.tokens) > 1.5
    assert pieces.tokens.dtype == pieces.source_bytes.dtype == np.int32


def test_odd_bytes_become_byte_pieces() -> None:
    tokenizer = lossless()
    assert tokenizer.encode("\u2581".encode()).tolist() == [4 + 0xE2, 4 + 0x96, 4 + 0x81]
    assert tokenizer.encode(b"\xff").tolist() == [4 + 0xFF]
    around = tokenizer.encode(b"that is the one").tolist()
    for odd in ("\u2581".encode(), b"\xff\xc3"):
        both = tokenizer.encode(b"that is the one" + odd + b"that is the one").tolist()
        assert both == [*around, *(4 + byte for byte in odd), *around]


@pytest.mark.parametrize("name", TRANSFORM_NAMES)
@settings(deadline=None, max_examples=60)
@given(texts=st.lists(messy_text, max_size=5))
@example(texts=["", " ", "a\u2581b", "a\x01", "\ufb01 b", "a b"])
def test_a_lossy_model_gives_its_own_ids_and_says_what_changed(name: str, texts: list[str]) -> None:
    tokenizer = lossy(name)
    pieces = tokenizer.encode_texts(texts)
    assert pieces.tokens.tolist() == own_ids(tokenizer, texts)
    bounds = [0, *np.cumsum(pieces.counts).tolist()]
    for (begin, end), text, changed in zip(pairwise(bounds), texts, pieces.changed, strict=True):
        assert changed == (tokenizer.decode(pieces.tokens[begin:end]) != text.encode())


def test_a_lossy_model_may_put_an_operator_after_a_letter() -> None:
    tokenizer = lossy("caseops")
    # A feminine ordinal becomes a letter, and a word with its operator follows.
    tokens = tokenizer.encode_texts(["\u00aaA b"]).tokens
    assert tokenizer.decode(tokens) == "a\ue001a b".encode()
    assert tokenizer.decode(tokenizer.encode("\u00aaA b".encode())) == "\u00aaA b".encode()


def test_every_character_at_a_cut_keeps_its_ids() -> None:
    is_safe = re.compile(f"[{_SAFE}]").match
    safe = [chr(point) for point in range(0x3000) if is_safe(chr(point))]
    assert len(safe) > 400
    texts = [f"a{c} {c}b\n{c}{c} c{c}\n{d}e {d}" for c, d in pairwise(safe)]
    for name in TRANSFORM_NAMES:
        tokenizer = lossy(name)
        assert tokenizer.encode_texts(texts).tokens.tolist() == own_ids(tokenizer, texts)


def test_pieces_that_hold_a_newline_are_not_cut() -> None:
    content = train_with(
        ["the end.\nthe start, " * 9] * 20, normalization_rule_name="nfkc", vocab_size=285
    )
    tokenizer = SentencePieceTokenizer(content)
    assert any(b"\n" in tokenizer.written([id_])[1:] for id_ in range(tokenizer.vocab_size))
    assert not tokenizer.lossless
    texts = ["the end.\nthe end.\nthe start, the end.\n", "the\nthe end.\n\nend.\n"]
    assert tokenizer.encode_texts(texts).tokens.tolist() == own_ids(tokenizer, texts)


def test_no_texts_and_empty_texts() -> None:
    for tokenizer in (lossless(), lossy(), byte_tokenizer()):
        assert tokenizer.encode_texts([]).counts.tolist() == []
        pieces = tokenizer.encode_texts(["", "", ""])
        assert pieces.tokens.tolist() == [1, 1, 1]
        assert pieces.counts.tolist() == [1, 1, 1]
        assert not pieces.changed.any() and not pieces.source_bytes.any()


def test_facts_of_a_model(tmp_path: Path) -> None:
    tokenizer = lossless()
    (tmp_path / "t.model").write_bytes(tokenizer.content)
    again = open_tokenizer(read_model(tmp_path / "t.model"))
    assert again.identity == tokenizer.identity == hashlib.sha256(tokenizer.content).hexdigest()
    assert tokenizer.vocab_size == VOCAB_SIZE == len(tokenizer.token_bytes)
    assert (tokenizer.bos_id, tokenizer.kind, tokenizer.lossless) == (1, "sentencepiece", True)
    assert tokenizer.token_bytes[:4].tolist() == [0, 0, 0, 0]
    assert tokenizer.token_bytes[4:260].tolist() == [1] * 256
    assert tokenizer.decode([1, 4 + 65, 0, 2, 3]) == b"A"
    assert tokenizer.written([]) == tokenizer.decode([]) == b""


def test_a_transform_is_part_of_the_identity() -> None:
    content = lossless("caseops").content
    identities = {open_tokenizer(content, name).identity for name in ("caseops", "caseops_before")}
    assert len(identities) == 2
    assert hashlib.sha256(content).hexdigest() not in identities


def test_impossible_operators_are_refused() -> None:
    tokenizer = lossless("caseops")
    title, letter = 4, int(tokenizer.encode(b"a")[0])
    assert tokenizer.decode([1, title, letter]) == b"A"
    assert tokenizer.written([1, title, letter]) == "\ue001a".encode()
    for ids in ([title], [title, title, letter], [letter, title, letter], [7]):
        with pytest.raises(DataError, match="stands before no word"):
            tokenizer.decode(ids)


@pytest.mark.parametrize(
    "options",
    [
        {"normalization_rule_name": "nmt_nfkc"},
        {"normalization_rule_name": "nfkc"},
        {"remove_extra_whitespaces": True},
        {"add_dummy_prefix": True},
    ],
)
def test_lossy_models_are_marked(options: dict[str, Any]) -> None:
    tokenizer = open_tokenizer(train_with(demo_lines(), **options))
    assert not tokenizer.lossless
    assert round_trips(tokenizer, ODD_TEXT.encode())


def test_the_same_options_without_a_normalizer_lose_nothing() -> None:
    assert open_tokenizer(train_with(demo_lines())).lossless


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"byte_fallback": False}, "0 of 256 byte pieces"),
        ({"bos_id": 4}, "id 1 is not a control piece"),
        ({"user_defined_symbols": ["\ue001"]}, "pieces for case operators"),
    ],
)
def test_models_that_cannot_be_used_are_refused(options: dict[str, Any], message: str) -> None:
    content = train_with(demo_lines(), **options)
    with pytest.raises(DataError, match=message) as caught:
        open_tokenizer(content)
    assert "\n" not in str(caught.value)


def test_a_model_without_a_piece_for_a_space_is_refused() -> None:
    content = train_with(["abcabcab"] * 50, vocab_size=263)
    with pytest.raises(DataError, match=r"no piece for a space alone \(U\+2581\)"):
        open_tokenizer(content)


@pytest.mark.parametrize(
    ("trained_for", "opened_for", "message"),
    [
        (IDENTITY, "caseops", r"'caseops' needs a piece for U\+E001"),
        (IDENTITY, "caseops_pair", r"'caseops_pair' needs a piece for U\+E001"),
        ("caseops", "caseops_pair", r"'caseops_pair' needs a piece for U\+E005"),
        ("caseops", IDENTITY, "pieces for case operators"),
        ("caseops_pair", IDENTITY, "pieces for case operators"),
        ("caseops", "capsops", "no text transform 'capsops'"),
    ],
)
def test_a_transform_must_fit_the_model(trained_for: str, opened_for: str, message: str) -> None:
    with pytest.raises(DataError, match=message):
        open_tokenizer(lossless(trained_for).content, opened_for)


def test_bytes_take_no_transform() -> None:
    assert isinstance(open_tokenizer(CONTENT), ByteTokenizer)
    with pytest.raises(DataError, match="'caseops' does not work with bytes"):
        open_tokenizer(CONTENT, "caseops")


def test_damaged_models_are_refused_or_stay_exact() -> None:
    rng = random.Random(0)
    num_refused = 0
    content = lossless("caseops").content
    for _ in range(300):
        damaged = bytearray(content)
        for _ in range(rng.randint(1, 3)):
            damaged[rng.randrange(len(damaged))] = rng.randrange(256)
        try:
            tokenizer = open_tokenizer(bytes(damaged), "caseops")
        except DataError:
            num_refused += 1
        else:
            assert round_trips(tokenizer, ODD_TEXT.encode())
            assert tokenizer.encode_texts([ODD_TEXT, " x"]).counts.sum() > 2
    assert 0 < num_refused < 300


@pytest.mark.parametrize("junk", [b"", b"\x0a\x00", b"not a model", b"\x00" * 64, b"\n{", b"{}"])
def test_junk_is_not_a_model(junk: bytes) -> None:
    with pytest.raises(DataError, match=r"not a usable SentencePiece model|not a byte tokenizer"):
        open_tokenizer(junk)


@pytest.mark.parametrize("keep", [10, 1000, -1])
def test_a_cut_model_is_refused(keep: int) -> None:
    with pytest.raises(DataError):
        open_tokenizer(lossless().content[:keep])


def test_a_missing_model_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"gone\.model: tokenizer cannot be read"):
        read_model(tmp_path / "gone.model")


def test_a_giant_model_file_is_refused(tmp_path: Path) -> None:
    with (tmp_path / "big.model").open("wb") as file:
        file.truncate((1 << 26) + 1)
    with pytest.raises(DataError, match="not a tokenizer"):
        read_model(tmp_path / "big.model")


@pytest.mark.parametrize("ids", [[-1], [VOCAB_SIZE], [5, 1 << 40]])
def test_ids_out_of_range_are_refused(ids: list[int]) -> None:
    for read in (lossless().decode, lossless("caseops").decode, lossless().written):
        with pytest.raises(DataError, match="token ids span"):
            read(ids)
