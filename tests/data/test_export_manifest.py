"""The manifest of an export: its fields are the published ones, wrong names are refused."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from underpar.data.published.export_manifest import (
    ExportedTokenizer,
    ExportManifest,
    SplitStats,
    describe_dataset,
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


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_val_docs": 15_368_809}, "num_val_docs is 15368809, expected at most num_docs"),
        (
            {"datasets": (dataclasses.replace(MANIFEST.datasets[0], tokenizer_name="sp2"),)},
            "dataset 'fineweb10B_sp1024' names the tokenizer 'sp2', expected one of caseops, sp1",
        ),
        (
            {
                "tokenizers": (dataclasses.replace(MANIFEST.tokenizers[0], model_path="/etc/a"),),
                "datasets": MANIFEST.datasets[:1],
            },
            "'/etc/a' leaves the folder of the manifest",
        ),
        (
            {"datasets": (dataclasses.replace(MANIFEST.datasets[0], val_glob="/a/*.bin"),)},
            "'/a/\\*.bin' leaves the folder of the manifest",
        ),
        (
            {"datasets": (dataclasses.replace(MANIFEST.datasets[0], train_glob="a/../../*.bin"),)},
            "leaves the folder of the manifest",
        ),
    ],
)
def test_a_wrong_manifest_is_not_written(
    tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(DataError, match=message) as caught:
        write_export_manifest(tmp_path, dataclasses.replace(MANIFEST, **changes))
    assert "manifest.json: " in str(caught.value) and "\n" not in str(caught.value)
    assert list(tmp_path.iterdir()) == []
