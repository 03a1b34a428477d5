"""Lossless tokenization: round trips over anything, determinism, refusals."""

import io
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import sentencepiece
from hypothesis import given, settings
from hypothesis import strategies as st

from underpar.data.corpus import demo_corpus, read_documents
from underpar.data.tokenizer import MIN_VOCAB_SIZE, Tokenizer, train_tokenizer
from underpar.errors import DataError

VOCAB_SIZE = 400
ODD_TEXT = (
    "\u2581 a\u2581\u2581b\x00  \t\n\n\r\n\u00bd\ufb01e\u0301\ufeff\U0001f600\u2585\u2047 <s>"
)


@pytest.fixture(scope="module")
def texts() -> list[str]:
    documents = read_documents([demo_corpus()])
    return [next(documents).text for _ in range(60)]


@pytest.fixture(scope="module")
def proto(texts: list[str]) -> bytes:
    return train_tokenizer(texts, VOCAB_SIZE)


@pytest.fixture(scope="module")
def tokenizer(proto: bytes) -> Tokenizer:
    return Tokenizer.from_bytes(proto)


def train_with(texts: list[str], **options: Any) -> bytes:
    writer = io.BytesIO()
    settings_of_ours: dict[str, Any] = {
        "model_type": "bpe",
        "vocab_size": 400,
        "normalization_rule_name": "identity",
        "byte_fallback": True,
        "add_dummy_prefix": False,
        "remove_extra_whitespaces": False,
        "pad_id": 0,
        "bos_id": 1,
        "eos_id": 2,
        "unk_id": 3,
        "hard_vocab_limit": False,
        "minloglevel": 2,
    }
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(line for text in texts for line in text.split("\n")),
        model_writer=writer,
        **(settings_of_ours | options),
    )
    return writer.getvalue()


def is_lossless(tokenizer: Tokenizer, data: bytes) -> bool:
    ids = tokenizer.encode(data)
    lengths_add_up = int(tokenizer.token_bytes[ids].sum()) == len(data)
    return tokenizer.decode(ids) == data and lengths_add_up and not (ids == 1).any()


text_alphabet = st.one_of(
    st.characters(exclude_categories=["Cs"]),
    st.sampled_from(["\u2581", "\x00", " ", "   ", "\n", "\t", "\U0001f600", "the", "1234"]),
)


@settings(deadline=None, max_examples=200)
@given(st.lists(text_alphabet).map("".join))
def test_text_round_trips_alone_and_in_batches(tokenizer: Tokenizer, text: str) -> None:
    assert is_lossless(tokenizer, text.encode())
    batch = tokenizer.encode_documents([text, "x", text])
    assert all(np.array_equal(batch[i], tokenizer.encode(text.encode())) for i in (0, 2))


@settings(deadline=None, max_examples=200)
@given(st.lists(st.one_of(st.binary(), st.text().map(lambda text: text.encode("utf-8", "ignore")))))
def test_any_bytes_round_trip(tokenizer: Tokenizer, parts: list[bytes]) -> None:
    assert is_lossless(tokenizer, b"".join(parts))


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
    ],
)
def test_known_hard_cases_round_trip(tokenizer: Tokenizer, data: bytes) -> None:
    assert is_lossless(tokenizer, data)


def test_real_text_round_trips_and_is_compressed(tokenizer: Tokenizer, texts: list[str]) -> None:
    encoded = tokenizer.encode_documents(texts)
    assert [tokenizer.decode(ids).decode() for ids in encoded] == texts
    num_bytes = sum(len(text.encode()) for text in texts)
    assert num_bytes / sum(map(len, encoded)) > 1.5
    assert all(ids.dtype == np.int32 for ids in encoded)


def test_the_number_of_threads_changes_nothing(tokenizer: Tokenizer, texts: list[str]) -> None:
    one, two = (tokenizer.encode_documents(texts[:8], num_threads=n) for n in (1, 2))
    assert all(np.array_equal(a, b) for a, b in zip(one, two, strict=True))


def test_odd_bytes_become_byte_pieces(tokenizer: Tokenizer) -> None:
    assert tokenizer.encode("\u2581".encode()).tolist() == [4 + 0xE2, 4 + 0x96, 4 + 0x81]
    assert tokenizer.encode(b"\xff").tolist() == [4 + 0xFF]
    around = tokenizer.encode(b"that is the one").tolist()
    for odd in ("\u2581".encode(), b"\xff\xc3"):
        both = tokenizer.encode(b"that is the one" + odd + b"that is the one").tolist()
        assert both == [*around, *(4 + byte for byte in odd), *around]


