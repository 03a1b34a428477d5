"""What every text transform must do, alone and before every lossless tokenizer."""

import contextlib

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from trained import (
    OPERATORS,
    TRANSFORM_NAMES,
    any_bytes,
    any_text,
    byte_tokenizer,
    demo_texts,
    lossless,
    model_of,
)
from underpar.data.tokens.tokenizer import SentencePieceTokenizer, Tokenizer
from underpar.data.transforms import IDENTITY, open_transform
from underpar.errors import DataError
from underpar.seams import TextTransform

ODD_TEXT = (
    "\u2581 a\u2581\u2581b\x00  \t\n\n\r\n\u00bd\ufb01e\u0301\ufeff\U0001f600\u2585\u2047 <s>"
)
# Operators with spaces and words on either side, and strings of them.
OPERATOR_TEXT = " ".join(f"{op}A {op}b\n{op} The{op}{op} X" for op in OPERATORS)
SENTENCEPIECE = [(name, cross_words) for name in TRANSFORM_NAMES for cross_words in (False, True)]


@pytest.fixture(scope="module", params=TRANSFORM_NAMES)
def transform(request: pytest.FixtureRequest) -> TextTransform:
    return open_transform(request.param)


@pytest.fixture(scope="module", params=[*SENTENCEPIECE, "bytes"], ids=str)
def tokenizer(request: pytest.FixtureRequest) -> Tokenizer:
    return byte_tokenizer() if request.param == "bytes" else lossless(*request.param)


@pytest.fixture(scope="module", params=SENTENCEPIECE, ids=str)
def sentencepiece(request: pytest.FixtureRequest) -> SentencePieceTokenizer:
    return lossless(*request.param)


@settings(deadline=None, max_examples=80)
@given(text=any_text)
@example(text="")
@example(text=OPERATOR_TEXT)
def test_the_inverse_gives_the_text_back(transform: TextTransform, text: str) -> None:
    written = transform.forward(text)
    assert transform.inverse(written) == text
    # The codec reserves room for one operator a code point.
    assert len(written) <= 2 * len(text)


@settings(deadline=None, max_examples=80)
@given(data=any_bytes)
def test_bytes_that_are_no_text_come_back(transform: TextTransform, data: bytes) -> None:
    text = data.decode("utf-8", "surrogateescape")
    written = transform.forward(text)
    assert transform.inverse(written) == text
    assert transform.source_bytes(written).sum() == len(data)


@settings(deadline=None, max_examples=80)
@given(text=any_text)
@example(text=OPERATOR_TEXT)
def test_the_byte_law_adds_up_to_the_text(transform: TextTransform, text: str) -> None:
    written = transform.forward(text)
    source_bytes = transform.source_bytes(written)
    assert len(source_bytes) == len(written)
    assert (source_bytes >= 0).all()
    assert source_bytes.sum() == len(text.encode())


@settings(deadline=None, max_examples=80)
@given(left=any_text, right=any_text, gap=st.sampled_from([" ", "\n"]))
@example(left="\ue001", right="A", gap=" ")
@example(left="A ", right="NASA", gap=" ")
def test_words_are_written_one_by_one(
    transform: TextTransform, left: str, right: str, gap: str
) -> None:
    whole = transform.forward(left + gap + right)
    assert whole == transform.forward(left) + transform.forward(gap + right)
    # So the byte law may be asked word by word.
    parts = [transform.source_bytes(transform.forward(part)) for part in (left, gap + right)]
    assert transform.source_bytes(whole).tolist() == np.concatenate(parts).tolist()


@settings(deadline=None, max_examples=80)
@given(written=st.one_of(any_text, st.text(alphabet="".join(OPERATORS) + "ab A\n")))
def test_impossible_text_is_refused_or_read(transform: TextTransform, written: str) -> None:
    assert len(transform.source_bytes(written)) == len(written)
    with contextlib.suppress(DataError):
        assert len(transform.inverse(written)) <= 2 * len(written)


def test_symbols_are_private_and_apart(transform: TextTransform) -> None:
    assert len(set(transform.symbols)) == len(transform.symbols)
    assert all(0xE000 <= ord(symbol) <= 0xF8FF for symbol in transform.symbols)


@settings(deadline=None, max_examples=80)
@given(text=any_text)
@example(text="")
@example(text=ODD_TEXT)
@example(text=OPERATOR_TEXT)
def test_any_text_round_trips(tokenizer: Tokenizer, text: str) -> None:
    ids = tokenizer.encode(text.encode())
    assert tokenizer.decode(ids) == text.encode()
    assert not (ids < 4).any()
    pieces = tokenizer.encode_texts([text])
    assert pieces.tokens.tolist() == [1, *ids.tolist()]
    assert pieces.source_bytes.sum() == len(text.encode())
    assert pieces.source_bytes[0] == 0 and (pieces.source_bytes >= 0).all()
    assert not pieces.changed.any()


@settings(deadline=None, max_examples=80)
@given(data=any_bytes)
@example(data=bytes(range(256)))
@example(data=b"\xee\x80A \xee\x80\x81B \xee\xee\x80\x84C")
def test_any_bytes_round_trip(tokenizer: Tokenizer, data: bytes) -> None:
    ids = tokenizer.encode(data)
    assert tokenizer.decode(ids) == data
    assert not (ids < 4).any()
    if tokenizer.transform_name == IDENTITY:
        assert tokenizer.token_bytes[ids].sum() == len(data)


@settings(deadline=None, max_examples=80)
@given(texts=st.lists(any_text, max_size=5))
def test_company_changes_nothing(tokenizer: Tokenizer, texts: list[str]) -> None:
    together = tokenizer.encode_texts(texts)
    alone = [tokenizer.encode_texts([text]) for text in texts]
    assert together.tokens.tolist() == [t for pieces in alone for t in pieces.tokens]
    assert together.source_bytes.tolist() == [w for pieces in alone for w in pieces.source_bytes]
    assert together.counts.tolist() == [len(pieces.tokens) for pieces in alone]
    assert together.changed.tolist() == [False] * len(texts)


@settings(deadline=None, max_examples=80)
@given(text=any_text.map(lambda text: text.replace("\u2581", "")))
def test_words_have_the_ids_of_the_whole(sentencepiece: SentencePieceTokenizer, text: str) -> None:
    whole = model_of(sentencepiece).encode(sentencepiece.transform.forward(text))
    assert sentencepiece.encode_texts([text]).tokens[1:].tolist() == whole


def test_real_text(sentencepiece: SentencePieceTokenizer) -> None:
    texts = demo_texts()
    pieces = sentencepiece.encode_texts(texts)
    assert sentencepiece.lossless and not pieces.changed.any()
    whole = model_of(sentencepiece).encode([sentencepiece.transform.forward(t) for t in texts])
    assert pieces.tokens.tolist() == [id_ for ids in whole for id_ in (1, *ids)]
    firsts = np.cumsum(pieces.counts) - pieces.counts
    of_document = np.add.reduceat(pieces.source_bytes, firsts)
    assert of_document.tolist() == [len(text.encode()) for text in texts]
    # Real text escapes nothing, so the table by id has the same sums.
    by_table = np.add.reduceat(sentencepiece.token_bytes[pieces.tokens], firsts)
    assert by_table.tolist() == of_document.tolist()
    decoded = [sentencepiece.decode(ids) for ids in np.split(pieces.tokens, firsts[1:])]
    assert decoded == [text.encode() for text in texts]


def test_an_unknown_transform_is_refused() -> None:
    with pytest.raises(DataError, match=r"no text transform 'caseop'.*caseops"):
        open_transform("caseop")
