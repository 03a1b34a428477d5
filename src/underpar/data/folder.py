"""A data folder (tokenizer, train and validation shards, manifest): open it and check it."""

import hashlib
import json
import shlex
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from underpar.data.shards import CHANGED, Shard, open_shard
from underpar.data.tokens.tokenizer import Tokenizer, open_tokenizer, read_model
from underpar.data.value_files import open_values
from underpar.errors import DataError

FORMAT = 2
TOKENIZER_NAME = "tokenizer.model"
MANIFEST_NAME = "manifest.json"
SPLITS = ("train", "val")
MAX_MANIFEST_BYTES = 1 << 26
# Training may hold copies of this share of the validation documents. Web text has a few natural
# copies; an export with a wrong default had 80 % (Parameter Golf issue 2127).
MAX_NATURAL_SHARE = 0.001

_DOCUMENTS_PER_CHECK = 2048
_HASHED_BYTES = 1 << 22


@dataclass(frozen=True, eq=False)
class DataFolder:
    """The checked contents of a data folder."""

    tokenizer: Tokenizer
    train: Shard
    val: Shard
    manifest: dict[str, Any]
    # Source bytes of each held-out token (T,), if a table per token would be wrong.
    sidecar: npt.NDArray[Any] | None = None

    def __repr__(self) -> str:
        train, val = self.train, self.val
        return f"DataFolder({train.num_bytes:,} bytes for training, {val.num_bytes:,} held out)"


def shard_name(split: str) -> str:
    """File name of the shard of a split."""
    return f"{split}.shard"


def sidecar_name(split: str) -> str:
    """File name of the byte sidecar of a split: the source bytes of each token."""
    return f"{split}_bytes.bin"


def folder_aside(folder: Path) -> Path:
    """The name of an old data folder for the moment in which a new one takes its place."""
    folder = folder.resolve()
    return folder.parent / f".{folder.name}.underpar-old"


def load_data(folder: Path, verify: bool = True, refuse_shared: bool = True) -> DataFolder:
    """Open a data folder; `verify` also reads both shards in full and checks them.

    A document in both splits is an error, unless `refuse_shared` is false (for the audit that looks
    for such documents). A folder that is replaced meanwhile is opened again.
    """
    before = _inode(folder)
    try:
        return _load_data(folder, verify, refuse_shared)
    # Of any kind: parts of two folders do not fit together in many ways.
    except Exception:
        if before == _inode(folder):
            raise
    return _load_data(folder, verify, refuse_shared)


def _inode(folder: Path) -> int | None:
    try:
        return folder.stat().st_ino
    except OSError:
        return None


def _load_data(folder: Path, verify: bool, refuse_shared: bool) -> DataFolder:
    try:
        return _open_data(folder, verify, refuse_shared)
    except DataError as error:
        raise DataError(f"{error}; {build_again(folder)}") from error


def build_again(folder: Path) -> str:
    """What helps if a data folder is damaged, or if it is a folder of texts."""
    name = shlex.quote(str(folder))
    if not folder.exists():
        return f"run 'underpar data build TEXT --out {name}'"
    # Without its manifest a folder is not replaced.
    if not (folder / MANIFEST_NAME).exists():
        return f"if it holds texts, run 'underpar data build {name} --out DATA'"
    return f"run 'underpar data build TEXT --out {name} --overwrite'"


def _open_data(folder: Path, verify: bool, refuse_shared: bool) -> DataFolder:
    manifest = read_manifest(folder)
    path = folder / TOKENIZER_NAME
    tokenizer = _open_tokenizer(path, manifest)
    _expect(path, "SHA-256", tokenizer.identity, manifest, "tokenizer.identity")
    _expect(path, "losslessness", tokenizer.lossless, manifest, "tokenizer.lossless")
    train, val = (_load_split(folder, split, manifest, tokenizer, verify) for split in SPLITS)
    if refuse_shared:
        _refuse_shared_documents(folder, train, val, manifest)
    has_sidecar = manifest["val"]["ledger"] == "sidecar"
    sidecar = open_values(folder / sidecar_name("val")) if has_sidecar else None
    return DataFolder(tokenizer, train, val, manifest, sidecar)


def read_manifest(folder: Path) -> dict[str, Any]:
    """The manifest of a data folder; another format is refused."""
    path, aside = folder / MANIFEST_NAME, folder_aside(folder)
    hint = f" (an interrupted build left the old one as {aside})" if aside.exists() else ""
    manifest = read_json(path, f"no finished data folder here{hint}")
    if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
        version = manifest.get("format") if isinstance(manifest, dict) else manifest
        raise DataError(f"{path}: format is {version!r:.40}, expected {FORMAT}")
    return manifest


def read_json(path: Path, unreadable: str) -> Any:
    """The JSON of a manifest; `unreadable` is the message if the file cannot be read."""
    try:
        if path.stat().st_size > MAX_MANIFEST_BYTES:
            raise DataError(f"{path}: over {MAX_MANIFEST_BYTES} bytes, not a manifest")
        return json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise DataError(f"{path}: {unreadable}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise DataError(f"{path}: invalid JSON: {error}") from error


def hash_file(path: Path) -> str:
    """SHA-256 of a file, as 64 hex digits."""
    digest = hashlib.sha256()
    try:
        with path.open("rb") as file:
            # Large pieces: after each, this thread may have to wait for the interpreter lock.
            while piece := file.read(_HASHED_BYTES):
                digest.update(piece)
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror}") from error
    return digest.hexdigest()


