"""Writing a data folder: all of it or nothing, the sidecar where needed, shared documents."""

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest

from small_data import contents, decoded, published_model, read_published
from underpar.data import folder
from underpar.data.folder import load_data
from underpar.data.folder_writer import FolderWriter
from underpar.data.shards import Columns
from underpar.data.sources.corpus import document_hash
from underpar.data.tokens.byte260 import ByteTokenizer
from underpar.data.tokens.tokenizer import Tokenizer, open_tokenizer
from underpar.errors import DataError

BYTES = ByteTokenizer()


def columns_of(texts: list[str], tokenizer: Tokenizer = BYTES) -> Columns:
    pieces = tokenizer.encode_texts(texts)
    doc_bytes = np.array([len(text.encode()) for text in texts])
    starts = np.cumsum(pieces.counts) - pieces.counts
    by_table = np.add.reduceat(tokenizer.token_bytes[pieces.tokens], starts)
    hashes = b"".join(map(document_hash, texts))
    return Columns(
        tokens=pieces.tokens,
        source_bytes=pieces.source_bytes,
        counts=pieces.counts,
        doc_bytes=doc_bytes,
        doc_hashes=np.frombuffer(hashes, dtype=np.uint8).reshape(-1, 32),
        flags=pieces.changed.astype(np.uint8),
        num_off_table=int(np.count_nonzero(by_table != doc_bytes)),
    )


def write_folder(out: Path, val: list[str], train: list[str], max_shared: int | None = 0) -> int:
    with FolderWriter(out, BYTES, max_shared) as writer:
        writer.add("val.txt", "val", columns_of(val))
        writer.add("train.txt", "train", columns_of(train))
    writer.write_manifest({})
    return writer.num_shared


def test_what_is_added_is_read_back_with_its_ranges(tmp_path: Path) -> None:
    with FolderWriter(tmp_path, BYTES, max_shared=0) as writer:
        assert writer.empty_splits == ["train", "val"]
        writer.add("a", "val", columns_of(["one", "two"]))
        writer.add("a", "train", columns_of(["three"]))
        assert writer.empty_splits == []
        writer.add("a", "train", columns_of(["four", "five"]))
        writer.add("b", "train", columns_of(["six"]))
        assert writer.size("train") == (4 + 5 + 4 + 4 + 3, 5 + 4 + 4 + 3)
        assert writer.size("val") == (8, 6)
    assert writer.ranges == {"a": {"val": [0, 2], "train": [0, 3]}, "b": {"train": [3, 4]}}
    manifest = writer.write_manifest({"tool": "a test", "inputs": []})
    assert manifest == json.loads((tmp_path / "manifest.json").read_text())
    assert (manifest["format"], manifest["tool"]) == (2, "a test")
    assert manifest["tokenizer"]["kind"] == "bytes"
    data = load_data(tmp_path)
    assert decoded(data, data.train) == [b"three", b"four", b"five", b"six"]
    assert decoded(data, data.val) == [b"one", b"two"]
    assert "val_bytes.bin" not in contents(tmp_path)


def test_without_its_manifest_a_folder_is_not_accepted(tmp_path: Path) -> None:
    with FolderWriter(tmp_path, BYTES, max_shared=0) as writer:
        writer.add("a", "val", columns_of(["one"]))
        writer.add("a", "train", columns_of(["two"]))
    with pytest.raises(DataError, match="no finished data folder here"):
        load_data(tmp_path)
    writer.write_manifest({})
    assert load_data(tmp_path).val.num_documents == 1


@pytest.mark.parametrize("is_lossy", [False, True])
def test_an_error_leaves_nothing_half_done(tmp_path: Path, is_lossy: bool) -> None:
    tokenizer = open_tokenizer(published_model()) if is_lossy else BYTES
    with pytest.raises(KeyboardInterrupt), FolderWriter(tmp_path, tokenizer, 0) as writer:
        writer.add("a", "val", columns_of(["half \u00bd"], tokenizer))
        writer.add("a", "train", columns_of(["two"], tokenizer))
        raise KeyboardInterrupt
    assert contents(tmp_path) == {"tokenizer.model": tokenizer.content}


