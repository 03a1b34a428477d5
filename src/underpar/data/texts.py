"""Texts in memory: as the shard that scoring reads, and with the bytes of each token."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from underpar.data.shards import Shard
from underpar.data.tokens.tokenizer import Tokenizer


def shard_of(raws: Sequence[bytes], documents: Sequence[np.ndarray]) -> Shard:
    """Documents as the shard that scoring reads: source bytes, and tokens with the BOS first."""
    lengths = np.array([len(document) for document in documents])
    hashes = b"".join(hashlib.sha256(raw).digest() for raw in raws)
    return Shard(
        tokens=np.concatenate(documents).astype(np.int64),
        starts=np.cumsum(lengths) - lengths,
        doc_bytes=np.array([len(raw) for raw in raws]),
        doc_hashes=np.frombuffer(hashes, dtype=np.uint8).reshape(-1, 32),
        flags=np.zeros(len(documents), dtype=np.uint8),
    )


def tokens_and_spans(raw: bytes, tokenizer: Tokenizer) -> tuple[list[int], list[bytes]]:
    """The tokens of a document, the end of it included, and the bytes that each stands for."""
    ids = tokenizer.encode(raw).tolist()
    spans = [tokenizer.written([token]) for token in ids]
    if tokenizer.lossless:
        pieces = tokenizer.encode_texts([raw.decode("utf-8", "surrogateescape")])
        ends = np.cumsum(pieces.source_bytes)
        spans = [raw[begin:end] for begin, end in pairwise(ends)]
    return [*ids, tokenizer.bos_id], [*spans, b""]