def _open_tokenizer(path: Path, manifest: dict[str, Any]) -> Tokenizer:
    content = read_model(path)
    try:
        return open_tokenizer(content, str(_stated(manifest, "tokenizer.transform")))
    except DataError as error:
        raise DataError(f"{path}: {error}") from error


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
        _check_document_bytes(path, shard, tokenizer.token_bytes, manifest)
    if split == "val":
        has_sidecar = _stated(manifest, "val.off_table") != 0 or not tokenizer.lossless
        _expect(path, "ledger", "sidecar" if has_sidecar else "table", manifest, "val.ledger")
        if has_sidecar and verify:
            _check_sidecar(folder / sidecar_name(split), shard, manifest)
    return shard


def _expect(path: Path, what: str, actual: object, manifest: dict[str, Any], field: str) -> None:
    stated = _stated(manifest, field)
    if stated != actual:
        raise DataError(
            f"{path}: {what} is {actual}, {MANIFEST_NAME} says {field} = {stated!r:.80}"
        )


def _stated(manifest: dict[str, Any], field: str) -> Any:
    stated: Any = manifest
    for key in field.split("."):
        stated = stated.get(key) if isinstance(stated, dict) else None
    return stated


def _check_document_bytes(
    path: Path, shard: Shard, token_bytes: npt.NDArray[np.int32], manifest: dict[str, Any]
) -> None:
    # The manifest states for how many documents the table of bytes per token gives another length
    # (escaped operators, or a tokenizer that normalizes). Exactly so many may differ.
    # int64 like the sums: reduceat takes twice as long if it has to convert.
    table = token_bytes.astype(np.int64)
    wrong = np.flatnonzero(_excess_bytes(shard, lambda cut: table[shard.tokens[cut]]))
    allowed = _stated(manifest, f"{path.stem}.off_table")
    if len(wrong) != allowed:
        first = f"; document {wrong[0]} is the first" if len(wrong) else ""
        raise DataError(
            f"{path}: {len(wrong)} documents have another length than their tokens, "
            f"{MANIFEST_NAME} says {allowed!r:.20}{first}"
        )


def _check_sidecar(path: Path, shard: Shard, manifest: dict[str, Any]) -> None:
    _expect(path, "SHA-256", hash_file(path), manifest, "val.sidecar_sha256")
    source_bytes = open_values(path)
    if len(source_bytes) != shard.num_tokens:
        raise DataError(f"{path}: {len(source_bytes)} entries for {shard.num_tokens} tokens")
    excess = _excess_bytes(shard, lambda cut: source_bytes[cut])
    # A normalizer may drop whitespace at the edges of a document. No token counts those bytes.
    is_changed = (shard.flags & CHANGED) != 0
    wrong = np.flatnonzero(np.where(is_changed, excess > 0, excess != 0))
    if wrong.size:
        raise DataError(
            f"{path}: the entries of document {wrong[0]} do not add up to its "
            f"{shard.doc_bytes[wrong[0]]} bytes"
        )


def _excess_bytes(
    shard: Shard, source_bytes_of: Callable[[slice], npt.NDArray[Any]]
) -> npt.NDArray[np.int64]:
    """Source bytes of the tokens of each document, minus the bytes of the document (D,)."""
    bounds = np.append(shard.starts, shard.num_tokens)
    excess = np.zeros(shard.num_documents, dtype=np.int64)
    for first in range(0, shard.num_documents, _DOCUMENTS_PER_CHECK):
        cut = bounds[first : first + _DOCUMENTS_PER_CHECK + 1]
        source_bytes = source_bytes_of(slice(cut[0], cut[-1]))
        counted = np.add.reduceat(source_bytes, cut[:-1] - cut[0], dtype=np.int64)
        span = slice(first, first + len(counted))
        excess[span] = counted - shard.doc_bytes[span]
    return excess


def hash_keys(doc_hashes: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint64]:
    """The first 8 bytes of each hash as one number: enough to distinguish documents."""
    return np.ascontiguousarray(doc_hashes[:, :8]).view("<u8")[:, 0]


def max_natural_copies(num_val_documents: int) -> int:
    """Training documents that may also be validation documents of a published set."""
    return int(MAX_NATURAL_SHARE * num_val_documents)


def _refuse_shared_documents(
    folder: Path, train: Shard, val: Shard, manifest: dict[str, Any]
) -> None:
    both = np.flatnonzero(np.isin(hash_keys(train.doc_hashes), hash_keys(val.doc_hashes)))
    # Published web text has a few natural copies; the import counted them. Other data have none.
    allowed = _stated(manifest, "shared_documents")
    if len(both) != allowed or len(both) > max_natural_copies(val.num_documents):
        first = train.doc_hashes[both[0]].tobytes().hex()[:16] if both.size else "none"
        raise DataError(
            f"{folder}: {len(both)} training documents are also in validation (first SHA-256 "
            f"{first}), {MANIFEST_NAME} says {allowed!r:.20}"
        )


def data_identity(data: DataFolder) -> str:
    """The beginning of `data_sha256`, as runs and scores record it."""
    return data_sha256(data)[:16]


def data_sha256(data: DataFolder) -> str:
    """A digest of tokenizer and shards: equal for equal tokens, built on any machine."""
    parts = (
        data.tokenizer.identity,
        data.manifest["train"]["sha256"],
        data.manifest["val"]["sha256"],
    )
    return hashlib.sha256(" ".join(parts).encode()).hexdigest()
