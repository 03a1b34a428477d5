"""Published token files <-> data folders: import a published set, export for other tools."""

import hashlib
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from underpar import __version__
from underpar.core.run_folder import write_atomic, writing
from underpar.data.folder import (
    SPLITS,
    DataFolder,
    hash_file,
    max_natural_copies,
)
from underpar.data.folder_writer import FolderWriter, new_data_folder
from underpar.data.new_folder import new_folder
from underpar.data.published.export import PublishedWriter
from underpar.data.published.export_manifest import (
    MANIFEST_NAME as EXPORT_MANIFEST_NAME,
)
from underpar.data.published.export_manifest import (
    ExportedTokenizer,
    ExportManifest,
    SplitStats,
    describe_dataset,
    write_export_manifest,
)
from underpar.data.published.files import (
    PUBLISHED_SHARD_TOKENS,
    check_known_val,
    open_published,
    open_sidecar,
    refuse_special_ids,
    split_files,
)
from underpar.data.shards import CHANGED, Columns
from underpar.data.tokens.tokenizer import Tokenizer, open_tokenizer, read_model
from underpar.data.transforms import IDENTITY
from underpar.errors import DataError
from underpar.seams import BOS_ID

BY_NAME = "the published split: fineweb_val_*.bin and fineweb_train_*.bin"

BATCH_TOKENS = 1 << 20

Progress = Callable[[str, int], None]


@dataclass(frozen=True)
class ImportOptions:
    """Tokenizer and transform of the tokens; `known` names the published set to compare with."""

    tokenizer: Path
    transform: str = IDENTITY
    known: str | None = None
    licence: str = "not stated"


def import_published(
    folder: Path,
    out: Path,
    options: ImportOptions,
    progress: Progress | None = None,
    overwrite: bool = False,
) -> dict[str, Any]:
    """Make the data folder `out` from published token files, with the published split."""
    with new_data_folder(out, overwrite) as new:
        return _import(folder, new, options, progress or (lambda split, num_documents: None))


def _import(folder: Path, out: Path, options: ImportOptions, report: Progress) -> dict[str, Any]:
    tokenizer = open_tokenizer(read_model(options.tokenizer), options.transform)
    # Validation first, so that each training document can be checked against it.
    files = {split: split_files(folder, split) for split in reversed(SPLITS)}
    val = [open_published(path, tokenizer.vocab_size) for path in files["val"]]
    num_val = sum(int(np.count_nonzero(tokens == BOS_ID)) for tokens in val)
    with FolderWriter(out, tokenizer, max_shared=max_natural_copies(num_val)) as writer:
        num_documents = 0
        for split, paths in files.items():
            for source, columns in _read_split(paths, tokenizer):
                if split == "val":
                    _refuse_wrong_bytes(source, columns, num_documents)
                writer.add(str(source), split, columns)
                num_documents += len(columns.counts)
                report(split, num_documents)
        if options.known is not None:
            check_known_val(options.known, *writer.size("val"))
    return writer.write_manifest(
        {
            "tool": f"underpar {__version__}",
            "inputs": [
                {
                    "path": str(path),
                    "split": split,
                    "bytes": path.stat().st_size,
                    "sha256": hash_file(path),
                    "licence": options.licence,
                    "documents": writer.ranges.get(str(path), {}),
                }
                for split, paths in files.items()
                for path in paths
            ],
            "split": {"rule": BY_NAME, "fraction": None},
        }
    )


def _read_split(paths: list[Path], tokenizer: Tokenizer) -> Iterator[tuple[Path, Columns]]:
    """Batches of whole documents and the file in which they end; documents may straddle files."""
    tokens, source_bytes = np.zeros(0, np.uint16), np.zeros(0, np.int32)
    for number, path in enumerate(paths):
        values = open_published(path, tokenizer.vocab_size)
        refuse_special_ids(path, values)
        sidecar = open_sidecar(path, values)
        bytes_of = tokenizer.token_bytes[values] if sidecar is None else sidecar
        if number == 0 and (not len(values) or values[0] != BOS_ID):
            raise DataError(
                f"{path}: does not begin with BOS ({BOS_ID}), its first document is cut"
            )
        for begin in range(0, len(values), BATCH_TOKENS):
            tokens = np.append(tokens, values[begin : begin + BATCH_TOKENS])
            source_bytes = np.append(source_bytes, bytes_of[begin : begin + BATCH_TOKENS])
            # The last document may continue in the next piece, so it is kept back.
            last = int(np.flatnonzero(tokens == BOS_ID)[-1])
            if last:
                yield path, _columns(tokens[:last], source_bytes[:last], tokenizer)
                tokens, source_bytes = tokens[last:], source_bytes[last:]
    if len(tokens):
        yield paths[-1], _columns(tokens, source_bytes, tokenizer)


