"""Who is priced when: the turns in which documents take chunks of targets, lane by lane.

Adapters learn between a document's chunks, so the order of chunks is part of the method.
`stream_schedule` keeps the order of the file and sizes a chunk by its place in the document: a
decoder, who learns a length only at the end, can follow it. `published_schedule` is the order of
PR 1530 and PR 2014: it sorts by length and sizes chunks by it, so it reads lengths in advance and
serves to reproduce published figures. The total order of prices is (step, lane, target).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

from underpar.schema import require

_SHORT = re.compile(r"(\d{1,9}):(\d{1,9})", re.ASCII)


@dataclass(frozen=True)
class Chunks:
    """Chunk sizes in targets: `default`, and smaller ones up to a limit ("256:8" is limit:size)."""

    default: int = 48
    short: tuple[str, ...] = ("256:8", "2000:24")

    def __post_init__(self) -> None:
        require(self.default > 0, f"chunk = {self.default}: expected 1 target or more")
        limits = [limit for limit, _ in self._entries]
        require(len(set(limits)) == len(limits), f"short = {self.short}: a limit occurs twice")

    def by_position(self, num_done: int) -> int:
        """The size of the chunk that follows `num_done` priced targets of a document."""
        return next((size for limit, size in self._entries if num_done < limit), self.default)

    def by_length(self, doc_len: int) -> int:
        """The size of every chunk of a document of `doc_len` tokens, both BOS counted (PR 2014)."""
        return next((size for limit, size in self._entries if doc_len <= limit), self.default)

    @property
    def sizes(self) -> tuple[int, ...]:
        """All sizes that a chunk may have."""
        return (*(size for _, size in self._entries), self.default)

    @cached_property
    def _entries(self) -> list[tuple[int, int]]:
        return sorted(_parse_entry(text) for text in self.short)


def _parse_entry(text: str) -> tuple[int, int]:
    match = _SHORT.fullmatch(text)
    limit, size = map(int, match.groups()) if match else (0, 0)
    require(limit > 0 and size > 0, f"short chunk {text!r}: expected 'limit:size', as in '256:8'")
    return limit, size


@dataclass(frozen=True, slots=True)
class Turn:
    """A lane prices `count` targets of `document`, from its target `first` (counted from 0)."""

    lane: int
    document: int
    first: int
    count: int
    is_last: bool


@dataclass(frozen=True)
class Group:
    """Documents that run side by side, one a lane, with one size of chunk, and their turns."""

    documents: tuple[int, ...]
    chunk: int
    steps: tuple[tuple[Turn, ...], ...]


def _cut_turn(lane: int, document: int, first: int, left: int, size: int) -> Turn:
    return Turn(lane, document, first, min(size, left), is_last=left <= size)


def stream_schedule(
    num_targets: Sequence[int], num_lanes: int, chunks: Chunks
) -> Iterator[list[Turn]]:
    """The steps of a decodable pass: the turns of each, in lane order.

    A free lane takes the next document of the file at the next step, the lowest lane first. All
    turns up to a step depend only on the targets priced before and on the number of documents.
    """
    require(num_lanes > 0, f"lanes = {num_lanes}: expected 1 or more")
    waiting = (document for document, total in enumerate(num_targets) if total > 0)

    def take(lane: int, document: int, first: int) -> Turn:
        left = num_targets[document] - first
        return _cut_turn(lane, document, first, left, chunks.by_position(first))

    def follow(turn: Turn) -> Turn | None:
        if not turn.is_last:
            return take(turn.lane, turn.document, turn.first + turn.count)
        document = next(waiting, None)
        return None if document is None else take(turn.lane, document, 0)

    step = [take(lane, doc, 0) for lane, doc in zip(range(num_lanes), waiting, strict=False)]
    while step:
        yield step
        step = [turn for turn in map(follow, step) if turn is not None]


def published_schedule(
    num_targets: Sequence[int], doc_lengths: Sequence[int], group: int, chunks: Chunks
) -> Iterator[Group]:
    """Groups of up to `group` documents of like length, the longest first (PR 1530, PR 2014).

    `doc_lengths` are in tokens with both BOS: one more than the targets. Not decodable.
    """
    require(group > 0, f"group = {group}: expected 1 document or more")
    assert len(num_targets) == len(doc_lengths)
    # Both sorts are stable, as published: among groups of equal maximum the earlier one is first.
    ascending = sorted(range(len(doc_lengths)), key=doc_lengths.__getitem__)
    groups = [tuple(ascending[i : i + group]) for i in range(0, len(ascending), group)]
    for documents in sorted(groups, key=lambda members: -doc_lengths[members[-1]]):
        chunk = chunks.by_length(doc_lengths[documents[-1]])
        totals = [num_targets[document] for document in documents]
        steps = tuple(
            tuple(
                _cut_turn(lane, documents[lane], first, total - first, chunk)
                for lane, total in enumerate(totals)
                if first < total
            )
            for first in range(0, max(totals), chunk)
        )
        yield Group(documents, chunk, steps)


def published_window(first: int, count: int, chunk: int, context: int) -> tuple[int, int, int]:
    """The inputs read again to price a turn: (start in the document, length, offset of `first`).

    A last turn with fewer than `chunk` targets reaches further back (PR 1530): its start tells
    that the document ends. A decodable reader takes the start for a `count` of `chunk`.
    """
    require(chunk <= context, f"chunk = {chunk}: expected at most the context, {context} tokens")
    assert 0 < count <= chunk
    start = max(0, first + count - context)
    return start, first + count - start, first - start


def fresh_window(first: int, count: int, chunk: int, context: int) -> tuple[int, int, int]:
    """The same for a decoder, who does not know that a chunk is a document's last before its end:
    the window begins where that of a whole chunk does."""
    start, length, offset = published_window(first, chunk, chunk, context)
    return start, length - chunk + count, offset
