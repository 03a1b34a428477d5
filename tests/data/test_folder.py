"""Loading a data folder: everything must agree with the manifest."""

import hashlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from underpar.data.build import build_data
from underpar.data.folder import hash_file, load_data
from underpar.data.shards import ShardWriter, open_shard
from underpar.data.tokenizer import train_tokenizer
from underpar.errors import DataError

VOCAB_SIZE = 300


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("folder")
    lines = [json.dumps({"text": f"entry {i} of a short list of words"}) for i in range(600)]
    (root / "docs.jsonl").write_text("\n".join(lines))
    build_data([root / "docs.jsonl"], root / "data", VOCAB_SIZE, 0.1)
    return root / "data"


@pytest.fixture
def folder(built: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(built, tmp_path / "data"))


def edit_manifest(folder: Path, change: Callable[[dict[str, Any]], object]) -> None:
    manifest = json.loads((folder / "manifest.json").read_text())
    change(manifest)
    (folder / "manifest.json").write_text(json.dumps(manifest))


def rewrite_shard(folder: Path, split: str, extra_bytes: int = 0, copy_from: str = "") -> None:
    """Write a split again, altered but valid in itself, and let the manifest agree with it."""
    path = folder / f"{split}.shard"
    shard = open_shard(path, VOCAB_SIZE)
    other = open_shard(folder / f"{copy_from}.shard", VOCAB_SIZE) if copy_from else shard
    with ShardWriter(path, VOCAB_SIZE) as writer:
        for i in range(shard.num_documents):
            source = other if i == 0 else shard
            num_bytes = int(source.doc_bytes[i]) + (extra_bytes if i == 3 else 0)
            writer.add(source.doc(i)[1:], num_bytes, source.doc_hashes[i].tobytes().hex())
    stated = {"tokens": writer.num_tokens, "bytes": writer.num_bytes, "sha256": hash_file(path)}
    edit_manifest(folder, lambda manifest: manifest[split].update(stated))


def test_a_folder_loads_with_and_without_full_verification(folder: Path) -> None:
    full, quick = load_data(folder), load_data(folder, verify=False)
    assert full.train.num_documents + full.val.num_documents == 600
    assert np.array_equal(full.train.tokens, quick.train.tokens)
    assert (
        full.tokenizer.identity
        == hashlib.sha256((folder / "tokenizer.model").read_bytes()).hexdigest()
    )


@pytest.mark.parametrize("name", ["manifest.json", "tokenizer.model", "train.shard", "val.shard"])
def test_a_missing_file_is_refused(folder: Path, name: str) -> None:
    (folder / name).unlink()
    with pytest.raises(DataError, match=name.replace(".", r"\.")):
        load_data(folder)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "invalid JSON"),
        ("[" * 100_000, "invalid JSON"),
        ("[]", r"format is \[\], expected 1"),
        ("{}", "format is None, expected 1"),
        ('{"format": 2}', "format is 2, expected 1"),
        ('{"format": 1}', "says tokenizer.identity = None"),
        ('{"format": 1, "tokenizer": 5}', "says tokenizer.identity = None"),
    ],
)
def test_a_bad_manifest_is_refused(folder: Path, text: str, message: str) -> None:
    (folder / "manifest.json").write_text(text)
    with pytest.raises(DataError, match=message) as caught:
        load_data(folder)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("split", ["train", "val"])
@pytest.mark.parametrize("field", ["documents", "tokens", "bytes", "sha256"])
def test_a_manifest_that_disagrees_is_refused(folder: Path, split: str, field: str) -> None:
    edit_manifest(folder, lambda manifest: manifest[split].update({field: 7}))
    with pytest.raises(DataError, match=rf"{split}\.shard: .* says {split}\.{field} = 7"):
        load_data(folder)


def test_another_tokenizer_is_refused(folder: Path) -> None:
    proto = train_tokenizer(["other words in another text " * 20], VOCAB_SIZE)
    (folder / "tokenizer.model").write_bytes(proto)
    with pytest.raises(
        DataError, match=r"tokenizer\.model: SHA-256 is .* says tokenizer\.identity"
    ):
        load_data(folder)


def test_a_giant_manifest_is_refused(folder: Path) -> None:
    with (folder / "manifest.json").open("wb") as file:
        file.truncate((1 << 26) + 1)
    with pytest.raises(DataError, match="not a manifest"):
        load_data(folder)


@pytest.mark.parametrize("split", ["train", "val"])
def test_byte_counts_that_the_tokens_do_not_have_are_refused(folder: Path, split: str) -> None:
    rewrite_shard(folder, split)
    load_data(folder)
    rewrite_shard(folder, split, extra_bytes=1)
    with pytest.raises(DataError, match=rf"{split}\.shard: document 3 decodes to \d+ bytes"):
        load_data(folder)


@pytest.mark.parametrize("verify", [True, False])
def test_a_document_on_both_sides_is_refused(folder: Path, verify: bool) -> None:
    rewrite_shard(folder, "train", copy_from="val")
    with pytest.raises(DataError, match=r"training document 0 .* is also in validation"):
        load_data(folder, verify=verify)
