"""The sample of text that trains a tokenizer: training documents, chosen by hash."""

import heapq
from collections.abc import Iterable

# More text changes the vocabulary very little.
SAMPLE_BYTES = 20_000_000

# Far below SAMPLE_BYTES, so that one long document cannot fill the sample.
CHARACTERS_PER_DOCUMENT = 1_000_000


def sample_by_hash(documents: Iterable[tuple[bytes, str]], cap_bytes: int) -> list[str]:
    """The texts with the smallest hashes that fit the cap; the order of input does not matter."""
    kept: dict[bytes, str] = {}
    largest_first: list[tuple[int, bytes]] = []
    num_bytes = 0
    limit = b"\xff" * 33
    for digest, text in documents:
        if digest >= limit or digest in kept:
            continue
        kept[digest] = text[:CHARACTERS_PER_DOCUMENT]
        heapq.heappush(largest_first, (-int.from_bytes(digest, "big"), digest))
        num_bytes += len(kept[digest].encode())
        while num_bytes > cap_bytes:
            # Larger hashes are excluded from now on, so the choice does not depend on the order.
            limit = heapq.heappop(largest_first)[1]
            num_bytes -= len(kept.pop(limit).encode())
    return [kept[digest] for digest in sorted(kept)]
