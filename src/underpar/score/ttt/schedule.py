"""Who is priced when: the order in which lanes take the chunks of documents.

Adapters learn between two chunks of a document, so the order of chunks is part of the method.
`stream_schedule` keeps the order of the file, and the size of a chunk follows from its position in
the document. A decoder, who learns a document's length only at its end, can follow that order.
`published_schedule` is the order of PR 1530 and PR 2014. It sorts documents by length and sizes
chunks by length, so it needs the lengths in advance; it serves to reproduce published figures.
All prices have one total order: (step, lane, target).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

from underpar.schema import require

_SHORT = re.compile(r"(\d{1,9}):(\d{1,9})", re.ASCII)


@dataclass(frozen=True)
class ChunkSizes:
    """Targets per chunk: `default`, and smaller chunks up to a limit ("256:8" is limit:size)."""

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
    def largest(self) -> int:
        """The largest size that a chunk may have."""
        return max(self.default, *(size for _, size in self._entries), 0)

    @cached_property
    def _entries(self) -> list[tuple[int, int]]:
        return sorted(_parse_entry(text) for text in self.short)


def _parse_entry(text: str) -> tuple[int, int]:
    match = _SHORT.fullmatch(text)
    limit, size = map(int, match.groups()) if match else (0, 0)
    require(limit > 0 and size > 0, f"short chunk {text!r}: expected 'limit:size', as in '256:8'")
    return limit, size


@dataclass(frozen=True, slots=True)
class Chunk:
    """What a lane prices in one step: `count` targets of `document` from target `first` on."""

    lane: int
    document: int
    first: int
    count: int
    is_last: bool
    """True for the last chunk of its document."""


@dataclass(frozen=True)
class Group:
    """Documents that run side by side, one per lane, with one chunk size, and their steps."""

    documents: tuple[int, ...]
    chunk_size: int
    steps: tuple[tuple[Chunk, ...], ...]


def _cut_chunk(lane: int, document: int, first: int, left: int, size: int) -> Chunk:
    return Chunk(lane, document, first, min(size, left), is_last=left <= size)


def stream_schedule(
    num_targets: Sequence[int], num_lanes: int, sizes: ChunkSizes
) -> Iterator[list[Chunk]]:
    """The steps of a decodable pass: the chunks of each step, in lane order.

    A free lane takes the next document of the file at the next step, the lowest lane first. All
    chunks up to a step depend only on the targets priced before it and on the number of documents.
    A decoder learns a number of targets at the end of a document. It begins with numbers that are
    too large, and corrects one before it asks for the next step.
    """
    require(num_lanes > 0, f"lanes = {num_lanes}: expected 1 or more")
    waiting = (document for document, total in enumerate(num_targets) if total > 0)

    def cut(lane: int, document: int, first: int) -> Chunk:
        left = num_targets[document] - first
        return _cut_chunk(lane, document, first, left, sizes.by_position(first))

    def following(chunk: Chunk) -> Chunk | None:
        done = chunk.first + chunk.count
        if done < num_targets[chunk.document]:
            return cut(chunk.lane, chunk.document, done)
        document = next(waiting, None)
        return None if document is None else cut(chunk.lane, document, 0)

    step = [cut(lane, doc, 0) for lane, doc in zip(range(num_lanes), waiting, strict=False)]
    while step:
        yield step
        step = [chunk for chunk in map(following, step) if chunk is not None]


def published_schedule(
    num_targets: Sequence[int], doc_lengths: Sequence[int], group: int, sizes: ChunkSizes
) -> Iterator[Group]:
    """Groups of up to `group` documents of similar length, the longest first (PR 1530, PR 2014).

    `doc_lengths` are in tokens with both BOS: one more than the targets. Not decodable.
    """
    require(group > 0, f"group = {group}: expected 1 document or more")
    assert len(num_targets) == len(doc_lengths)
    # Both sorts are stable, as published: of groups with the same maximum the earlier one is first.
    ascending = sorted(range(len(doc_lengths)), key=doc_lengths.__getitem__)
    groups = [tuple(ascending[i : i + group]) for i in range(0, len(ascending), group)]
    for documents in sorted(groups, key=lambda members: -doc_lengths[members[-1]]):
        size = sizes.by_length(doc_lengths[documents[-1]])
        totals = [num_targets[document] for document in documents]
        steps = tuple(
            tuple(
                _cut_chunk(lane, documents[lane], first, total - first, size)
                for lane, total in enumerate(totals)
                if first < total
            )
            for first in range(0, max(totals), size)
        )
        yield Group(documents, size, steps)


def published_window(first: int, count: int, size: int, context: int) -> tuple[int, int, int]:
    """The window that is read again to price a chunk: (start in the document, length, offset).

    `offset` is the position of target `first` in the window. A last chunk with fewer than `size`
    targets has a window that starts earlier (PR 1530), which reveals that the document ends. A
    decodable window has the start that a chunk of `size` targets would have: `fresh_window`.
    """
    require(size <= context, f"chunk = {size}: expected at most the context, {context} tokens")
    assert 0 < count <= size
    start = max(0, first + count - context)
    return start, first + count - start, first - start


def fresh_window(first: int, count: int, size: int, context: int) -> tuple[int, int, int]:
    """The decodable window of a chunk: it starts where the window of a full chunk would.

    A decoder learns only at the end of a chunk that it was the document's last.
    """
    start, length, offset = published_window(first, size, size, context)
    return start, length - size + count, offset
