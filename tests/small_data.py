"""Small texts, published-style tokenizers and views of a data folder, for tests of the data."""

import io
import json
import struct
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import sentencepiece

from underpar.data.folder import DataFolder, hash_file
from underpar.data.shards import Columns, Shard, ShardWriter, open_shard
from underpar.data.sources.corpus import demo_corpus, document_hash, is_held_out, read_documents
from underpar.data.transforms import IDENTITY, open_transform

# What the published models were trained with; unlike ours, it normalizes.
PUBLISHED_OPTIONS: dict[str, Any] = {
    "model_type": "bpe",
    "normalization_rule_name": "nmt_nfkc",
    "byte_fallback": True,
    "split_digits": True,
    "add_dummy_prefix": False,
    "character_coverage": 0.999,
    "pad_id": 0,
    "bos_id": 1,
    "eos_id": 2,
    "unk_id": 3,
    "hard_vocab_limit": False,
    "num_threads": 1,
    "minloglevel": 2,
}


@cache
def prose(num_documents: int, max_characters: int = 2000) -> tuple[str, ...]:
    """Starts of the first documents of the demo corpus."""
    documents = islice(read_documents([demo_corpus()]), num_documents)
    return tuple(document.text[:max_characters] for document in documents)


@cache
def published_model(transform: str = IDENTITY, vocab_size: int = 400) -> bytes:
    """A lossy tokenizer made as the published ones were."""
    change = open_transform(transform)
    symbols = {"user_defined_symbols": list(change.symbols)} if change.symbols else {}
    texts = [change.forward(text) for text in prose(40)]
    return train_sentencepiece(texts, vocab_size, **symbols)


def train_sentencepiece(texts: Iterable[str], vocab_size: int, **options: Any) -> bytes:
    """A SentencePiece model with the published options, some of them changed."""
    writer = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(texts),
        model_writer=writer,
        vocab_size=vocab_size,
        **PUBLISHED_OPTIONS | options,
    )
    return writer.getvalue()


def write_jsonl(path: Path, texts: Sequence[str]) -> Path:
    """One object a line."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return path


def write_file(path: Path, content: bytes) -> Path:
    """A file with its folders."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    return path


def held_out(texts: Sequence[str], fraction: float) -> list[str]:
    """The texts that the split by hash holds out."""
    return [text for text in texts if is_held_out(document_hash(text), fraction)]


def contents(folder: Path) -> dict[str, bytes]:
    """File name -> bytes, hidden files included."""
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}


def decoded(data: DataFolder, shard: Shard) -> list[bytes]:
    """What each document of a shard decodes to."""
    return [data.tokenizer.decode(shard.doc(i)) for i in range(shard.num_documents)]


def edit_manifest(folder: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Change the manifest of a data folder in place."""
    manifest = json.loads((folder / "manifest.json").read_text())
    change(manifest)
    (folder / "manifest.json").write_text(json.dumps(manifest))


def rewrite_split(folder: Path, split: str, change: Callable[[Columns], Columns]) -> None:
    """Write a split again, altered but valid in itself, and let the manifest agree with it."""
    path = folder / f"{split}.shard"
    vocab_size = json.loads((folder / "manifest.json").read_text())["tokenizer"]["vocab_size"]
    with ShardWriter(path, vocab_size) as writer:
        writer.add(change(columns_of(open_shard(path, vocab_size))))
    stated = {
        "documents": writer.num_documents,
        "tokens": writer.num_tokens,
        "bytes": writer.num_bytes,
        "sha256": hash_file(path),
    }
    edit_manifest(folder, lambda manifest: manifest[split].update(stated))


def columns_of(shard: Shard) -> Columns:
    """A whole shard as what a writer takes."""
    return Columns(
        tokens=np.array(shard.tokens),
        source_bytes=None,
        counts=np.diff(shard.starts, append=shard.num_tokens),
        doc_bytes=np.array(shard.doc_bytes),
        doc_hashes=np.array(shard.doc_hashes),
        flags=np.array(shard.flags),
    )


def rewrite_sidecar(folder: Path, weights: Sequence[int]) -> None:
    """Replace the sidecar of a data folder and let the manifest agree with it."""
    path = folder / "val_bytes.bin"
    write_published(path, weights)
    edit_manifest(folder, lambda m: m["val"].update(sidecar_sha256=hash_file(path)))


def write_published(path: Path, values: Sequence[int]) -> Path:
    """A published token file or sidecar, laid out by hand."""
    header = struct.pack("<256i", 20240520, 1, len(values), *[0] * 253)
    return write_file(path, header + np.asarray(values, dtype="<u2").tobytes())


def read_published(path: Path) -> list[int]:
    """The values of a published file, read by hand."""
    values: list[int] = np.frombuffer(path.read_bytes()[1024:], dtype="<u2").tolist()
    return values
