"""A data folder (tokenizer, train and validation shards, manifest): open it and check it."""

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from underpar.data.shards import Shard, open_shard
from underpar.data.tokenizer import Tokenizer
from underpar.errors import DataError

FORMAT = 1
TOKENIZER_NAME = "tokenizer.model"
MANIFEST_NAME = "manifest.json"
SPLITS = ("train", "val")
MAX_MANIFEST_BYTES = 1 << 26

_DOCUMENTS_PER_CHECK = 256


@dataclass(frozen=True, eq=False)
class DataFolder:
    """The checked contents of a data folder."""

    tokenizer: Tokenizer
    train: Shard
    val: Shard
    manifest: dict[str, Any]


def shard_name(split: str) -> str:
    """File name of a split's shard."""
    return f"{split}.shard"


def load_data(folder: Path, verify: bool = True) -> DataFolder:
    """Open a data folder; `verify` also reads both shards in full against the manifest."""
    manifest = read_manifest(folder)
    tokenizer = Tokenizer.from_file(folder / TOKENIZER_NAME)
    _expect(folder / TOKENIZER_NAME, "SHA-256", tokenizer.identity, manifest, "tokenizer.identity")
    train, val = (_load_split(folder, split, manifest, tokenizer, verify) for split in SPLITS)
    _refuse_shared_documents(folder, train, val)
    return DataFolder(tokenizer, train, val, manifest)


def read_manifest(folder: Path) -> dict[str, Any]:
    """The manifest of a data folder, if there is one of a known format."""
    path = folder / MANIFEST_NAME
    try:
        if path.stat().st_size > MAX_MANIFEST_BYTES:
            raise DataError(f"{path}: over {MAX_MANIFEST_BYTES} bytes, not a manifest")
        manifest = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise DataError(f"{path}: no finished data folder here: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise DataError(f"{path}: invalid JSON: {error}") from error
    if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
        found = manifest.get("format") if isinstance(manifest, dict) else manifest
        raise DataError(f"{path}: format is {found!r:.40}, expected {FORMAT}; build it again")
    return manifest


def hash_file(path: Path) -> str:
    """SHA-256 of a file, as 64 hex digits."""
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror}") from error


def _load_split(
    folder: Path, split: str, manifest: dict[str, Any], tokenizer: Tokenizer, verify: bool
) -> Shard:
    path = folder / shard_name(split)
    shard = open_shard(path, tokenizer.vocab_size, verify)
    _expect(path, "number of documents", shard.num_documents, manifest, f"{split}.documents")
    _expect(path, "number of tokens", shard.num_tokens, manifest, f"{split}.tokens")
    _expect(path, "number of bytes", shard.num_bytes, manifest, f"{split}.bytes")
    if verify:
        _expect(path, "SHA-256", hash_file(path), manifest, f"{split}.sha256")
        _check_document_bytes(path, shard, tokenizer.token_bytes)
    return shard


def _expect(path: Path, what: str, found: object, manifest: dict[str, Any], field: str) -> None:
    stated: Any = manifest
    for key in field.split("."):
        stated = stated.get(key) if isinstance(stated, dict) else None
    if stated != found:
        raise DataError(f"{path}: {what} is {found}, {MANIFEST_NAME} says {field} = {stated!r:.80}")


def _check_document_bytes(path: Path, shard: Shard, token_bytes: npt.NDArray[np.int32]) -> None:
    # Bits per byte divides by these counts, so they must be what the tokens decode to.
    bounds = np.append(shard.starts, shard.num_tokens)
    for first in range(0, shard.num_documents, _DOCUMENTS_PER_CHECK):
        cut = bounds[first : first + _DOCUMENTS_PER_CHECK + 1]
        lengths = token_bytes[shard.tokens[cut[0] : cut[-1]]]
        counted = np.add.reduceat(lengths, cut[:-1] - cut[0], dtype=np.int64)
        wrong = np.flatnonzero(counted != shard.doc_bytes[first : first + len(counted)])
        if wrong.size:
            raise DataError(
                f"{path}: document {first + wrong[0]} decodes to {counted[wrong[0]]} bytes, "
                f"its table says {shard.doc_bytes[first + wrong[0]]}"
            )


def _refuse_shared_documents(folder: Path, train: Shard, val: Shard) -> None:
    held_out = {row.tobytes() for row in val.doc_hashes}
    for index, row in enumerate(train.doc_hashes):
        if row.tobytes() in held_out:
            raise DataError(
                f"{folder}: training document {index} (SHA-256 {row.tobytes().hex()[:16]}...) "
                "is also in validation; build the folder again"
            )
