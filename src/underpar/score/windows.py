"""The context each token is scored in: which documents share a pass, and how long ones are cut.

A document is priced in pieces of `context` inputs; no piece sees another document, and a later
piece starts without context (the packed evaluation of PR 1530). Chunks of documents close after
the document that fills them, so a decoder, which knows what it has decoded, knows where each ends.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence


def chunk_documents(lengths: Sequence[int], chunk_tokens: int) -> Iterator[range]:
    """Consecutive documents, each chunk the shortest with at least `chunk_tokens` tokens."""
    first, filled = 0, 0
    for index, length in enumerate(lengths):
        filled += length
        if filled >= chunk_tokens:
            yield range(first, index + 1)
            first, filled = index + 1, 0
    if first < len(lengths):
        yield range(first, len(lengths))
