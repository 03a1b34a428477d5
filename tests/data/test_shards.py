"""The shard format: what is written is read back, and every kind of damage is refused by name."""

import dataclasses
import hashlib
import struct
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from underpar.data import shards
from underpar.data.shards import CHANGED, REPAIRED, Columns, ShardWriter, open_shard, token_dtype
from underpar.errors import DataError

VOCAB_SIZE = 300
DOCUMENTS = [[5, 6, 7], [299], [], [4, 4]]
HEADER_BYTES = 56
# Where the tokens of DOCUMENTS begin: header, starts, bytes, hashes, flags and their padding.
TOKENS_AT = 56 + 32 + 32 + 128 + 8


def columns_of(documents: list[list[int]], first: int = 0) -> Columns:
    """Documents without their BOS, the first of them number `first` of its shard."""
    numbers = range(first, first + len(documents))
    hashes = b"".join(map(hash_of, numbers))
    return Columns(
        tokens=np.array([t for document in documents for t in (1, *document)], dtype=np.int32),
        source_bytes=None,
        counts=np.array([len(document) + 1 for document in documents]),
        doc_bytes=np.array([10 * number for number in numbers]),
        doc_hashes=np.frombuffer(hashes, dtype=np.uint8).reshape(-1, 32),
        flags=np.array([number % 4 for number in numbers], dtype=np.uint8),
        num_off_table=len(documents),
    )


def write_shard(
    path: Path, documents: list[list[int]], vocab_size: int = VOCAB_SIZE, batch: int = 3
) -> Path:
    with ShardWriter(path, vocab_size) as writer:
        for first in range(0, len(documents), batch):
            writer.add(columns_of(documents[first : first + batch], first))
    return path


def hash_of(index: int) -> bytes:
    return hashlib.sha256(bytes([index])).digest()


def damage(path: Path, offset: int, new: bytes, fix_checksum: bool = True) -> None:
    data = bytearray(path.read_bytes())
    data[offset : offset + len(new)] = new
    if fix_checksum:
        data[24:56] = hashlib.sha256(data[HEADER_BYTES:]).digest()
    path.write_bytes(data)


@pytest.fixture
def shard_path(tmp_path: Path) -> Path:
    return write_shard(tmp_path / "a.shard", DOCUMENTS)


def test_the_layout_is_as_documented(shard_path: Path) -> None:
    data = shard_path.read_bytes()
    assert struct.unpack("<4sHHQQ", data[:24]) == (b"UPSH", 2, 2, 10, 4)
    assert data[24:56] == hashlib.sha256(data[56:]).digest()
    assert struct.unpack("<4Q", data[56:88]) == (0, 4, 6, 7)
    assert struct.unpack("<4Q", data[88:120]) == (0, 10, 20, 30)
    assert data[120:248] == b"".join(map(hash_of, range(4)))
    assert data[248:256] == bytes([0, 1, 2, 3, 0, 0, 0, 0])
    assert struct.unpack("<10H", data[TOKENS_AT:]) == (1, 5, 6, 7, 1, 299, 1, 1, 4, 4)


@pytest.mark.parametrize(("vocab_size", "width"), [(65_536, 2), (65_537, 4)])
@settings(deadline=None, max_examples=20)
@given(data=st.data())
def test_written_documents_are_read_back(
    tmp_path_factory: pytest.TempPathFactory, vocab_size: int, width: int, data: st.DataObject
) -> None:
    token = st.integers(2, vocab_size - 1)
    documents = data.draw(st.lists(st.lists(token, max_size=8), max_size=9))
    batch = data.draw(st.integers(1, 9))
    path = write_shard(tmp_path_factory.mktemp("s") / "a.shard", documents, vocab_size, batch)
    shard = open_shard(path, vocab_size)
    assert [shard.doc(i).tolist() for i in range(len(documents))] == [[1, *d] for d in documents]
    assert shard.num_documents == len(documents)
    assert shard.num_tokens == sum(len(d) + 1 for d in documents)
    assert shard.num_bytes == sum(10 * i for i in range(len(documents)))
    assert [row.tobytes() for row in shard.doc_hashes] == [
        hash_of(i) for i in range(len(documents))
    ]
    assert shard.flags.tolist() == [i % 4 for i in range(len(documents))]
    assert shard.tokens.dtype.itemsize == token_dtype(vocab_size).itemsize == width
    assert len(path.read_bytes()) % 8 == shard.num_tokens * width % 8


