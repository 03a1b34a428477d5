"""Build a data folder: train or take a tokenizer, split by document, write the shards."""

import heapq
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from underpar import __version__
from underpar.data.corpus import Document, document_hash, input_files, is_held_out, read_documents
from underpar.data.folder import (
    FORMAT,
    MANIFEST_NAME,
    SPLITS,
    TOKENIZER_NAME,
    hash_file,
    shard_name,
)
from underpar.data.shards import ShardWriter
from underpar.data.tokenizer import Tokenizer, read_model, train_tokenizer
from underpar.errors import DataError
from underpar.run import write_atomic

BY_HASH = "val if the first 8 bytes of sha256(text), big-endian, are < fraction * 2^64"
BY_FILE = "val if in an input marked val: the corpus's published split"
# Text a tokenizer is trained on; more moves a vocabulary of this size very little.
SAMPLE_BYTES = 20_000_000

# Far below the sample, so that one long document cannot crowd out all others.
_SAMPLE_CHARACTERS_PER_DOCUMENT = 1_000_000
_BATCH_CHARACTERS = 1 << 22

Progress = Callable[[str, int], None]
# A fraction of documents chosen by hash, or the files that hold the held-out documents.
Holdout = float | Sequence[Path]
# Split, hash and document.
Labelled = tuple[str, str, Document]


