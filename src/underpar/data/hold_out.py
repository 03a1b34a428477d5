"""Which documents are held out: by their hash or file, the first ones, or the ends of texts.

Few documents, such as one novel, cannot be divided by hash. Each is then cut into pieces, which are
documents of their own, and the last pieces of each are held out. Training documents that nearly
equal held-out ones may be dropped; they are in no split.

A share of the training documents may be kept apart for development: choices are made on them, so
that the held-out documents choose nothing. They are in no split of the data folder. A second folder
prices them, in place of the held-out documents, and has the same training documents.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

from underpar.data.sources.corpus import (
    Document,
    RawBatch,
    Reading,
    Tally,
    cut_text,
    document_hash,
    is_held_out,
    is_kept_apart,
    parse,
    read_documents,
    read_raw,
)
from underpar.errors import DataError

BY_HASH = "val if the first 8 bytes of sha256(text), big-endian, are < fraction * 2^64"
BY_FILE = "val if in an input marked val: the corpus's published split"
BY_PLACE = "val if among the first documents of the input; later copies of them are in no split"
BY_END = "val if equal to one of the last pieces of a document: end_fraction of its pieces"

# Which documents a data folder prices: those that the rule holds out, or those for development.
VAL, DEVELOPMENT = "val", "development"

# Of fewer documents, a share by hash would be one or two, or none.
FEWEST_DOCUMENTS = 20
# A hundred pieces, but none so short that its words have no context, or longer than one needs.
NUM_PIECES, PIECE_CHARACTERS = 100, (1000, 16_000)

# What a manifest says about one input file.
Source = dict[str, Any]
# (split, SHA-256 of the text, document)
Labelled = tuple[str, bytes, Document]


@dataclass(frozen=True)
class HoldOut:
    """A rule, and the share that it holds out (None: the files decide)."""

    rule: str
    fraction: float | None = None
    # Hashes: those that the rule chose, and those of documents that are left out, by split.
    chosen: frozenset[bytes] = frozenset()
    dropped: frozenset[bytes] = frozenset()
    dropped_val: frozenset[bytes] = frozenset()
    # Whether a held-out text counts once, and later copies are left out.
    once: bool = False
    # How many of the first documents are held out, if the rule is BY_PLACE.
    num_first: int = 0
    # The share of training documents that are kept apart, and whether these are the ones to price.
    development: float = 0.0
    prices_development: bool = False

    def split_of(self, digest: bytes, file_split: str) -> str | None:
        """The split of a document, given that of its place or file; None if it is dropped.

        Copies of a text are in one split.
        """
        split: str | None = file_split
        if self.rule == BY_HASH:
            assert self.fraction is not None
            split = "val" if is_held_out(digest, self.fraction) else file_split
        elif digest in self.chosen:
            # The place decides; a document that equals one of the first is a copy.
            is_copy = self.rule == BY_PLACE and file_split == "train"
            split = None if is_copy else "val"
        if split == "train" and is_kept_apart(digest, self.development):
            split = "val" if self.prices_development else None
        elif split == "val" and self.prices_development:
            split = None
        left_out = self.dropped_val if split == "val" else self.dropped
        return None if digest in left_out else split

    @property
    def val_share(self) -> float | None:
        """Expected share of the documents of both splits that are in val, if hashes decide."""
        if self.fraction is None or self.rule != BY_HASH:
            return None
        apart = (1 - self.fraction) * self.development
        val = apart if self.prices_development else self.fraction
        return val / (val + (1 - self.fraction) * (1 - self.development))

    def describe(self) -> dict[str, Any]:
        """What the manifest says of the split."""
        told: dict[str, Any] = {"rule": self.rule, "fraction": self.fraction}
        if self.rule == BY_END:
            told |= {"fraction": None, "end_fraction": self.fraction}
        if self.rule == BY_PLACE:
            told |= {"fraction": None, "first_documents": self.num_first}
        if self.development:
            priced = DEVELOPMENT if self.prices_development else VAL
            told |= {"development": self.development, "priced": priced}
        return told


def by_hash(fraction: float) -> HoldOut:
    """Hold out this share of the documents, chosen by their hashes."""
    return HoldOut(BY_HASH, fraction)


def priced_documents(manifest: dict[str, Any]) -> str:
    """Which documents the folder of a manifest prices: "val" or "development"."""
    return str(manifest["split"].get("priced", VAL))


def stated_hold_out(manifest: dict[str, Any]) -> HoldOut:
    """The rule of a manifest; the sources are read if only they say what it chose."""
    stated, hold_out = manifest["split"], HoldOut(BY_FILE)
    if stated["fraction"] is not None:
        hold_out = by_hash(stated["fraction"])
    elif stated.get("rule") == BY_END:
        reading = Reading(**manifest["reading"])
        hold_out = _hold_out_ends(manifest["inputs"], stated["end_fraction"], reading)
    elif stated.get("rule") == BY_PLACE:
        reading = Reading(**manifest["reading"])
        hold_out = _hold_out_marked(manifest["inputs"], stated["first_documents"], reading)
    if "development" in stated:
        priced = priced_documents(manifest) == DEVELOPMENT
        share = stated["development"]
        hold_out = replace(hold_out, development=share, prices_development=priced)
    if "dropped" not in manifest:
        return hold_out
    dropped, dropped_val = (
        frozenset(map(bytes.fromhex, manifest["dropped"][split])) for split in ("train", "val")
    )
    return replace(hold_out, dropped=dropped, dropped_val=dropped_val, once=True)


def choose_hold_out(
    sources: Sequence[Source], fraction: float | None, reading: Reading
) -> tuple[HoldOut, Reading]:
    """The rule for these inputs, and how to read them: by hash, or the ends of few documents."""
    if fraction is None:
        return HoldOut(BY_FILE), reading
    num_characters, splits = 0, set()
    labelled = labelled_documents(sources, by_hash(fraction), reading)
    for num_documents, (split, _, document) in enumerate(labelled, start=1):
        splits.add(split)
        num_characters += len(document.text)
        if num_documents >= FEWEST_DOCUMENTS and len(splits) == 2:
            return by_hash(fraction), reading
    cut = reading
    if not reading.split_documents:
        shortest, longest = PIECE_CHARACTERS
        size = min(max(num_characters // NUM_PIECES, shortest), longest)
        cut = replace(reading, split_documents=size)
    ends = _hold_out_ends(sources, fraction, cut)
    # None of the documents may be long enough to have an end.
    return (ends, cut) if ends.chosen else (by_hash(fraction), reading)


def _hold_out_ends(sources: Sequence[Source], fraction: float, reading: Reading) -> HoldOut:
    whole, chosen = replace(reading, split_documents=0), set[bytes]()
    for document in read_documents([Path(source["path"]) for source in sources], whole):
        pieces = cut_text(document.text, reading.split_documents)
        first = len(pieces) - int(fraction * len(pieces) + 0.5)
        chosen.update(map(document_hash, pieces[first:]))
    return HoldOut(BY_END, fraction, frozenset(chosen))


def hold_out_first(
    sources: Sequence[Source], num_documents: int, reading: Reading
) -> tuple[HoldOut, list[Source]]:
    """The first so many documents of the input held out, and the sources, which say where they end.

    The published rebuild of FineWeb holds out the first 50,000.
    """
    marked, missing = [], num_documents
    for source in sources:
        if missing:
            found = list(islice(_documents_by_record(source, reading), missing))
            missing -= len(found)
            # The number of the last held-out record; a file that is too short is held out whole.
            mark = {"split": "val"} if missing else {"val_records": found[-1]}
            source = source | mark
        marked.append(source)
    if missing:
        raise DataError(
            f"the first {num_documents} documents cannot be held out of "
            f"{num_documents - missing}: hold out fewer or add text"
        )
    return _hold_out_marked(marked, num_documents, reading), marked


def _documents_by_record(source: Source, reading: Reading) -> Iterator[int]:
    """The number of each record that has a text, from 1."""
    for batch in read_raw(Path(source["path"]), reading.field):
        for number, record in enumerate(batch.records, start=batch.first):
            if parse(replace(batch, first=number, records=[record]), reading, Tally()):
                yield number


def _hold_out_marked(sources: Sequence[Source], num_documents: int, reading: Reading) -> HoldOut:
    chosen = frozenset(
        document_hash(document.text)
        for source in sources
        if source["split"] == "val" or "val_records" in source
        for batch, split in read_batches(source, reading.field)
        if split == "val"
        for document in parse(batch, reading, Tally())
    )
    return HoldOut(BY_PLACE, chosen=chosen, num_first=num_documents)


def read_batches(source: Source, field: str) -> Iterator[tuple[RawBatch, str]]:
    """The raw batches of an input file, each with the split of its place."""
    num_val = source.get("val_records", 0)
    for batch in read_raw(Path(source["path"]), field):
        cut = max(0, num_val + 1 - batch.first)
        for split, first, records in (
            ("val", batch.first, batch.records[:cut]),
            (source["split"], batch.first + cut, batch.records[cut:]),
        ):
            if records:
                yield replace(batch, first=first, records=records), split


def labelled_documents(
    sources: Sequence[Source], hold_out: HoldOut, reading: Reading
) -> Iterator[Labelled]:
    """(split, hash, document) of every document of `sources` that is not dropped."""
    seen: set[bytes] = set()
    for source in sources:
        for batch, place_split in read_batches(source, reading.field):
            for document in parse(batch, reading, Tally()):
                digest = document_hash(document.text)
                split = hold_out.split_of(digest, place_split)
                if split == "val" and hold_out.once and digest in seen:
                    continue
                if split == "val":
                    seen.add(digest)
                if split is not None:
                    yield split, digest, document