def test_the_writer_counts_what_it_writes(tmp_path: Path) -> None:
    with ShardWriter(tmp_path / "a.shard", VOCAB_SIZE) as writer:
        writer.add(columns_of(DOCUMENTS[:1]))
        writer.add(columns_of(DOCUMENTS[1:], first=1))
    assert (writer.num_documents, writer.num_tokens, writer.num_bytes) == (4, 10, 60)
    # Flags 0, 1, 2 and 3.
    assert (CHANGED, REPAIRED) == (1, 2)
    assert (writer.num_changed, writer.num_repaired, writer.num_off_table) == (2, 2, 4)
    names = b"".join(map(hash_of, range(4)))
    assert writer.documents_sha256 == hashlib.sha256(names).hexdigest()


def test_ids_over_65535_take_four_bytes(tmp_path: Path) -> None:
    path = write_shard(tmp_path / "a.shard", [[65_535, 65_536, 99_999]], vocab_size=100_000)
    assert open_shard(path, 100_000).tokens.tolist() == [1, 65_535, 65_536, 99_999]
    assert path.read_bytes()[6] == 4
    with pytest.raises(DataError, match="token id 99999 out of range, the tokenizer has 99999"):
        open_shard(path, 99_999)


def test_a_shard_without_documents_is_empty(tmp_path: Path) -> None:
    shard = open_shard(write_shard(tmp_path / "a.shard", []), VOCAB_SIZE)
    assert (shard.num_documents, shard.num_tokens, shard.num_bytes) == (0, 0, 0)


def test_a_document_that_is_not_there_raises(shard_path: Path) -> None:
    shard = open_shard(shard_path, VOCAB_SIZE)
    for index in (-1, 4):
        with pytest.raises(IndexError):
            shard.doc(index)


@pytest.mark.parametrize(
    ("offset", "new", "message"),
    [
        (0, b"XXXX", "not an underpar shard"),
        (4, b"\x01\x00", "shard version 1, expected 2"),
        (6, b"\x03\x00", "3 bytes per token, expected 2 or 4"),
        (6, b"\x04\x00", "file has 276 bytes, its header promises 296"),
        (8, struct.pack("<Q", 11), "file has 276 bytes, its header promises 278"),
        (8, struct.pack("<Q", 2**64 - 1), "its header promises"),
        (16, struct.pack("<Q", 2**63), "its header promises"),
        (56, struct.pack("<Q", 1), "first document starts at token 1, expected 0"),
        (64, struct.pack("<Q", 7), "start of document 2 does not increase"),
        (72, struct.pack("<Q", 4), "start of document 2 does not increase"),
        (80, struct.pack("<Q", 10), "starts at or after the end"),
        (80, struct.pack("<Q", 2**64 - 1), "start of document 3 does not increase"),
        (88, struct.pack("<Q", 2**63), "claims 1099511627776 bytes or more"),
        (88, struct.pack("<Q", 2**40), "claims 1099511627776 bytes or more"),
        (258, struct.pack("<H", 300), "token id 300 out of range, the tokenizer has 300"),
        (264, struct.pack("<H", 9), "document 1 does not start with BOS"),
        (258, struct.pack("<H", 1), "5 BOS tokens for 4 documents, a BOS stands inside a document"),
    ],
)
def test_damage_is_refused_by_name(shard_path: Path, offset: int, new: bytes, message: str) -> None:
    damage(shard_path, offset, new)
    with pytest.raises(DataError, match=message) as caught:
        open_shard(shard_path, VOCAB_SIZE)
    assert str(shard_path) in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize("offset", [100, 130, 250, 255, 274])
def test_any_changed_byte_breaks_the_checksum(shard_path: Path, offset: int) -> None:
    damage(shard_path, offset, b"\x05", fix_checksum=False)
    with pytest.raises(DataError, match="checksum does not match"):
        open_shard(shard_path, VOCAB_SIZE)
    assert open_shard(shard_path, VOCAB_SIZE, verify=False).num_documents == 4