def build_data(
    inputs: Sequence[Path],
    out: Path,
    vocab_size: int | None,
    holdout: Holdout,
    tokenizer: Path | None = None,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Build the data folder `out` and return its manifest; same inputs, same bytes.

    `holdout` is the fraction of documents kept for validation, or the held-out files of a
    published split. The tokenizer is trained on
    training documents alone, or read from `tokenizer`; then `vocab_size` must match it or be None.
    `progress` is called with the stage ("tokenizer", "encode") and the documents done.
    """
    if isinstance(holdout, int | float) and not 0 < holdout < 1:
        raise DataError(f"holdout is {holdout}, expected a fraction between 0 and 1")
    report = progress or (lambda stage, num_documents: None)
    sources = _describe_inputs(inputs, holdout)
    fraction = holdout if isinstance(holdout, float) else None
    model_proto = _tokenizer_proto(sources, vocab_size, fraction, tokenizer, report)
    model = _check_vocab_size(Tokenizer.from_bytes(model_proto), vocab_size, tokenizer)
    out.mkdir(parents=True, exist_ok=True)
    # Without a manifest no folder is accepted, so it goes first and comes last.
    (out / MANIFEST_NAME).unlink(missing_ok=True)
    write_atomic(out / TOKENIZER_NAME, model_proto)
    splits = _write_shards(sources, out, model, fraction, report)
    manifest = {
        "format": FORMAT,
        "tool": f"underpar {__version__}",
        "inputs": sources,
        "tokenizer": {"identity": model.identity, "vocab_size": model.vocab_size},
        "split": {"rule": BY_FILE if fraction is None else BY_HASH, "fraction": fraction},
        **splits,
    }
    write_atomic(out / MANIFEST_NAME, json.dumps(manifest, indent=2) + "\n")
    return manifest


def _describe_inputs(inputs: Sequence[Path], holdout: Holdout) -> list[dict[str, Any]]:
    groups = {"train": inputs} if isinstance(holdout, float) else {"train": inputs, "val": holdout}
    return [
        {"path": str(f), "split": split, "bytes": f.stat().st_size, "sha256": hash_file(f)}
        for split, paths in groups.items()
        for f in input_files(paths)
    ]


def labelled_documents(
    sources: Sequence[dict[str, Any]], fraction: float | None
) -> Iterator[Labelled]:
    """(split, hash, document) of every document of a manifest's inputs, by its split rule."""
    for source in sources:
        for document in read_documents([Path(source["path"])]):
            hash_hex = document_hash(document.text)
            held_out = fraction is not None and is_held_out(hash_hex, fraction)
            yield "val" if held_out else source["split"], hash_hex, document


def sample_by_hash(documents: Iterable[tuple[str, str]], cap_bytes: int) -> list[str]:
    """Texts of (hash, text) pairs: the smallest hashes that fit the cap, whatever the order."""
    kept: dict[int, str] = {}
    largest_first: list[int] = []
    num_bytes = 0
    limit = 1 << 256
    for hash_hex, text in documents:
        key = int(hash_hex, 16)
        if key >= limit or key in kept:
            continue
        kept[key] = text[:_SAMPLE_CHARACTERS_PER_DOCUMENT]
        heapq.heappush(largest_first, -key)
        num_bytes += len(kept[key].encode())
        while num_bytes > cap_bytes:
            # Everything from here up stays out for good: that makes the choice order-free.
            limit = -heapq.heappop(largest_first)
            num_bytes -= len(kept.pop(limit).encode())
    return [kept[key] for key in sorted(kept)]


def _tokenizer_proto(
    sources: list[dict[str, Any]],
    vocab_size: int | None,
    fraction: float | None,
    tokenizer: Path | None,
    report: Progress,
) -> bytes:
    if tokenizer is not None:
        return read_model(tokenizer)
    if vocab_size is None:
        raise DataError("vocab_size is needed to train a tokenizer, set it or give a tokenizer")

    def training_documents() -> Iterator[tuple[str, str]]:
        labelled = labelled_documents(sources, fraction)
        for number, (split, hash_hex, document) in enumerate(labelled, start=1):
            report("tokenizer", number)
            if split == "train":
                yield hash_hex, document.text

    return train_tokenizer(sample_by_hash(training_documents(), SAMPLE_BYTES), vocab_size)


def _check_vocab_size(model: Tokenizer, vocab_size: int | None, path: Path | None) -> Tokenizer:
    if vocab_size is not None and model.vocab_size != vocab_size:
        raise DataError(
            f"{path}: tokenizer has {model.vocab_size} pieces, vocab_size says {vocab_size}"
        )
    return model


def _write_shards(
    sources: list[dict[str, Any]],
    out: Path,
    model: Tokenizer,
    fraction: float | None,
    report: Progress,
) -> dict[str, dict[str, Any]]:
    with ExitStack() as stack:
        writers = {
            split: stack.enter_context(ShardWriter(out / shard_name(split), model.vocab_size))
            for split in SPLITS
        }
        num_documents = 0
        hashes: dict[str, set[str]] = {split: set() for split in SPLITS}
        for batch in _batches(labelled_documents(sources, fraction)):
            encoded = model.encode_documents([document.text for _, _, document in batch])
            for (split, hash_hex, document), tokens in zip(batch, encoded, strict=True):
                hashes[split].add(hash_hex)
                writers[split].add(tokens, len(document.text.encode()), hash_hex)
            num_documents += len(batch)
            report("encode", num_documents)
        if both := sorted(hashes["train"] & hashes["val"]):
            raise DataError(
                f"{len(both)} held-out documents are also in the training files (SHA-256 "
                f"{both[0][:16]}...); take them out of one side"
            )
        for split, writer in writers.items():
            if not writer.num_documents:
                raise DataError(
                    f"none of {num_documents} documents falls into {split} "
                    f"with holdout {fraction}: change holdout or add documents"
                )
    return {split: _describe(writer) for split, writer in writers.items()}


def _batches(documents: Iterable[Labelled]) -> Iterator[list[Labelled]]:
    batch: list[Labelled] = []
    num_characters = 0
    for labelled in documents:
        batch.append(labelled)
        num_characters += len(labelled[2].text)
        if num_characters >= _BATCH_CHARACTERS:
            yield batch
            batch, num_characters = [], 0
    if batch:
        yield batch


def _describe(writer: ShardWriter) -> dict[str, Any]:
    num_text_tokens = writer.num_tokens - writer.num_documents
    return {
        "documents": writer.num_documents,
        "tokens": writer.num_tokens,
        "bytes": writer.num_bytes,
        "bytes_per_token": round(writer.num_bytes / num_text_tokens, 6),
        "sha256": hash_file(writer.path),
    }
