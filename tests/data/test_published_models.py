"""The models and the validation text that records were made with, where they are at hand."""

import hashlib

import numpy as np
import pytest

from trained import model_of, own_ids, published
from underpar.data.sources.corpus import read_documents
from underpar.data.tokens.tokenizer import SentencePieceTokenizer, open_tokenizer, read_model
from underpar.errors import DataError

pytestmark = pytest.mark.fineweb

CASEOPS_MODEL = "fineweb_8192_bpe_lossless_caps_caseops_v1_reserved.model"
CASEOPS_SHA256 = "97754754561f20def5edd99765ca0668f880bd94e67316d54aa10ab25f45cc4d"
PLAIN_MODEL = "fineweb_8192_bpe.model"
VAL_BYTES = 4_732_672
VAL_TOKENS = 1_488_938

# Each token with its bytes; operators by letter, a space as "_".
EXAMPLES = [
    ("The NASA Launch", "T0 the3 _1 K0 nas3 a1 _1 T0 la2 unch4"),
    ("I am", "T0 i1 _am3"),
    ("iPhone", "i1 N0 phone5"),
    ("McDonald's eBay", "T0 mc2 N0 donald6 '1 s1 _e2 N0 bay3"),
    ("USAs", "T0 u1 N0 s1 N0 as2"),
    ("H2O", "T0 h1 21 T0 o1"),
    ("X-Ray", "T0 x1 -1 T0 ray3"),
    ("N\u00c9E", "T0 n1 <0xC3>0 <0x89>2 T0 e1"),
    ("\u00dcnited STATES", "<0xC3>0 <0x9C>2 n1 ited4 _1 K0 states6"),
    ("\ue001x", "E0 T3 x1"),
    ("A\ue004B", "T0 a1 E0 E3 T0 b1"),
    ("a\n\nb", "a1 _b3"),
    ("\u00bd cup", "10 <0xE2>0 <0x81>0 <0x84>0 22 _cup4"),
]
NAMES = str.maketrans("\ue001\ue002\ue003\ue004\u2581", "TKNE_")


@pytest.fixture(scope="module")
def caseops() -> SentencePieceTokenizer:
    return SentencePieceTokenizer(read_model(published(CASEOPS_MODEL)), "caseops")


@pytest.fixture(scope="module")
def plain() -> SentencePieceTokenizer:
    return SentencePieceTokenizer(read_model(published(PLAIN_MODEL)))


@pytest.fixture(scope="module")
def val_texts() -> list[str]:
    return [document.text for document in read_documents([published("val.jsonl.xz")])]


def test_the_model_is_the_published_one(caseops: SentencePieceTokenizer) -> None:
    assert hashlib.sha256(caseops.content).hexdigest() == CASEOPS_SHA256
    assert (caseops.vocab_size, caseops.lossless) == (8192, False)
    model = model_of(caseops)
    assert model.piece_to_id(list("\ue001\ue002\ue003\ue004")) == [4, 5, 6, 7]
    assert [model.id_to_piece(8 + b) for b in range(256)] == [f"<0x{b:02X}>" for b in range(256)]
    assert model.piece_to_id("\u2581") == 8133
    assert caseops.token_bytes[:8].tolist() == [0] * 8
    assert caseops.token_bytes[8:264].tolist() == [1] * 256


@pytest.mark.parametrize(("text", "expected"), EXAMPLES)
def test_worked_examples(caseops: SentencePieceTokenizer, text: str, expected: str) -> None:
    pieces = caseops.encode_texts([text])
    strings = model_of(caseops).id_to_piece(pieces.tokens[1:].tolist())
    labels = [f"{s}{w}" for s, w in zip(strings, pieces.source_bytes[1:], strict=True)]
    assert " ".join(labels).translate(NAMES) == expected
    assert pieces.source_bytes.sum() == len(text.encode())


def test_the_validation_text(caseops: SentencePieceTokenizer, val_texts: list[str]) -> None:
    pieces = caseops.encode_texts(val_texts)
    assert len(pieces.tokens) == VAL_TOKENS
    raw = [len(text.encode()) for text in val_texts]
    assert pieces.source_bytes.sum() == sum(raw) == VAL_BYTES
    firsts = np.cumsum(pieces.counts) - pieces.counts
    assert np.add.reduceat(pieces.source_bytes, firsts).tolist() == raw
    assert pieces.tokens.tolist() == own_ids(caseops, val_texts)


def test_exact_encoding_gives_the_validation_text_back(
    caseops: SentencePieceTokenizer, val_texts: list[str]
) -> None:
    for text in val_texts[:200]:
        assert caseops.decode(caseops.encode(text.encode())) == text.encode()


def test_the_plain_model(plain: SentencePieceTokenizer, val_texts: list[str]) -> None:
    assert (plain.vocab_size, plain.lossless) == (8192, False)
    # Copies of this model circulate with either.
    assert model_of(plain).piece_to_id("\u2581") in (8107, 8108)
    pieces = plain.encode_texts(val_texts)
    assert pieces.tokens.tolist() == own_ids(plain, val_texts)
    assert pieces.source_bytes.sum() == VAL_BYTES
    # The table by id counts the normalized text.
    assert plain.token_bytes[pieces.tokens].sum() == len(plain.decode(pieces.tokens))
    with pytest.raises(DataError, match="needs a piece"):
        open_tokenizer(plain.content, "caseops")
