"""Bytes as tokens: the published vocabulary, nothing lost, strangers refused."""

import json
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from trained import any_text, demo_texts
from underpar.data.tokens.byte260 import CONTENT, VOCAB_SIZE, ByteTokenizer
from underpar.data.tokens.tokenizer import open_tokenizer
from underpar.errors import DataError

TOKENIZER = ByteTokenizer()


def changed_content(**values: Any) -> bytes:
    return json.dumps(json.loads(CONTENT) | values).encode()


def test_the_published_vocabulary() -> None:
    assert (TOKENIZER.vocab_size, TOKENIZER.bos_id, TOKENIZER.kind) == (260, 1, "bytes")
    assert TOKENIZER.lossless and TOKENIZER.transform_name == "identity"
    assert TOKENIZER.encode(bytes(range(256))).tolist() == list(range(4, 260))
    assert TOKENIZER.encode("\u00e9A".encode()).tolist() == [4 + 0xC3, 4 + 0xA9, 4 + 0x41]
    assert TOKENIZER.token_bytes.tolist() == [0] * 4 + [1] * 256


@settings(deadline=None, max_examples=100)
@given(st.binary())
@example(b"")
def test_any_bytes_round_trip(data: bytes) -> None:
    ids = TOKENIZER.encode(data)
    assert TOKENIZER.decode(ids) == TOKENIZER.written(ids) == data
    assert ids.dtype == np.int32
    assert not (ids < 4).any()


@settings(deadline=None, max_examples=100)
@given(st.lists(any_text, max_size=5))
@example([])
@example(["", "", "a", ""])
def test_documents_are_a_bos_and_their_bytes(texts: list[str]) -> None:
    pieces = TOKENIZER.encode_texts(texts)
    expected = [id_ for text in texts for id_ in (1, *(4 + byte for byte in text.encode()))]
    assert pieces.tokens.tolist() == expected
    assert pieces.source_bytes.tolist() == [int(id_ >= 4) for id_ in expected]
    assert pieces.counts.tolist() == [1 + len(text.encode()) for text in texts]
    assert pieces.changed.tolist() == [False] * len(texts)
    assert [column.dtype for column in (pieces.tokens, pieces.source_bytes)] == [np.int32] * 2


def test_all_documents_give_the_raw_text() -> None:
    pieces = TOKENIZER.encode_texts(demo_texts())
    raw = "".join(demo_texts()).encode()
    assert TOKENIZER.decode(pieces.tokens) == raw
    assert pieces.source_bytes.sum() == len(raw)
    assert not np.isin(pieces.tokens, [0, 2, 3]).any()
    assert np.count_nonzero(pieces.tokens == 1) == len(demo_texts())


def test_control_ids_stand_for_nothing() -> None:
    assert TOKENIZER.decode([1, 0, 4 + 65, 2, 3, 4 + 66]) == b"AB"
    assert TOKENIZER.decode([]) == b""


@pytest.mark.parametrize("ids", [[-1], [VOCAB_SIZE], [5, 1 << 40]])
def test_ids_out_of_range_are_refused(ids: list[int]) -> None:
    with pytest.raises(DataError, match=r"token ids span .* expected 0\.\.259"):
        TOKENIZER.decode(ids)


def test_one_vocabulary_has_one_identity() -> None:
    about = json.loads(CONTENT)
    spellings = [
        CONTENT,
        json.dumps(about).encode(),
        b"\n\t " + json.dumps(about, indent=8, sort_keys=True).encode(),
        changed_content(name="byte260"),
        b'{"tokenizer_type": "pure_byte", "vocab_size": 260}',
    ]
    opened = [open_tokenizer(content) for content in spellings]
    assert {t.identity for t in opened} == {TOKENIZER.identity}
    assert {t.content for t in opened} == {CONTENT}
    assert len(TOKENIZER.identity) == 64


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"{", "not a byte tokenizer"),
        (b"{}", '"tokenizer_type" must be "pure_byte"'),
        (b'{"tokenizer_type": "bpe"}', '"tokenizer_type" must be "pure_byte"'),
        (b'{"a":' * 100_000, "not a byte tokenizer"),
        (b'{"\xff": 1}', "not a byte tokenizer"),
        (changed_content(vocab_size=257), "vocab_size = 257, expected 260"),
        (changed_content(bos_id=0), "bos_id = 0, expected 1"),
        (changed_content(byte_offset=None), "byte_offset = None, expected 4"),
        (changed_content(unk_id="x" * 999), "unk_id = 'xxx"),
    ],
)
def test_other_vocabularies_are_refused(content: bytes, message: str) -> None:
    with pytest.raises(DataError, match=message) as caught:
        open_tokenizer(content)
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 200


def test_a_list_is_no_tokenizer() -> None:
    with pytest.raises(DataError, match="not a byte tokenizer"):
        ByteTokenizer(b"[1]")
