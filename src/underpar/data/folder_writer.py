"""Write a data folder: two shards, the byte sidecar of validation, and last the manifest."""

import json
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import numpy.typing as npt

from underpar.core.run_folder import write_atomic, writing
from underpar.data.folder import (
    FORMAT,
    MANIFEST_NAME,
    SPLITS,
    TOKENIZER_NAME,
    hash_file,
    hash_keys,
    shard_name,
    sidecar_name,
)
from underpar.data.new_folder import new_folder
from underpar.data.shards import Columns, ShardWriter
from underpar.data.tokens.tokenizer import Tokenizer
from underpar.data.value_writer import ValueSeries, checked_values
from underpar.errors import DataError

# What a data folder holds. A folder that holds anything else is never replaced.
FILE_NAMES = {
    MANIFEST_NAME,
    TOKENIZER_NAME,
    sidecar_name("val"),
    *(shard_name(split) for split in SPLITS),
}


def new_data_folder(out: Path, overwrite: bool) -> AbstractContextManager[Path]:
    """A new folder that becomes `out` when it is written; see `new_folder`."""
    return new_folder(out, lambda folder: _check_replaceable(folder, overwrite))


def _check_replaceable(folder: Path, overwrite: bool) -> None:
    names = sorted(path.name for path in folder.iterdir())
    foreign = [name for name in names if name not in FILE_NAMES or (folder / name).is_dir()]
    if foreign or MANIFEST_NAME not in names:
        what = f"it holds {foreign[0]!r:.80}" if foreign else f"it has no {MANIFEST_NAME}"
        raise DataError(f"{folder} is not a data folder ({what}), so it stays; choose another one")
    if not overwrite:
        raise DataError(f"{folder} exists; give --overwrite to replace it, or choose another one")


class FolderWriter:
    """Takes documents batch by batch. The shards appear if the `with` block ends without an error.

    `out` is empty or does not exist, as `new_data_folder` gives it.

    `max_shared` training documents may also be validation documents. If it is a number, validation
    documents must be added first. None means that the split rule excludes shared documents.
    """

    def __init__(self, out: Path, tokenizer: Tokenizer, max_shared: int | None) -> None:
        self.num_shared = 0
        # Input -> split -> [first document, end) in the split's shard.
        self.ranges: dict[str, dict[str, list[int]]] = {}
        self._out = out
        self._tokenizer = tokenizer
        self._max_shared = max_shared
        self._stack = ExitStack()
        self._val_keys: list[npt.NDArray[np.uint64]] = []

    def __enter__(self) -> "FolderWriter":
        write_atomic(self._out / TOKENIZER_NAME, self._tokenizer.content)
        self._sidecar = ValueSeries(self._out, sidecar_name("val"))
        self._stack.callback(self._sidecar.discard)
        vocab_size = self._tokenizer.vocab_size
        self._writers = {
            split: self._stack.enter_context(ShardWriter(self._out / shard_name(split), vocab_size))
            for split in SPLITS
        }
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        with writing(self._out):
            try:
                if kind is None and self._needs_sidecar:
                    self._sidecar.close()
                    self._sidecar.publish()
            finally:
                self._stack.__exit__(kind, error, trace)

    @property
    def _needs_sidecar(self) -> bool:
        # Then the bytes of a document are not the sum over the table of bytes per token.
        return self._writers["val"].num_off_table > 0 or not self._tokenizer.lossless

    @property
    def empty_splits(self) -> list[str]:
        """Splits without any document so far."""
        return [split for split, writer in self._writers.items() if not writer.num_documents]

    def size(self, split: str) -> tuple[int, int]:
        """Tokens and bytes of a split so far."""
        return self._writers[split].num_tokens, self._writers[split].num_bytes

    def add(self, source: str, split: str, columns: Columns) -> None:
        """Append documents of the input `source`."""
        self._refuse_shared(source, split, columns)
        writer = self._writers[split]
        span = self.ranges.setdefault(source, {}).setdefault(split, [writer.num_documents, 0])
        with writing(writer.path):
            writer.add(columns)
        span[1] = writer.num_documents
        if split == "val":
            assert columns.source_bytes is not None
            what = f"{source}: source bytes of token"
            values = checked_values(columns.source_bytes, 1 << 16, what)
            with writing(self._out / sidecar_name("val")):
                self._sidecar.write(values)

    def _refuse_shared(self, source: str, split: str, columns: Columns) -> None:
        if self._max_shared is None:
            return
        keys = hash_keys(columns.doc_hashes)
        if split == "val":
            self._val_keys.append(keys)
            return
        val_keys = np.concatenate([np.zeros(0, np.uint64), *self._val_keys])
        shared = np.flatnonzero(np.isin(keys, val_keys))
        self.num_shared += shared.size
        if self.num_shared > self._max_shared:
            digest = columns.doc_hashes[shared[-1]].tobytes().hex()
            raise DataError(
                f"{source}: {self.num_shared} training documents are also held out (the last one "
                f"SHA-256 {digest[:16]}...), at most {self._max_shared} may be; "
                "remove them from one split"
            )

    def write_manifest(self, head: dict[str, Any]) -> dict[str, Any]:
        """Write `head` and a description of both splits; this file completes the folder."""
        tokenizer = self._tokenizer
        manifest = {
            "format": FORMAT,
            **head,
            "tokenizer": {
                "kind": tokenizer.kind,
                "identity": tokenizer.identity,
                "vocab_size": tokenizer.vocab_size,
                "transform": tokenizer.transform_name,
                "lossless": tokenizer.lossless,
            },
            "shared_documents": self.num_shared,
            **{split: self._describe(writer) for split, writer in self._writers.items()},
        }
        manifest["val"]["ledger"] = "sidecar" if self._needs_sidecar else "table"
        if self._needs_sidecar:
            manifest["val"]["sidecar_sha256"] = hash_file(self._sidecar.paths[0])
        write_atomic(self._out / MANIFEST_NAME, json.dumps(manifest, indent=2) + "\n")
        return manifest

    def _describe(self, writer: ShardWriter) -> dict[str, Any]:
        num_text_tokens = max(1, writer.num_tokens - writer.num_documents)
        return {
            "documents": writer.num_documents,
            "tokens": writer.num_tokens,
            "bytes": writer.num_bytes,
            "bytes_per_token": round(writer.num_bytes / num_text_tokens, 6),
            "changed": writer.num_changed,
            "repaired": writer.num_repaired,
            "off_table": writer.num_off_table,
            "documents_sha256": writer.documents_sha256,
            "sha256": hash_file(writer.path),
        }