def _columns(
    tokens: npt.NDArray[np.uint16], source_bytes: npt.NDArray[np.int32], tokenizer: Tokenizer
) -> Columns:
    starts = np.flatnonzero(tokens == BOS_ID)
    # The files do not hold the text. The decoded tokens stand for it.
    try:
        texts = [tokenizer.decode(document) for document in np.split(tokens, starts[1:])]
    except DataError as error:
        raise DataError(
            f"the tokens do not decode ({error}); give the tokenizer and transform that made them"
        ) from error
    lengths = np.array([len(text) for text in texts], dtype=np.int64)
    # Exact for a lossless tokenizer; otherwise the counted source bytes are the best known length.
    counted = np.add.reduceat(source_bytes, starts, dtype=np.int64)
    doc_bytes = lengths if tokenizer.lossless else counted
    by_table = np.add.reduceat(tokenizer.token_bytes[tokens], starts, dtype=np.int64)
    hashes = b"".join(hashlib.sha256(text).digest() for text in texts)
    return Columns(
        tokens=tokens,
        source_bytes=source_bytes,
        counts=np.diff(starts, append=len(tokens)),
        doc_bytes=doc_bytes,
        doc_hashes=np.frombuffer(hashes, dtype=np.uint8).reshape(-1, 32),
        flags=(CHANGED * (doc_bytes != lengths)).astype(np.uint8),
        num_off_table=int(np.count_nonzero(by_table != doc_bytes)),
    )


def _refuse_wrong_bytes(source: Path, columns: Columns, num_before: int) -> None:
    assert columns.source_bytes is not None
    counted = np.add.reduceat(columns.source_bytes, columns.starts, dtype=np.int64)
    wrong = np.flatnonzero(counted != columns.doc_bytes)
    if wrong.size:
        raise DataError(
            f"{source}: document {num_before + wrong[0]} decodes to {columns.doc_bytes[wrong[0]]} "
            f"bytes, its tokens are counted as {counted[wrong[0]]}; its sidecar is wrong or missing"
        )


def export_published(
    data: DataFolder, out: Path, shard_tokens: int = PUBLISHED_SHARD_TOKENS
) -> None:
    """Write a data folder as published token files, with a sidecar for validation."""
    if (out / EXPORT_MANIFEST_NAME).exists():
        raise DataError(f"{out}: holds an export already; choose another folder")
    with new_folder(out) as new:
        _export(data, new, shard_tokens)


def _export(data: DataFolder, out: Path, shard_tokens: int) -> None:
    tokenizer = data.tokenizer
    name = f"underpar_{tokenizer.vocab_size}"
    stats = _write_splits(data, out / "datasets" / name, shard_tokens)
    write_atomic(out / "tokenizers" / f"{name}.model", tokenizer.content)
    dataset = describe_dataset(f"datasets/{name}", name, stats["train"], stats["val"], sidecar=True)
    write_export_manifest(
        out,
        ExportManifest(
            num_docs=data.train.num_documents + data.val.num_documents,
            num_val_docs=data.val.num_documents,
            shuffle_seed=None,
            shard_size=shard_tokens,
            tokenizers=(_describe_tokenizer(tokenizer, name),),
            datasets=(dataset,),
        ),
    )


def _write_splits(data: DataFolder, folder: Path, shard_tokens: int) -> dict[str, SplitStats]:
    vocab_size = data.tokenizer.vocab_size
    # A table per token is exact where there is no sidecar.
    by_table = data.tokenizer.token_bytes
    source_bytes = by_table[data.val.tokens] if data.sidecar is None else data.sidecar
    with writing(folder), ExitStack() as stack:
        # Both writers open before a document is written: each refuses files of another export.
        writers = {
            split: stack.enter_context(
                PublishedWriter(folder, split, vocab_size, shard_tokens, sidecar=split == "val")
            )
            for split in SPLITS
        }
        for split, shard in (("train", data.train), ("val", data.val)):
            for index in range(shard.num_documents):
                begin = int(shard.starts[index])
                document = shard.doc(index)
                bytes_of = source_bytes[begin : begin + len(document)] if split == "val" else None
                writers[split].add(document, bytes_of)
        return {split: writer.stats() for split, writer in writers.items()}


def _describe_tokenizer(tokenizer: Tokenizer, name: str) -> ExportedTokenizer:
    has_transform = tokenizer.transform_name != IDENTITY
    return ExportedTokenizer(
        name=name,
        kind=tokenizer.kind,
        vocab_size=tokenizer.vocab_size,
        bos_id=BOS_ID,
        eos_id=2,
        model_path=f"tokenizers/{name}.model",
        text_transform=tokenizer.transform_name if has_transform else None,
        reserve_text_transform_controls=True if has_transform else None,
    )
