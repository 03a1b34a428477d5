"""Frequency tables of symbols: counts become integers with the sum 2^14, the same everywhere."""

from __future__ import annotations

import heapq

import numpy as np

from underpar.errors import ArtifactError

PROB_BITS = 14
TOTAL = 1 << PROB_BITS


def normalize_counts(counts: np.ndarray) -> np.ndarray:
    """Frequencies (uint32, sum 2^PROB_BITS, at least 1 where a count is positive) for counts.

    All-zero counts give everything to symbol 0.
    """
    counts = np.asarray(counts)
    if counts.ndim != 1 or counts.size == 0 or counts.dtype.kind not in "iu":
        raise ArtifactError(
            f"counts of shape {counts.shape} and type {counts.dtype}: expected a 1-D integer array"
        )
    num_used = int(np.count_nonzero(counts))
    if counts.min() < 0 or num_used > TOTAL:
        raise ArtifactError(
            f"counts with minimum {counts.min()} and {num_used} used symbols: "
            f"expected none below 0 and at most {TOTAL} used"
        )
    # Python integers: exact for any count, and the same on every machine.
    exact: list[int] = counts.tolist()
    if num_used == 0:
        exact[0] = num_used = 1
    return np.array(_share_total(exact, num_used), dtype=np.uint32)


def _share_total(counts: list[int], num_used: int) -> list[int]:
    """Splits 2^PROB_BITS by counts with the least code length, up to the logarithm's rounding."""
    num_symbols = sum(counts)
    # One unit per used symbol is held back, so the shares never exceed the total.
    freqs = [max(1, c * (TOTAL - num_used) // num_symbols) if c else 0 for c in counts]

    def gain(symbol: int) -> int:
        # One more unit saves count * ln((f + 1) / f) nats, and ln((f + 1) / f) ~ 2 / (2f + 1).
        return (counts[symbol] << 32) // (2 * freqs[symbol] + 1)

    heap = [(-gain(symbol), symbol) for symbol, count in enumerate(counts) if count]
    heapq.heapify(heap)
    for _ in range(TOTAL - sum(freqs)):
        symbol = heap[0][1]
        freqs[symbol] += 1
        heapq.heapreplace(heap, (-gain(symbol), symbol))
    assert sum(freqs) == TOTAL
    return freqs


def check_freqs(freqs: np.ndarray) -> np.ndarray:
    """The frequencies as uint32, refused unless they are a table of this coder."""
    freqs = np.asarray(freqs)
    if freqs.ndim != 1 or freqs.size == 0 or freqs.dtype.kind not in "iu":
        raise ArtifactError(
            f"frequencies of shape {freqs.shape} and type {freqs.dtype}: "
            "expected a 1-D integer array"
        )
    # The range first: it keeps the sum from wrapping around.
    if freqs.min() < 0 or freqs.max() > TOTAL or int(freqs.sum(dtype=np.int64)) != TOTAL:
        raise ArtifactError(f"frequencies do not lie in 0..{TOTAL} with the sum {TOTAL}")
    return freqs.astype(np.uint32)
