"""Training a tokenizer: exact size, same bytes each time, pieces laid out as published."""

import re

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trained import (
    TRANSFORM_NAMES,
    VOCAB_SIZE,
    any_text,
    demo_texts,
    lossless,
    model_of,
)
from underpar.data.tokens.tokenizer import SentencePieceTokenizer
from underpar.data.tokens.train_bpe import _TRAINING_PIECE, MIN_VOCAB_SIZE, train_tokenizer
from underpar.data.transforms import open_transform
from underpar.errors import DataError

KINDS = [(name, cross_words) for name in TRANSFORM_NAMES for cross_words in (False, True)]


def pieces_of(tokenizer: SentencePieceTokenizer) -> list[str]:
    model = model_of(tokenizer)
    return [model.id_to_piece(id_) for id_ in range(tokenizer.vocab_size)]


@pytest.mark.parametrize("vocab_size", [350, 1024, 2048])
@pytest.mark.parametrize("transform", TRANSFORM_NAMES)
def test_any_vocabulary_is_trained_to_size(vocab_size: int, transform: str) -> None:
    tokenizer = SentencePieceTokenizer(
        train_tokenizer(demo_texts(), vocab_size, transform), transform
    )
    assert tokenizer.vocab_size == vocab_size
    assert tokenizer.lossless


def test_the_smallest_vocabularies() -> None:
    text = ["ab ba abba " * 200]
    for vocab_size in (263, 264, 270):
        tokenizer = SentencePieceTokenizer(train_tokenizer(text, vocab_size))
        assert tokenizer.vocab_size == vocab_size
        assert tokenizer.decode(tokenizer.encode(b"ab xyz\xff")) == b"ab xyz\xff"


@pytest.mark.parametrize(("transform", "cross_words"), KINDS)
def test_training_is_deterministic(transform: str, cross_words: bool) -> None:
    again = train_tokenizer(iter(demo_texts()), VOCAB_SIZE, transform, cross_words)
    assert again == lossless(transform, cross_words).content


@pytest.mark.parametrize(("transform", "cross_words"), KINDS)
def test_the_layout_of_ids(transform: str, cross_words: bool) -> None:
    tokenizer = lossless(transform, cross_words)
    model = model_of(tokenizer)
    pieces = pieces_of(tokenizer)
    symbols = list(open_transform(transform).symbols)
    first_byte = 4 + len(symbols)
    assert [model.is_control(id_) for id_ in range(4)] == [True, True, True, False]
    assert model.is_unknown(3)
    assert pieces[4:first_byte] == symbols
    assert pieces[first_byte : first_byte + 256] == [f"<0x{b:02X}>" for b in range(256)]
    learned = pieces[first_byte + 256 :]
    assert not any(symbol in piece for piece in learned for symbol in symbols)
    assert "\u2581" in learned


@pytest.mark.parametrize(("transform", "cross_words"), KINDS)
def test_pieces_begin_with_newlines_and_spaces(transform: str, cross_words: bool) -> None:
    learned = [
        piece.replace("\u2581", " ") for piece in pieces_of(lossless(transform, cross_words))
    ]
    assert "\n" in learned
    assert not any("\n" in piece[1:] for piece in learned)
    has_inner_space = any(re.search("[a-z] [a-z]", piece) for piece in learned)
    assert has_inner_space == cross_words
    assert any(" " in piece[1:] for piece in learned) == cross_words
    assert not any(re.search("[0-9].|.[0-9]", piece) for piece in learned if piece[0] != "<")


def test_crossing_words_takes_fewer_tokens() -> None:
    texts = demo_texts()
    sizes = []
    for cross_words in (False, True):
        content = train_tokenizer(texts, 1024, cross_words=cross_words)
        sizes.append(len(SentencePieceTokenizer(content).encode_texts(texts).tokens))
    assert sizes[1] < sizes[0]


def test_fusing_and_moving_operators_takes_fewer_tokens() -> None:
    def num_tokens(transform: str) -> int:
        return len(lossless(transform).encode_texts(demo_texts()).tokens)

    assert num_tokens("caseops_pair") < num_tokens("caseops")
    assert num_tokens("caseops_before") < num_tokens("caseops")


def test_long_documents_take_part_in_training() -> None:
    # Far over the 4,192 bytes at which the trainer skips a sentence.
    for text in ("zyzzyva quixotry jazz ", "Zyzzyva QUIXOTRY jAzZ "):
        for transform in TRANSFORM_NAMES:
            content = train_tokenizer([text * 2000], 300, transform)
            tokenizer = SentencePieceTokenizer(content, transform)
            assert len(tokenizer.encode(text.encode())) < 12


def test_reserved_characters_do_not_hide_text_from_training() -> None:
    content = train_tokenizer(["ze\u2585bra cro\u2581w \x00\t " * 500], 270)
    assert len(SentencePieceTokenizer(content).encode(b"zebra")) < 5


@settings(deadline=None, max_examples=100)
@given(st.one_of(any_text, st.text(alphabet="ab \n", max_size=60)), st.integers(0, 2500))
def test_training_pieces_are_the_text_in_sentences_that_fit(text: str, length: int) -> None:
    for whole in (text, text + "x" * length + text, " " + "x" * length + "\n" * 3):
        pieces = _TRAINING_PIECE.findall(whole)
        assert "".join(pieces) == whole
        assert all(len(piece) <= 1000 and "\n" not in piece[1:] for piece in pieces)


@pytest.mark.parametrize(
    ("texts", "vocab_size", "message"),
    [
        ([], 300, "no text to train"),
        ([""], 300, "no text to train"),
        (["\u2581"], 300, "no text to train"),
        (["a b"], 300, "too small for vocab_size 300: add text or set vocab_size to at most 26"),
        (["text"], MIN_VOCAB_SIZE - 1, "vocab_size is 260, expected at least 261"),
        (["text"], -5, "vocab_size is -5, expected at least 261"),
        (
            ["".join(map(chr, range(0x4E00, 0x5600)))] * 9,
            300,
            r"vocab_size 300 does not fit .* raise it \(Voc.* 300 vs ",
        ),
    ],
)
def test_training_refusals(texts: list[str], vocab_size: int, message: str) -> None:
    with pytest.raises(DataError, match=message) as caught:
        train_tokenizer(texts, vocab_size)
    assert "\n" not in str(caught.value)


def test_the_largest_size_named_is_one_that_works() -> None:
    text = ["It was a bright cold day in April, and the clocks were striking thirteen."]
    with pytest.raises(DataError, match="at most") as caught:
        train_tokenizer(text, 5000)
    largest = int(str(caught.value).split()[-1])
    assert SentencePieceTokenizer(train_tokenizer(text, largest)).vocab_size == largest


def test_symbols_need_room() -> None:
    with pytest.raises(DataError, match="vocab_size 262 does not fit"):
        train_tokenizer(["ab ba"], 262, "caseops")
    with pytest.raises(DataError, match="no text transform 'nothing'"):
        train_tokenizer(["ab ba"], 300, "nothing")


def test_bytes_of_pieces_are_whole() -> None:
    tokenizer = lossless()
    assert (tokenizer.token_bytes[260:] >= 1).all()
    assert np.array_equal(
        tokenizer.token_bytes[260:],
        [len(p.replace("\u2581", " ").encode()) for p in pieces_of(tokenizer)[260:]],
    )
