"""The manifest of a folder of published token files: what it holds, made with which tokenizers.

Paths are relative to the folder of the manifest. Fields unknown here are ignored on reading.
"""

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path, PurePosixPath
from typing import Any, TypeVar

from underpar.core.run_folder import write_atomic
from underpar.data.folder import read_json
from underpar.errors import DataError

MANIFEST_NAME = "manifest.json"
DATASET_VERSION = "10B"

T = TypeVar("T")


@dataclass(frozen=True)
class SplitStats:
    """Size of one split."""

    num_docs: int
    num_tokens: int
    num_files: int


@dataclass(frozen=True)
class ExportedTokenizer:
    """A tokenizer of the export; the last two fields are of CaseOps alone."""

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
    """All of an export. The first `num_val_docs` documents are the validation split."""

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
    """The entry of the dataset in `folder`, a path relative to the manifest's."""
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
    """Write `manifest.json`, atomically; it must read back."""
    path = folder / MANIFEST_NAME
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
    _parse(_Entry(path, "", document))
    write_atomic(path, json.dumps(document, indent=2) + "\n")


def read_export_manifest(folder: Path) -> ExportManifest:
    """Read `manifest.json`, checked: types, relative paths, every dataset's tokenizer."""
    path = folder / MANIFEST_NAME
    document = read_json(path, "manifest cannot be read")
    if not isinstance(document, dict):
        raise DataError(f"{path}: {document!r:.40} is not a manifest, expected an object")
    return _parse(_Entry(path, "", document))


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


@dataclass(frozen=True)
class _Entry:
    """One object of the manifest; a field of another type is refused by its place."""

    path: Path
    place: str
    fields: dict[str, Any]

    def refuse(self, key: str, expected: str) -> DataError:
        """The error that names a field, its value and what was expected."""
        value = self.fields.get(key)
        return DataError(f"{self.path}: {self.place}{key} is {value!r:.60}, expected {expected}")

    def get(self, key: str, kind: type[T]) -> T:
        """A field that must be there."""
        value = self.fields.get(key)
        # Not isinstance: true is no number.
        if type(value) is not kind:
            raise self.refuse(key, f"a value of type {kind.__name__}")
        return value

    def find(self, key: str, kind: type[T]) -> T | None:
        """A field that may be absent or null."""
        return None if self.fields.get(key) is None else self.get(key, kind)

    def count(self, key: str) -> int:
        """A number of 0 or more."""
        value = self.get(key, int)
        if value < 0:
            raise self.refuse(key, "0 or more")
        return value

    def relative(self, key: str) -> str:
        """A path that stays inside the manifest's folder."""
        value = self.get(key, str)
        if PurePosixPath(value).is_absolute() or ".." in PurePosixPath(value).parts:
            raise self.refuse(key, "a path inside the folder of the manifest")
        return value

    def find_relative(self, key: str) -> str | None:
        """A path inside the manifest's folder, which may be absent or null."""
        return None if self.fields.get(key) is None else self.relative(key)

    def entry(self, key: str) -> "_Entry":
        """An object inside this one."""
        return _Entry(self.path, f"{self.place}{key}.", self.get(key, dict))

    def entries(self, key: str) -> Iterator["_Entry"]:
        """The objects of a list."""
        for index, value in enumerate(self.get(key, list)):
            if type(value) is not dict:
                raise self.refuse(key, "a list of objects")
            yield _Entry(self.path, f"{self.place}{key}[{index}].", value)


def _parse(entry: _Entry) -> ExportManifest:
    # An EOS after each document would change the stream and what its targets are.
    if entry.find("append_eos", bool):
        raise entry.refuse("append_eos", "false")
    manifest = ExportManifest(
        num_docs=entry.count("num_docs"),
        num_val_docs=entry.count("num_val_docs"),
        shuffle_seed=entry.find("shuffle_seed", int),
        shard_size=entry.count("shard_size"),
        tokenizers=tuple(_parse_tokenizer(each) for each in entry.entries("tokenizers")),
        datasets=tuple(_parse_dataset(each) for each in entry.entries("datasets")),
        version=entry.get("version", str),
    )
    if manifest.num_val_docs > manifest.num_docs:
        raise entry.refuse("num_val_docs", f"at most num_docs, {manifest.num_docs}")
    names = {tokenizer.name for tokenizer in manifest.tokenizers}
    for each, dataset in zip(entry.entries("datasets"), manifest.datasets, strict=True):
        if dataset.tokenizer_name not in names:
            raise each.refuse("tokenizer_name", "the name of a tokenizer of the manifest")
    return manifest


def _parse_tokenizer(entry: _Entry) -> ExportedTokenizer:
    # The byte tokenizer's file goes by "path" in the published manifest.
    model_path = entry.find_relative("model_path") or entry.find_relative("path")
    return ExportedTokenizer(
        name=entry.get("name", str),
        kind=entry.get("kind", str),
        vocab_size=entry.count("vocab_size"),
        bos_id=entry.count("bos_id"),
        eos_id=entry.count("eos_id"),
        model_path=model_path,
        text_transform=entry.find("text_transform", str),
        reserve_text_transform_controls=entry.find("reserve_text_transform_controls", bool),
    )


def _parse_dataset(entry: _Entry) -> ExportedDataset:
    stats = entry.entry("stats")
    train, val = (
        SplitStats(*(stats.count(f"{unit}_{split}") for unit in ("docs", "tokens", "files")))
        for split in ("train", "val")
    )
    return ExportedDataset(
        name=entry.get("name", str),
        tokenizer_name=entry.get("tokenizer_name", str),
        train_glob=entry.relative("train_glob"),
        val_glob=entry.relative("val_glob"),
        val_bytes_glob=entry.find_relative("val_bytes_glob"),
        train=train,
        val=val,
    )
