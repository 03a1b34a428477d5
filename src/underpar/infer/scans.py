"""Loops over a stream of tokens that say what they expect next, then learn what came.

They are plain Python on arrays. With Numba they are compiled on first use; without it they run as
they are, tens of times slower and with the same results bit for bit. For that no product here
overflows: contexts are hashed modulo a prime, twice (Karp and Rabin 1987). No scan looks at a
target before its proposal is written.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from underpar.infer.experts import Ints, Trust

Words = npt.NDArray[np.int32]

PRIME = (1 << 31) - 1
# Below 2^30, so that a product with a sum of two residues fits in 63 bits. One base for the row of
# a context, another for the check that is kept in the row.
BASES = (0x2545F491, 0x369DEA0F)
PAIR_BASES = (0x27BB2EE6, 0x1B873593)
TOKEN_FACTOR = 0x1E3779B9

# Columns of a table of counts. A row with total 0 is free.
CHECK, TOKEN, BEST, TOTAL = 0, 1, 2, 3
# The other column of a table of places.
PLACE = 1
# A match: the place expected next, the tokens that agreed, the end of the history itself.
NEXT, LENGTH, END = 0, 1, 2


class Trail(NamedTuple):
    """The end of one history: rolling hashes of its last tokens, over several lengths."""

    lengths: Ints  # (K,) tokens in each context, longest first
    powers: Ints  # (K, 2) of the bases, to the power length - 1
    seen: Ints  # (1,) tokens so far
    hashes: Ints  # (K, 2) row and check
    ring: Ints  # (a power of two,) mixed tokens


class Counts(NamedTuple):
    """An open-addressing table: contexts with their best token, and pairs of context and token.

    A row of a pair holds its count as the total. The best token's count stands in the context's
    row alone; a pair has a row only while it is not the best, so most contexts need no other.
    """

    rows: Words  # (a power of two, 4)
    used: Ints  # (1,) rows taken
    room: int  # rows that may be taken


class Gate(NamedTuple):
    """When a context may propose its best token."""

    min_count: int
    min_confidence: float
    prior: float  # added to the total when confidence is taken


class Places(NamedTuple):
    """Every token so far, linked along its history, and where contexts were last seen."""

    rows: Words  # (a power of two, 2) check and place
    tokens: Words  # (places,) place 0 is none
    after: Words  # (places,) the next place in the same history; 0: not yet
    used: Ints  # (1,) places taken


def mix(token: int) -> int:
    """A residue far from those of the tokens beside it, so that rows fill up evenly."""
    return (token + 1) * TOKEN_FACTOR % PRIME


def push(trail: Trail, token: int) -> None:
    """Append a token to a history."""
    seen, last = int(trail.seen[0]), len(trail.ring) - 1
    new = mix(token)
    for k in range(len(trail.lengths)):
        # Zero until the history is that long: the ring starts empty.
        old = int(trail.ring[(seen - int(trail.lengths[k])) & last])
        for i in range(2):
            rest = int(trail.hashes[k, i]) + PRIME - old * int(trail.powers[k, i]) % PRIME
            trail.hashes[k, i] = (rest * BASES[i] + new) % PRIME
    trail.ring[seen & last] = new
    trail.seen[0] = seen + 1


def find(counts: Counts, key: int, check: int) -> int:
    """The row of a key, or the free row where it would go."""
    last = len(counts.rows) - 1
    row = key & last
    while counts.rows[row, TOTAL] != 0 and counts.rows[row, CHECK] != check:
        row = (row + 1) & last
    return row


def claim(counts: Counts, key: int, check: int, token: int) -> int:
    """The row of a key, taken with total 0 if it is new; -1 where the table is full."""
    row = find(counts, key, check)
    if counts.rows[row, TOTAL] != 0:
        return row
    if counts.used[0] >= counts.room:
        return -1
    counts.used[0] += 1
    counts.rows[row, CHECK] = check
    counts.rows[row, TOKEN] = token
    counts.rows[row, BEST] = 0
    return row


def claim_pair(counts: Counts, key: int, check: int, token: int) -> int:
    """The same for a context with a token behind it."""
    new = mix(token)
    key, check = (key * PAIR_BASES[0] + new) % PRIME, (check * PAIR_BASES[1] + new) % PRIME
    return claim(counts, key, check, token)


def look(counts: Counts, trail: Trail, gate: Gate) -> tuple[int, float]:
    """The best token of the longest context that passes the gate, and its confidence; reads only.

    Without one: -1.
    """
    for k in range(len(trail.lengths)):
        if trail.seen[0] < trail.lengths[k]:
            continue
        row = find(counts, int(trail.hashes[k, 0]), int(trail.hashes[k, 1]))
        total = int(counts.rows[row, TOTAL])
        if total < gate.min_count:
            continue
        confidence = int(counts.rows[row, BEST]) / (total + gate.prior)
        if confidence >= gate.min_confidence:
            return int(counts.rows[row, TOKEN]), confidence
    return -1, 0.0


def learn(counts: Counts, trail: Trail, token: int) -> None:
    """Count a token behind every context that the history ends with."""
    rows = counts.rows
    for k in range(len(trail.lengths)):
        if trail.seen[0] < trail.lengths[k]:
            continue
        key, check = int(trail.hashes[k, 0]), int(trail.hashes[k, 1])
        row = claim(counts, key, check, token)
        if row < 0:
            continue
        rows[row, TOTAL] += 1
        if rows[row, TOKEN] == token:
            rows[row, BEST] += 1
            continue
        pair = claim_pair(counts, key, check, token)
        if pair < 0:
            continue
        rows[pair, TOTAL] += 1
        if rows[pair, TOTAL] > rows[row, BEST]:
            # The old best token goes back among the pairs.
            old = claim_pair(counts, key, check, int(rows[row, TOKEN]))
            if old >= 0:
                rows[old, TOTAL] = rows[row, BEST]
            rows[row, TOKEN], rows[row, BEST] = token, rows[pair, TOTAL]


def scan_counts(
    tokens: Ints,
    counts: Counts,
    trail: Trail,
    gate: Gate,
    hints: Ints,
    confidence: Trust,
) -> None:
    """Fill hints and confidence (n,) for consecutive tokens (n,) of a history, counting each."""
    for i in range(len(tokens)):
        hints[i], confidence[i] = look(counts, trail, gate)
        token = int(tokens[i])
        learn(counts, trail, token)
        push(trail, token)


def scan_matches(
    tokens: Ints,
    places: Places,
    trail: Trail,
    match: Ints,
    hints: Ints,
    lengths: Ints,
) -> None:
    """Fill hints and the lengths (n,) of the matches behind them, remembering each token.

    `match` (3,) is the history's own.
    """
    for i in range(len(tokens)):
        expected = int(match[NEXT])
        hints[i] = int(places.tokens[expected]) if expected > 0 else -1
        lengths[i] = match[LENGTH] if expected > 0 else 0
        token = int(tokens[i])
        push(trail, token)
        append(places, match, token)
        seek(places, trail, match)


def append(places: Places, match: Ints, token: int) -> None:
    """Put a token at the end of a history and follow the match over it, if it agreed."""
    place = int(places.used[0]) + 1
    places.used[0] = place
    places.tokens[place] = token
    # The first token of a history is linked to place 0, which nothing reads.
    places.after[int(match[END])] = place
    match[END] = place
    expected = int(match[NEXT])
    if expected > 0 and places.tokens[expected] == token:
        # In a run of one token this is the place just taken.
        match[NEXT] = places.after[expected]
        match[LENGTH] += 1
    else:
        match[NEXT] = match[LENGTH] = 0


def seek(places: Places, trail: Trail, match: Ints) -> None:
    """Look for a longer match than the one there is, then note where the contexts end now."""
    for k in range(len(trail.lengths)):
        length = int(trail.lengths[k])
        if trail.seen[0] < length:
            continue
        row, check = int(trail.hashes[k, 0]) & (len(places.rows) - 1), int(trail.hashes[k, 1])
        place = int(places.rows[row, PLACE])
        if match[LENGTH] < length and place > 0 and places.rows[row, CHECK] == check:
            match[NEXT] = places.after[place]
            match[LENGTH] = length
        places.rows[row, CHECK], places.rows[row, PLACE] = check, int(match[END])


_PARTS = (mix, push, find, claim, claim_pair, look, learn, append, seek)


@cache
def compiled(scan: Callable[..., None]) -> Callable[..., None]:
    """A scan compiled by Numba, or the scan itself where Numba is not installed."""
    numba = _numba()
    if numba is None:
        return scan
    try:
        return numba.njit(cache=True, nogil=True)(scan)
    except RuntimeError:
        # Installed where nothing can be written: compiled anew in every process.
        return numba.njit(nogil=True)(scan)


@cache
def _numba() -> Any:
    try:
        import numba
        from numba.extending import register_jitable
    except ImportError:
        return None
    for part in _PARTS:
        register_jitable(part)
    return numba