def test_a_sidecar_holds_the_source_bytes_of_validation(tmp_path: Path) -> None:
    tokenizer = open_tokenizer(published_model())
    batches = [columns_of(["half \u00bd", "plain"], tokenizer), columns_of(["a  b"], tokenizer)]
    with FolderWriter(tmp_path, tokenizer, max_shared=None) as writer:
        for columns in batches:
            writer.add("a", "val", columns)
        # Training documents are not scored, so they need no source bytes.
        writer.add(
            "a", "train", dataclasses.replace(columns_of(["x"], tokenizer), source_bytes=None)
        )
    manifest = writer.write_manifest({})
    assert manifest["val"]["ledger"] == "sidecar"
    source_bytes = np.concatenate([c.source_bytes for c in batches if c.source_bytes is not None])
    assert read_published(tmp_path / "val_bytes.bin") == source_bytes.tolist()
    assert load_data(tmp_path).manifest == manifest


def test_source_bytes_over_16_bits_are_refused(tmp_path: Path) -> None:
    columns = columns_of(["one"])
    for num_bytes in (65_536, -1):
        wrong = dataclasses.replace(
            columns, source_bytes=np.array([0, 1, num_bytes, 1], dtype=np.int32)
        )
        with (
            pytest.raises(
                DataError, match=rf"a: source bytes of token 2 is {num_bytes}, expected 0"
            ),
            FolderWriter(tmp_path, BYTES, max_shared=0) as writer,
        ):
            writer.add("a", "val", wrong)
        assert list(contents(tmp_path)) == ["tokenizer.model"]


def test_shared_documents_are_counted_up_to_the_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    val = [f"document {i}" for i in range(20)]
    assert write_folder(tmp_path / "none", val, ["new"], max_shared=0) == 0
    assert write_folder(tmp_path / "two", val, ["new", val[3], val[3]], max_shared=2) == 2
    with pytest.raises(DataError, match="2 training documents are also in validation"):
        load_data(tmp_path / "two")
    monkeypatch.setattr(folder, "MAX_NATURAL_SHARE", 0.1)
    assert load_data(tmp_path / "two").manifest["shared_documents"] == 2
    digest = document_hash(val[7]).hex()[:16]
    with pytest.raises(DataError) as caught:
        write_folder(tmp_path / "three", val, [val[3], val[3], val[7]], max_shared=2)
    assert str(caught.value) == (
        f"train.txt: 3 training documents are also held out (the last one SHA-256 {digest}...), "
        "at most 2 may be; remove them from one split"
    )
    assert list(contents(tmp_path / "three")) == ["tokenizer.model"]


def test_shared_documents_are_counted_over_batches(tmp_path: Path) -> None:
    with (
        pytest.raises(DataError, match="b: 2 training documents are also held out"),
        FolderWriter(tmp_path, BYTES, max_shared=1) as writer,
    ):
        writer.add("v", "val", columns_of(["one"]))
        writer.add("v", "val", columns_of(["two"]))
        writer.add("a", "train", columns_of(["one", "three"]))
        assert writer.num_shared == 1
        writer.add("b", "train", columns_of(["two"]))


def test_where_the_rule_keeps_splits_apart_nothing_is_remembered(tmp_path: Path) -> None:
    # The load still looks at both sides.
    assert write_folder(tmp_path, ["one"], ["one"], max_shared=None) == 0
    with pytest.raises(DataError, match="1 training documents are also in validation"):
        load_data(tmp_path)


def test_training_may_come_without_any_validation(tmp_path: Path) -> None:
    with FolderWriter(tmp_path, BYTES, max_shared=0) as writer:
        writer.add("a", "train", columns_of(["one"]))
        assert writer.empty_splits == ["val"]
