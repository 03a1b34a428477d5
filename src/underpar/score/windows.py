"""The context that each token is scored in: which documents share a pass, how long ones are cut.

A document is priced in pieces of `context` inputs. No piece sees another document, and a later
piece starts without context (the packed evaluation of PR 1530). A chunk of documents ends after the
document that fills it, so a decoder knows where a chunk ends from what it has decoded.

Sliding windows overlap, so that a target sees at least `context - stride` inputs before its own
(PR 50). One window owns each target. Early scorers let several windows price the last targets;
PR 1219 repaired that. With a stride of `context` the windows are the plain pieces.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

from underpar.schema import require

# The document of a window that follows the stream across documents.
STREAM = -1


@dataclass(frozen=True, slots=True)
class Window:
    """`length` inputs from `start` on; the window owns its local targets from `owned` on.

    Local target j is the token after input `start + j` of the document, or of the stream.
    """

    document: int
    start: int
    length: int
    owned: int


def sliding_windows(
    num_targets: int, context: int, stride: int, document: int = STREAM
) -> list[Window]:
    """Windows of up to `context` inputs, one per `stride` targets; each target has one owner."""
    require(
        1 <= stride <= context,
        f"stride = {stride}: expected from 1 to the context, {context} tokens",
    )
    if num_targets == 0:
        return []
    overlap = context - stride
    return [
        Window(document, start, min(context, num_targets - start), overlap if start else 0)
        for start in range(0, max(num_targets - overlap, 1), stride)
    ]


def isolated_windows(num_targets: Sequence[int], context: int, stride: int) -> Iterator[Window]:
    """The windows of one document after the other; no window sees another document."""
    for document, total in enumerate(num_targets):
        yield from sliding_windows(total, context, stride, document)


def flat_windows(num_targets: Sequence[int], context: int, stride: int) -> Iterator[Window]:
    """The windows of the whole stream: context crosses documents (records before PR 1530)."""
    yield from sliding_windows(sum(num_targets), context, stride)


def group_windows(windows: Iterable[Window], batch_tokens: int) -> Iterator[list[Window]]:
    """Consecutive windows, grouped into passes of at most `batch_tokens` inputs.

    A longer window has a pass of its own.
    """
    group: list[Window] = []
    filled = 0
    for window in windows:
        if group and filled + window.length > batch_tokens:
            yield group
            group, filled = [], 0
        group.append(window)
        filled += window.length
    if group:
        yield group


def chunk_windows(windows: Iterable[Window], chunk_targets: int) -> Iterator[list[Window]]:
    """Consecutive windows of a stream, grouped by the chunk of `chunk_targets` targets in which the
    first target that a window owns lies (PR 549).
    """
    for _, group in groupby(windows, lambda window: (window.start + window.owned) // chunk_targets):
        yield list(group)


def chunk_documents(lengths: Sequence[int], chunk_tokens: int) -> Iterator[range]:
    """Consecutive documents; each chunk is the shortest one with `chunk_tokens` tokens or more."""
    first, filled = 0, 0
    for index, length in enumerate(lengths):
        filled += length
        if filled >= chunk_tokens:
            yield range(first, index + 1)
            first, filled = index + 1, 0
    if first < len(lengths):
        yield range(first, len(lengths))
