"""Which text a tokenizer is trained on: training documents alone, chosen by their hash."""

import heapq
from collections.abc import Iterable

# More moves a vocabulary of this size very little.
SAMPLE_BYTES = 20_000_000

# Far below the sample, so that one long document cannot crowd out all others.
_CHARACTERS_PER_DOCUMENT = 1_000_000


def sample_by_hash(documents: Iterable[tuple[bytes, str]], cap_bytes: int) -> list[str]:
    """Texts of (hash, text) pairs: the smallest hashes that fit the cap, whatever the order."""
    kept: dict[bytes, str] = {}
    largest_first: list[tuple[int, bytes]] = []
    num_bytes = 0
    limit = b"\xff" * 33
    for digest, text in documents:
        if digest >= limit or digest in kept:
            continue
        kept[digest] = text[:_CHARACTERS_PER_DOCUMENT]
        heapq.heappush(largest_first, (-int.from_bytes(digest, "big"), digest))
        num_bytes += len(kept[digest].encode())
        while num_bytes > cap_bytes:
            # Everything from here up stays out for good: that makes the choice order-free.
            limit = heapq.heappop(largest_first)[1]
            num_bytes -= len(kept.pop(limit).encode())
    return [kept[digest] for digest in sorted(kept)]