def test_training_is_deterministic(texts: list[str], proto: bytes) -> None:
    assert train_tokenizer(iter(texts), VOCAB_SIZE) == proto


def test_facts_of_a_model(tokenizer: Tokenizer, proto: bytes, tmp_path: Path) -> None:
    (tmp_path / "t.model").write_bytes(proto)
    again = Tokenizer.from_file(tmp_path / "t.model")
    assert again.identity == tokenizer.identity and len(tokenizer.identity) == 64
    assert tokenizer.vocab_size == VOCAB_SIZE == len(tokenizer.token_bytes)
    assert tokenizer.bos_id == 1
    assert tokenizer.token_bytes[:4].tolist() == [0, 0, 0, 0]
    assert tokenizer.token_bytes[4:260].tolist() == [1] * 256
    assert tokenizer.decode([1, 4 + 65, 0, 2, 3]) == b"A"


def test_long_documents_take_part_in_training() -> None:
    # Far over the 4,192 bytes at which the trainer skips a sentence.
    proto = train_tokenizer(["zyzzyva quixotry jazz " * 2000], 280)
    assert len(Tokenizer.from_bytes(proto).encode(b" zyzzyva quixotry")) < 12


def test_reserved_characters_do_not_hide_text_from_training() -> None:
    marked = train_tokenizer(["ze\u2585bra cro\u2581w \x00\t " * 500], 270)
    tokenizer = Tokenizer.from_bytes(marked)
    assert len(tokenizer.encode(b"zebra")) < 5
    assert is_lossless(tokenizer, ODD_TEXT.encode())


@pytest.mark.parametrize(
    ("texts", "vocab_size", "message"),
    [
        ([], 300, "no text to train"),
        (["\u2581"], 300, "no text to train"),
        (["a b"], 300, "too small for vocab_size 300: add text or set vocab_size to at most 26"),
        (["text"], MIN_VOCAB_SIZE - 1, "vocab_size is 260, expected at least 261"),
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


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"normalization_rule_name": "nmt_nfkc"}, "lossy"),
        ({"normalization_rule_name": "nfkc"}, "lossy"),
        ({"remove_extra_whitespaces": True}, "lossy"),
        ({"add_dummy_prefix": True}, "lossy"),
        ({"byte_fallback": False}, "0 of 256 byte pieces"),
        ({"bos_id": 4}, "id 1 is not a control piece"),
    ],
)
def test_lossy_models_are_refused(texts: list[str], options: dict[str, Any], message: str) -> None:
    proto = train_with(texts[:20], **options)
    with pytest.raises(DataError, match=message):
        Tokenizer.from_bytes(proto)


def test_damaged_models_are_refused_or_stay_lossless(proto: bytes) -> None:
    rng = random.Random(0)
    num_refused = 0
    for _ in range(300):
        damaged = bytearray(proto)
        for _ in range(rng.randint(1, 3)):
            damaged[rng.randrange(len(damaged))] = rng.randrange(256)
        try:
            tokenizer = Tokenizer.from_bytes(bytes(damaged))
        except DataError:
            num_refused += 1
        else:
            assert is_lossless(tokenizer, ODD_TEXT.encode())
    assert num_refused > 0


@pytest.mark.parametrize("junk", [b"", b"\x0a\x00", b"not a model", b"\x00" * 64])
def test_junk_is_not_a_model(junk: bytes) -> None:
    with pytest.raises(DataError, match="not a SentencePiece model"):
        Tokenizer.from_bytes(junk)


def test_a_missing_model_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"gone\.model: tokenizer cannot be read"):
        Tokenizer.from_file(tmp_path / "gone.model")


def test_a_giant_model_file_is_refused(tmp_path: Path) -> None:
    with (tmp_path / "big.model").open("wb") as file:
        file.truncate((1 << 26) + 1)
    with pytest.raises(DataError, match="not a tokenizer"):
        Tokenizer.from_file(tmp_path / "big.model")


@pytest.mark.parametrize("ids", [[-1], [VOCAB_SIZE], [5, 1 << 40]])
def test_ids_out_of_range_are_refused(tokenizer: Tokenizer, ids: list[int]) -> None:
    with pytest.raises(DataError, match="token ids span"):
        tokenizer.decode(ids)


def test_a_lone_surrogate_is_refused(tokenizer: Tokenizer) -> None:
    with pytest.raises(DataError, match="lone surrogate at character 2"):
        tokenizer.encode_documents(["a\udc80"])
