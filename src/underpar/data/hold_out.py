"""Which documents are held out: by their hash, by the files that hold them, or the ends of texts.

Few documents, such as one novel, cannot be divided by hash. Each is then cut into pieces, which are
documents of their own, and the last pieces of each are held out. Training documents that nearly
equal held-out ones may be dropped; they are in no split.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from underpar.data.sources.corpus import (
    Document,
    Reading,
    cut_text,
    document_hash,
    is_held_out,
    read_documents,
)

BY_HASH = "val if the first 8 bytes of sha256(text), big-endian, are < fraction * 2^64"
BY_FILE = "val if in an input marked val: the corpus's published split"
BY_END = "val if equal to one of the last pieces of a document: end_fraction of its pieces"

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
    # Hashes: those that the rule chose, and those of training documents that are left out.
    chosen: frozenset[bytes] = frozenset()
    dropped: frozenset[bytes] = frozenset()

    def split_of(self, digest: bytes, file_split: str) -> str | None:
        """The split of a document, given that of its file; None if it is dropped.

        Copies of a text are in one split.
        """
        if self.rule == BY_HASH:
            assert self.fraction is not None
            split = "val" if is_held_out(digest, self.fraction) else file_split
        else:
            split = "val" if digest in self.chosen else file_split
        return None if split == "train" and digest in self.dropped else split

    def describe(self) -> dict[str, Any]:
        """What the manifest says of the split."""
        if self.rule == BY_END:
            return {"rule": self.rule, "fraction": None, "end_fraction": self.fraction}
        return {"rule": self.rule, "fraction": self.fraction}


def by_hash(fraction: float) -> HoldOut:
    """Hold out this share of the documents, chosen by their hashes."""
    return HoldOut(BY_HASH, fraction)


def stated_hold_out(manifest: dict[str, Any]) -> HoldOut:
    """The rule of a manifest; the sources are read if only they say what it chose."""
    stated, hold_out = manifest["split"], HoldOut(BY_FILE)
    if stated["fraction"] is not None:
        hold_out = by_hash(stated["fraction"])
    elif stated.get("rule") == BY_END:
        reading = Reading(**manifest["reading"])
        hold_out = _hold_out_ends(manifest["inputs"], stated["end_fraction"], reading)
    dropped = manifest["dropped"]["sha256"] if "dropped" in manifest else []
    return replace(hold_out, dropped=frozenset(map(bytes.fromhex, dropped)))


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


def labelled_documents(
    sources: Sequence[Source], hold_out: HoldOut, reading: Reading
) -> Iterator[Labelled]:
    """(split, hash, document) of every document of `sources` that is not dropped."""
    for source in sources:
        for document in read_documents([Path(source["path"])], reading):
            digest = document_hash(document.text)
            split = hold_out.split_of(digest, source["split"])
            if split is not None:
                yield split, digest, document
