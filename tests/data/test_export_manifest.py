"""The manifest of an export: a round trip, and every field it uses is checked."""

import json
from pathlib import Path
from typing import Any

import pytest

from underpar.data import folder as folder_module
from underpar.data.published.export_manifest import (
    ExportedTokenizer,
    ExportManifest,
    SplitStats,
    describe_dataset,
    read_export_manifest,
    write_export_manifest,
)
from underpar.errors import DataError

MANIFEST = ExportManifest(
    num_docs=15_368_808,
    num_val_docs=50_000,
    shuffle_seed=None,
    shard_size=100_000_000,
    tokenizers=(
        ExportedTokenizer("sp1024", "sentencepiece_bpe", 1024, 1, 2, "tokenizers/sp1024.model"),
        ExportedTokenizer(
            "caseops",
            "sentencepiece_bpe",
            8100,
            1,
            2,
            "tokenizers/caseops.model",
            text_transform="lossless_caps_caseops_v1",
            reserve_text_transform_controls=True,
        ),
    ),
    datasets=(
        describe_dataset(
            "datasets/fineweb10B_sp1024",
            "sp1024",
            SplitStats(100, 1_000, 3),
            SplitStats(7, 70, 1),
            sidecar=False,
        ),
        describe_dataset(
            "datasets/fineweb10B_caseops",
            "caseops",
            SplitStats(100, 900, 2),
            SplitStats(7, 60, 1),
            sidecar=True,
        ),
    ),
)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_export_manifest(tmp_path, MANIFEST)
    return tmp_path


def load(folder: Path) -> dict[str, Any]:
    document = json.loads((folder / "manifest.json").read_text())
    assert isinstance(document, dict)
    return document


def change(folder: Path, place: list[str | int], value: Any) -> None:
    document: Any = load(folder)
    target = document
    for key in place[:-1]:
        target = target[key]
    target[place[-1]] = value
    (folder / "manifest.json").write_text(json.dumps(document))


def test_a_manifest_is_read_back(folder: Path) -> None:
    assert read_export_manifest(folder) == MANIFEST
    assert [path.name for path in folder.iterdir()] == ["manifest.json"]


def test_the_fields_are_the_published_ones(folder: Path) -> None:
    document = load(folder)
    datasets, tokenizers = document.pop("datasets"), document.pop("tokenizers")
    assert document == {
        "version": "10B",
        "num_docs": 15_368_808,
        "num_val_docs": 50_000,
        "shuffle_seed": None,
        "shard_size": 100_000_000,
        "append_eos": False,
    }
    assert tokenizers[0] == {
        "name": "sp1024",
        "kind": "sentencepiece_bpe",
        "vocab_size": 1024,
        "bos_id": 1,
        "eos_id": 2,
        "model_path": "tokenizers/sp1024.model",
        "recommended_bigram_vocab_size": 5 * 1024,
    }
    # 8,100 ids round up to 64 times 128.
    assert tokenizers[1]["recommended_bigram_vocab_size"] == 5 * 8192
    assert tokenizers[1]["reserve_text_transform_controls"] is True
    assert "val_bytes_glob" not in datasets[0]
    assert datasets[1] == {
        "name": "fineweb10B_caseops",
        "tokenizer_name": "caseops",
        "train_glob": "datasets/fineweb10B_caseops/fineweb_train_*.bin",
        "val_glob": "datasets/fineweb10B_caseops/fineweb_val_*.bin",
        "val_bytes_glob": "datasets/fineweb10B_caseops/fineweb_val_bytes_*.bin",
        "stats": {
            "docs_total": 107,
            "docs_train": 100,
            "docs_val": 7,
            "tokens_total": 960,
            "tokens_train": 900,
            "tokens_val": 60,
            "files_total": 3,
            "files_train": 2,
            "files_val": 1,
        },
    }


def test_unknown_fields_are_ignored(folder: Path) -> None:
    change(folder, ["docs_meta"], {"docs_sha256": "8438"})
    change(folder, ["datasets", 0, "tokenizer_kind"], [1])
    change(folder, ["datasets", 0, "stats", "bytes_val"], "many")
    assert read_export_manifest(folder) == MANIFEST


