"""Raw records to token columns: read, hash, split, transform, tokenize, count bytes.

A `Preparer` does all of this for one batch. It keeps only its word table between batches, so any
process can take any batch: on all cores of one machine, or inside another engine
(examples/datatrove_step.py).
"""

import hashlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from underpar.data.hold_out import HoldOut
from underpar.data.shards import CHANGED, REPAIRED, Columns, token_dtype
from underpar.data.sources.corpus import RawBatch, Reading, Tally, parse
from underpar.data.tokens.tokenizer import Tokenizer, open_tokenizer
from underpar.data.tokens.words import Pieces
from underpar.data.workers import map_in_order


@dataclass(frozen=True)
class Plan:
    """What every worker needs; plain values, which can be sent to other processes."""

    tokenizer: bytes
    transform: str
    reading: Reading
    hold_out: HoldOut


@dataclass(frozen=True)
class Prepared:
    """The documents of a raw batch, by split."""

    splits: dict[str, Columns]
    tally: Tally


@dataclass(frozen=True)
class _Item:
    text: str
    raw: bytes
    digest: bytes
    is_repaired: bool


class Preparer:
    """Raw batches -> columns, with one tokenizer and its word table."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self.tokenizer: Tokenizer = open_tokenizer(plan.tokenizer, plan.transform)

    def prepare(self, batch: RawBatch, file_split: str) -> Prepared:
        """Columns of a batch; `file_split` is that of documents that no rule holds out."""
        tally = Tally()
        items_of: dict[str, list[_Item]] = {}
        for document in parse(batch, self._plan.reading, tally):
            raw = document.text.encode("utf-8")
            item = _Item(document.text, raw, hashlib.sha256(raw).digest(), document.is_repaired)
            split = self._plan.hold_out.split_of(item.digest, file_split)
            if split is not None:
                items_of.setdefault(split, []).append(item)
        columns = {split: self._columns(split, items) for split, items in items_of.items()}
        return Prepared(columns, tally)

    def _columns(self, split: str, items: list[_Item]) -> Columns:
        pieces = self.tokenizer.encode_texts([item.text for item in items])
        doc_bytes = np.array([len(item.raw) for item in items], dtype=np.int64)
        hashes = b"".join(item.digest for item in items)
        repaired = np.array([item.is_repaired for item in items])
        return Columns(
            tokens=pieces.tokens.astype(token_dtype(self.tokenizer.vocab_size)),
            # Only validation is scored by the byte. Training columns stay small without them.
            source_bytes=pieces.source_bytes if split == "val" else None,
            counts=pieces.counts,
            doc_bytes=doc_bytes,
            doc_hashes=np.frombuffer(hashes, dtype=np.uint8).reshape(-1, 32),
            flags=(CHANGED * pieces.changed + REPAIRED * repaired).astype(np.uint8),
            num_off_table=self._check_bytes(pieces, doc_bytes),
        )

    def _check_bytes(self, pieces: Pieces, doc_bytes: npt.NDArray[np.int64]) -> int:
        firsts = np.cumsum(pieces.counts) - pieces.counts
        counted = np.add.reduceat(pieces.source_bytes, firsts, dtype=np.int64)
        # A normalizer may drop whitespace at the edges of a document. No token counts those bytes.
        wrong = np.where(pieces.changed, counted > doc_bytes, counted != doc_bytes)
        assert not wrong.any(), "the source bytes do not add up to the text"
        return _count_off_table(self.tokenizer, pieces.tokens, firsts, doc_bytes)


def _count_off_table(
    tokenizer: Tokenizer,
    tokens: npt.NDArray[Any],
    firsts: npt.NDArray[np.int64],
    doc_bytes: npt.NDArray[np.int64],
) -> int:
    by_table = np.add.reduceat(tokenizer.token_bytes[tokens], firsts)
    return int(np.count_nonzero(by_table != doc_bytes))


def without_repeats(columns: Columns, seen: set[bytes], tokenizer: Tokenizer) -> Columns:
    """The documents whose hash is not in `seen`, to which theirs are added."""
    is_new = np.zeros(len(columns.counts), dtype=bool)
    for index, row in enumerate(columns.doc_hashes):
        is_new[index] = row.tobytes() not in seen
        seen.add(row.tobytes())
    if is_new.all():
        return columns
    mask, source_bytes = np.repeat(is_new, columns.counts), columns.source_bytes
    rest = replace(
        columns,
        tokens=columns.tokens[mask],
        source_bytes=None if source_bytes is None else source_bytes[mask],
        counts=columns.counts[is_new],
        doc_bytes=columns.doc_bytes[is_new],
        doc_hashes=columns.doc_hashes[is_new],
        flags=columns.flags[is_new],
        num_off_table=0,
    )
    if not rest.counts.size:
        return rest
    off = _count_off_table(tokenizer, rest.tokens, rest.starts, rest.doc_bytes)
    return replace(rest, num_off_table=off)


Job = tuple[RawBatch, str]


def prepare_all(plan: Plan, jobs: Iterable[Job], workers: int) -> Iterator[tuple[Job, Prepared]]:
    """Every job with its columns, in order, on `workers` processes (1: in this process)."""
    return map_in_order(partial(_start, plan), jobs, workers)


def _start(plan: Plan) -> Callable[[Job], Prepared]:
    preparer = Preparer(plan)
    return lambda job: preparer.prepare(*job)
