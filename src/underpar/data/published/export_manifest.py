"""The manifest of an export: its token files and the tokenizers that made them.

Paths are relative to the folder of the manifest.
"""

import json
from dataclasses import asdict, dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from underpar.core.run_folder import write_atomic
from underpar.errors import DataError

MANIFEST_NAME = "manifest.json"
DATASET_VERSION = "10B"


@dataclass(frozen=True)
class SplitStats:
    """Size of one split."""

    num_docs: int
    num_tokens: int
    num_files: int


@dataclass(frozen=True)
class ExportedTokenizer:
    """A tokenizer of the export; only CaseOps sets the last two fields."""

    name: str
    kind: str
    vocab_size: int
    bos_id: int
    eos_id: int
    model_path: str | None = None
    text_transform: str | None = None
    reserve_text_transform_controls: bool | None = None


@dataclass(frozen=True)
class ExportedDataset:
    """Token files made with one tokenizer. `val_glob` matches sidecars: use `split_files`."""

    name: str
    tokenizer_name: str
    train_glob: str
    val_glob: str
    val_bytes_glob: str | None
    train: SplitStats
    val: SplitStats


@dataclass(frozen=True)
class ExportManifest:
    """The whole export. The first `num_val_docs` documents are the validation split."""

    num_docs: int
    num_val_docs: int
    shuffle_seed: int | None
    shard_size: int
    tokenizers: tuple[ExportedTokenizer, ...]
    datasets: tuple[ExportedDataset, ...]
    version: str = DATASET_VERSION


def describe_dataset(
    folder: str,
    tokenizer_name: str,
    train: SplitStats,
    val: SplitStats,
    sidecar: bool,
) -> ExportedDataset:
    """The entry of the dataset in `folder`, a path relative to the folder of the manifest."""
    return ExportedDataset(
        name=PurePosixPath(folder).name,
        tokenizer_name=tokenizer_name,
        train_glob=f"{folder}/fineweb_train_*.bin",
        val_glob=f"{folder}/fineweb_val_*.bin",
        val_bytes_glob=f"{folder}/fineweb_val_bytes_*.bin" if sidecar else None,
        train=train,
        val=val,
    )


def write_export_manifest(folder: Path, manifest: ExportManifest) -> None:
    """Write `manifest.json` atomically, after a check of the paths and names in it."""
    path = folder / MANIFEST_NAME
    _check_manifest(path, manifest)
    document = {
        "version": manifest.version,
        "num_docs": manifest.num_docs,
        "num_val_docs": manifest.num_val_docs,
        "shuffle_seed": manifest.shuffle_seed,
        "shard_size": manifest.shard_size,
        "append_eos": False,
        "tokenizers": [_tokenizer_fields(tokenizer) for tokenizer in manifest.tokenizers],
        "datasets": [_dataset_fields(dataset) for dataset in manifest.datasets],
    }
    write_atomic(path, json.dumps(document, indent=2) + "\n")


def _check_manifest(path: Path, manifest: ExportManifest) -> None:
    if manifest.num_val_docs > manifest.num_docs:
        raise DataError(
            f"{path}: num_val_docs is {manifest.num_val_docs}, expected at most num_docs, "
            f"{manifest.num_docs}"
        )
    tokenizer_names = {tokenizer.name for tokenizer in manifest.tokenizers}
    paths = [tokenizer.model_path for tokenizer in manifest.tokenizers]
    for dataset in manifest.datasets:
        if dataset.tokenizer_name not in tokenizer_names:
            raise DataError(
                f"{path}: dataset {dataset.name!r} names the tokenizer {dataset.tokenizer_name!r}, "
                f"expected one of {', '.join(sorted(tokenizer_names))}"
            )
        paths += [dataset.train_glob, dataset.val_glob, dataset.val_bytes_glob]
    for name in paths:
        if name is None:
            continue
        if PurePosixPath(name).is_absolute() or ".." in PurePosixPath(name).parts:
            raise DataError(f"{path}: {name!r} leaves the folder of the manifest, make it relative")


def _tokenizer_fields(tokenizer: ExportedTokenizer) -> dict[str, Any]:
    fields = {key: value for key, value in asdict(tokenizer).items() if value is not None}
    # Carried for models with hashed bigrams; five buckets an id, ids rounded up to 128.
    bigram_vocab_size = 5 * 128 * -(-tokenizer.vocab_size // 128)
    return {**fields, "recommended_bigram_vocab_size": bigram_vocab_size}


def _dataset_fields(dataset: ExportedDataset) -> dict[str, Any]:
    fields = {key: value for key, value in asdict(dataset).items() if value is not None}
    train, val = fields.pop("train"), fields.pop("val")
    stats = {}
    for unit in ("docs", "tokens", "files"):
        key = f"num_{unit}"
        stats[f"{unit}_total"] = train[key] + val[key]
        stats[f"{unit}_train"], stats[f"{unit}_val"] = train[key], val[key]
    return {**fields, "stats": stats}