def test_the_file_of_a_byte_tokenizer_is_found(folder: Path) -> None:
    change(folder, ["tokenizers", 0, "model_path"], None)
    assert read_export_manifest(folder).tokenizers[0].model_path is None
    change(folder, ["tokenizers", 0, "path"], "tokenizers/fineweb_pure_byte_260.json")
    model_path = read_export_manifest(folder).tokenizers[0].model_path
    assert model_path == "tokenizers/fineweb_pure_byte_260.json"


@pytest.mark.parametrize(
    ("place", "value", "message"),
    [
        (["version"], 10, "version is 10, expected a value of type str"),
        (["num_docs"], "15", "num_docs is '15', expected a value of type int"),
        (["num_docs"], True, "num_docs is True, expected a value of type int"),
        (["num_val_docs"], 1.5, "num_val_docs is 1.5, expected a value of type int"),
        (["num_val_docs"], -1, "num_val_docs is -1, expected 0 or more"),
        (["num_val_docs"], 15_368_809, "num_val_docs is 15368809, expected at most num_docs"),
        (["shuffle_seed"], "1337", "shuffle_seed is '1337', expected a value of type int"),
        (["shard_size"], None, "shard_size is None, expected a value of type int"),
        (["append_eos"], True, "append_eos is True, expected false"),
        (["tokenizers"], {}, "tokenizers is {}, expected a value of type list"),
        (["datasets"], [3], r"datasets is \[3\], expected a list of objects"),
        (["tokenizers", 1, "vocab_size"], "8", r"tokenizers\[1\]\.vocab_size is '8'"),
        (["tokenizers", 0, "text_transform"], 1, r"tokenizers\[0\]\.text_transform is 1"),
        (["tokenizers", 0, "model_path"], "/etc/a", "expected a path inside the folder"),
        (["datasets", 0, "tokenizer_name"], "sp2", r"datasets\[0\]\.tokenizer_name is 'sp2'"),
        (["datasets", 0, "stats"], None, r"datasets\[0\]\.stats is None, .* dict"),
        (["datasets", 1, "stats", "files_val"], "1", r"datasets\[1\]\.stats\.files_val is '1'"),
        (["datasets", 1, "stats", "docs_train"], -2, "docs_train is -2, expected 0 or more"),
        (["datasets", 0, "val_glob"], "/a/*.bin", "expected a path inside the folder"),
        (["datasets", 0, "train_glob"], "a/../../*.bin", "expected a path inside the folder"),
        (["datasets", 1, "val_bytes_glob"], 5, "val_bytes_glob is 5, expected a value of type str"),
    ],
)
def test_a_wrong_field_is_refused_by_its_place(
    folder: Path, place: list[str | int], value: Any, message: str
) -> None:
    change(folder, place, value)
    with pytest.raises(DataError, match=message) as caught:
        read_export_manifest(folder)
    assert "manifest.json: " in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"{", "invalid JSON"),
        (b"\xff{}", "invalid JSON"),
        (b"[" * 200_000, "invalid JSON"),
        (b"[1]", r"\[1\] is not a manifest, expected an object"),
    ],
)
def test_what_is_not_a_manifest_is_refused(folder: Path, content: bytes, message: str) -> None:
    (folder / "manifest.json").write_bytes(content)
    with pytest.raises(DataError, match=message):
        read_export_manifest(folder)


def test_a_missing_or_huge_file_is_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(DataError, match="manifest cannot be read: No such file"):
        read_export_manifest(folder / "gone")
    monkeypatch.setattr(folder_module, "MAX_MANIFEST_BYTES", 100)
    with pytest.raises(DataError, match="over 100 bytes, not a manifest"):
        read_export_manifest(folder)


def test_a_manifest_that_would_not_read_back_is_not_written(tmp_path: Path) -> None:
    stats = SplitStats(1, 2, 1)
    outside = describe_dataset("/data/fineweb", "sp1024", stats, stats, sidecar=False)
    manifest = ExportManifest(2, 1, 1337, 100, MANIFEST.tokenizers, (outside,))
    with pytest.raises(DataError, match="expected a path inside the folder"):
        write_export_manifest(tmp_path, manifest)
    assert list(tmp_path.iterdir()) == []