@pytest.mark.parametrize("num_bytes", [0, 3, 55, 56, 255, 275])
def test_a_file_cut_short_is_refused(shard_path: Path, num_bytes: int) -> None:
    shard_path.write_bytes(shard_path.read_bytes()[:num_bytes])
    with pytest.raises(DataError, match=r"not an underpar shard|its header promises"):
        open_shard(shard_path, VOCAB_SIZE)


def test_tokens_without_a_document_are_refused(shard_path: Path) -> None:
    data = shard_path.read_bytes()
    body = data[TOKENS_AT:]
    header = struct.pack("<4sHHQQ32s", b"UPSH", 2, 2, 10, 0, hashlib.sha256(body).digest())
    shard_path.write_bytes(header + body)
    with pytest.raises(DataError, match="10 tokens belong to no document"):
        open_shard(shard_path, VOCAB_SIZE)


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"gone\.shard: shard cannot be read"):
        open_shard(tmp_path / "gone.shard", VOCAB_SIZE)


def test_checks_cover_every_chunk(shard_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shards, "CHUNK", 3)
    assert open_shard(shard_path, VOCAB_SIZE).num_tokens == 10
    again = write_shard(shard_path.with_name("b.shard"), DOCUMENTS)
    assert again.read_bytes() == shard_path.read_bytes()
    damage(shard_path, 274, struct.pack("<H", 300))
    with pytest.raises(DataError, match="token id 300"):
        open_shard(shard_path, VOCAB_SIZE)


def test_a_failed_write_leaves_nothing_and_keeps_the_old_file(shard_path: Path) -> None:
    before = shard_path.read_bytes()
    with pytest.raises(KeyboardInterrupt), ShardWriter(shard_path, VOCAB_SIZE) as writer:
        writer.add(columns_of([[5]]))
        raise KeyboardInterrupt
    assert [path.name for path in shard_path.parent.iterdir()] == ["a.shard"]
    assert shard_path.read_bytes() == before


@pytest.mark.parametrize("tokens", [[1], [5, 1], [300], [-1]])
def test_the_writer_takes_no_bos_and_no_foreign_id(tmp_path: Path, tokens: list[int]) -> None:
    with pytest.raises(AssertionError), ShardWriter(tmp_path / "a.shard", VOCAB_SIZE) as writer:
        writer.add(columns_of([tokens]))
    assert list(tmp_path.iterdir()) == []


def test_the_writer_takes_no_document_without_bos(tmp_path: Path) -> None:
    columns = columns_of([[5, 6], [7]])
    headless = dataclasses.replace(columns, tokens=columns.tokens[1:], counts=np.array([2, 2]))
    for wrong in (headless, dataclasses.replace(columns, counts=np.array([2, 3]))):
        with pytest.raises(AssertionError), ShardWriter(tmp_path / "a.shard", VOCAB_SIZE) as writer:
            writer.add(wrong)
    assert list(tmp_path.iterdir()) == []


@given(
    lengths=st.lists(st.integers(min_value=0, max_value=20), max_size=30),
    num_tokens=st.integers(min_value=1, max_value=40),
)
def test_parts_are_the_shard_in_order_and_no_longer_than_asked(
    tmp_path_factory: pytest.TempPathFactory, lengths: list[int], num_tokens: int
) -> None:
    path = tmp_path_factory.mktemp("parts") / "shard.bin"
    shard = open_shard(write_shard(path, [[7] * n for n in lengths]), VOCAB_SIZE)
    seen = 0
    for first, part in shard.parts(num_tokens):
        assert first == seen
        assert part.num_documents > 0
        for index in range(part.num_documents):
            assert np.array_equal(part.doc(index), shard.doc(first + index))
            assert part.doc_bytes[index] == shard.doc_bytes[first + index]
            assert part.doc_hashes[index].tobytes() == shard.doc_hashes[first + index].tobytes()
            assert part.flags[index] == shard.flags[first + index]
        # Only the last document of a part may end beyond it.
        assert part.starts[-1] < num_tokens
        seen += part.num_documents
    assert seen == shard.num_documents
