"""Loops over a stream of tokens that guess each token, then learn it.

Each token is of one of several histories. There may be one guess more than tokens, after which
nothing is learned. The loops are plain Python on arrays. Numba compiles them on first use; without
Numba they run tens of times slower, with the same results bit for bit. Results are the same because
no product overflows: contexts are hashed modulo a prime, twice (Karp and Rabin 1987). No scan reads
a target before it has written the guess for it.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from underpar.infer.experts import Floats, Ints, Trust

Words = npt.NDArray[np.int32]

PRIME = (1 << 31) - 1
# Below 2^30, so that a product with a sum of two residues fits in 63 bits. One base for the row of
# a context, another for the check that is kept in the row.
BASES = (0x2545F491, 0x369DEA0F)
PAIR_BASES = (0x27BB2EE6, 0x1B873593)
# A third pair, because a word's hash is itself a polynomial in BASES.
WORD_BASES = (0x3C6EF35F, 0x19660D3B)
TOKEN_FACTOR = 0x1E3779B9

# Columns of a table of counts; a row with total 0 is free.
CHECK, TOKEN, BEST, TOTAL = 0, 1, 2, 3
# The second column of the rows of `Links`; the first is CHECK.
POSITION = 1
# What a token does to words: it continues the open word, starts one, or stands outside of words.
CONTINUES, STARTS, OUTSIDE = 0, 1, 2
# An open word: hashes of its tokens for row and check, and how many they are.
ROW, ROW_CHECK, SIZE = 0, 1, 2
# A match: the position of the token expected next, how many tokens agreed, the history's end.
NEXT, LENGTH, END = 0, 1, 2


class Trail(NamedTuple):
    """The end of one history: rolling hashes of its last tokens, over several lengths."""

    lengths: Ints  # (K,) tokens in each context, longest first
    powers: Ints  # (K, 2) of the bases, to the power length - 1
    seen: Ints  # (1,) tokens so far
    hashes: Ints  # (K, 2) row and check
    ring: Ints  # (a power of two,) mixed tokens


class Counts(NamedTuple):
    """An open-addressing table of contexts, and of pairs of a context and a token.

    The row of a context has its most frequent token, that token's count and the total. The row of a
    pair has its count as the total. The most frequent token of a context has no pair row, so most
    contexts need one row.
    """

    rows: Words  # (a power of two, 4)
    used: Ints  # (1,) rows taken
    room: int  # rows that may be taken


class Gate(NamedTuple):
    """When a context may propose its best token."""

    min_count: int
    min_confidence: float
    prior: float  # added to the total when confidence is taken


class Gates(NamedTuple):
    """A gate for each of K kinds of contexts."""

    min_counts: Ints
    min_confidences: Floats
    priors: Floats


class WordTrail(NamedTuple):
    """The end of one history in words: hashes of the open word and of the last closed ones."""

    word: Ints  # (3,) ROW, ROW_CHECK, SIZE; the size is 0 between words
    closed: Ints  # (words, 2) a ring
    num_closed: Ints  # (1,)


class Links(NamedTuple):
    """Every token so far, linked along its history, and the last position of each context."""

    rows: Words  # (a power of two, 2) check and position
    tokens: Words  # (positions,) position 0 is none
    after: Words  # (positions,) the next position in the same history; 0: not yet
    used: Ints  # (1,) positions taken


def mix(token: int) -> int:
    """A hash of a token; neighboring tokens get distant values, so that rows fill evenly."""
    return (token + 1) * TOKEN_FACTOR % PRIME


def trail_of(trails: Trail, history: int) -> Trail:
    """The trail of one history; arrays of `trails` have one more axis, the first."""
    return Trail(
        trails.lengths,
        trails.powers,
        trails.seen[history],
        trails.hashes[history],
        trails.ring[history],
    )


def words_of(words: WordTrail, history: int) -> WordTrail:
    """The words of one history; arrays of `words` have one more axis, the first."""
    return WordTrail(words.word[history], words.closed[history], words.num_closed[history])


def push(trail: Trail, token: int) -> None:
    """Append a token to a history."""
    seen, last = int(trail.seen[0]), len(trail.ring) - 1
    new = mix(token)
    for k in range(len(trail.lengths)):
        # Zero until the history is this long, because the ring starts empty.
        old = int(trail.ring[(seen - int(trail.lengths[k])) & last])
        for i in range(2):
            rest = int(trail.hashes[k, i]) + PRIME - old * int(trail.powers[k, i]) % PRIME
            trail.hashes[k, i] = (rest * BASES[i] + new) % PRIME
    trail.ring[seen & last] = new
    trail.seen[0] = seen + 1


def find(counts: Counts, key: int, check: int) -> int:
    """The row of a key, or the free row for it."""
    last = len(counts.rows) - 1
    row = key & last
    while counts.rows[row, TOTAL] != 0 and counts.rows[row, CHECK] != check:
        row = (row + 1) & last
    return row


def claim(counts: Counts, key: int, check: int, token: int) -> int:
    """The row of a key, a new row with total 0 if needed; -1 if the table is full."""
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
    """The row of a pair: a context and the token after it."""
    new = mix(token)
    key, check = (key * PAIR_BASES[0] + new) % PRIME, (check * PAIR_BASES[1] + new) % PRIME
    return claim(counts, key, check, token)


def ask(counts: Counts, key: int, check: int, gates: Gates, k: int) -> tuple[int, float]:
    """The best token of a context and its confidence; the token is -1 if gate `k` stays closed."""
    row = find(counts, key, check)
    total = int(counts.rows[row, TOTAL])
    if total < gates.min_counts[k]:
        return -1, 0.0
    confidence = int(counts.rows[row, BEST]) / (total + gates.priors[k])
    if confidence < gates.min_confidences[k]:
        return -1, 0.0
    return int(counts.rows[row, TOKEN]), confidence


def count(counts: Counts, key: int, check: int, token: int) -> None:
    """Count a token after a context."""
    rows = counts.rows
    row = claim(counts, key, check, token)
    if row < 0:
        return
    rows[row, TOTAL] += 1
    if rows[row, TOKEN] == token:
        rows[row, BEST] += 1
        return
    pair = claim_pair(counts, key, check, token)
    if pair < 0:
        return
    rows[pair, TOTAL] += 1
    if rows[pair, TOTAL] > rows[row, BEST]:
        # The old best token becomes a pair again.
        old = claim_pair(counts, key, check, int(rows[row, TOKEN]))
        if old >= 0:
            rows[old, TOTAL] = rows[row, BEST]
        rows[row, TOKEN], rows[row, BEST] = token, rows[pair, TOTAL]


def look(counts: Counts, trail: Trail, gates: Gates) -> tuple[int, float]:
    """The best token of the longest context that passes its gate, and its confidence.

    The token is -1 if no context passes. Nothing is changed.
    """
    for k in range(len(trail.lengths)):
        if trail.seen[0] < trail.lengths[k]:
            continue
        key, check = int(trail.hashes[k, 0]), int(trail.hashes[k, 1])
        token, confidence = ask(counts, key, check, gates, k)
        if token >= 0:
            return token, confidence
    return -1, 0.0


def learn(counts: Counts, trail: Trail, token: int) -> None:
    """Count a token after every context that the history ends with."""
    for k in range(len(trail.lengths)):
        if trail.seen[0] >= trail.lengths[k]:
            count(counts, int(trail.hashes[k, 0]), int(trail.hashes[k, 1]), token)


def scan_counts(
    tokens: Ints,
    histories: Ints,
    counts: Counts,
    trails: Trail,
    gates: Gates,
    hints: Ints,
    confidence: Trust,
) -> None:
    """Fill hints and confidence (n,) for the next tokens (n,) of histories (n,), counting them."""
    for i in range(len(hints)):
        trail = trail_of(trails, int(histories[i]))
        hints[i], confidence[i] = look(counts, trail, gates)
        if i == len(tokens):
            break
        token = int(tokens[i])
        learn(counts, trail, token)
        push(trail, token)


def scan_word(
    tokens: Ints,
    histories: Ints,
    kinds: npt.NDArray[np.int8],
    counts: Counts,
    trails: WordTrail,
    gates: Gates,
    hints: Ints,
    confidence: Trust,
) -> None:
    """Fill hints and confidence (n,) from the open word, counting how it goes on.

    `kinds` (V,) says what each token does to words.
    """
    for i in range(len(hints)):
        words = words_of(trails, int(histories[i]))
        word = words.word
        hints[i], confidence[i] = -1, 0.0
        if word[SIZE] > 0:
            hints[i], confidence[i] = ask(counts, int(word[ROW]), int(word[ROW_CHECK]), gates, 0)
        if i == len(tokens):
            break
        token = int(tokens[i])
        if word[SIZE] > 0 and kinds[token] == CONTINUES:
            count(counts, int(word[ROW]), int(word[ROW_CHECK]), token)
        read(words, token, int(kinds[token]))


def scan_word_starts(
    tokens: Ints,
    histories: Ints,
    kinds: npt.NDArray[np.int8],
    counts: Counts,
    trails: WordTrail,
    gates: Gates,
    hints: Ints,
    confidence: Trust,
) -> None:
    """Fill hints and confidence (n,) from the last closed words, counting how the next one starts.

    The open word is not among them: the hint is the start of the word after the closed ones.
    """
    for i in range(len(hints)):
        words = words_of(trails, int(histories[i]))
        hints[i], confidence[i] = -1, 0.0
        if words.num_closed[0] >= len(words.closed):
            hints[i], confidence[i] = ask(counts, phrase(words, 0), phrase(words, 1), gates, 0)
        if i == len(tokens):
            break
        token = int(tokens[i])
        read(words, token, int(kinds[token]))
        if kinds[token] == STARTS and words.num_closed[0] >= len(words.closed):
            count(counts, phrase(words, 0), phrase(words, 1), token)


def read(words: WordTrail, token: int, kind: int) -> None:
    """Append a token to a history of words."""
    word, num = words.word, int(words.num_closed[0])
    if kind != CONTINUES and word[SIZE] > 0:
        last = num % len(words.closed)
        words.closed[last, 0], words.closed[last, 1] = word[ROW], word[ROW_CHECK]
        words.num_closed[0] = num + 1
        word[ROW] = word[ROW_CHECK] = word[SIZE] = 0
    if kind != OUTSIDE:
        for i in range(2):
            word[i] = (int(word[i]) * BASES[i] + mix(token)) % PRIME
        word[SIZE] += 1


def phrase(words: WordTrail, i: int) -> int:
    """Hash `i` of the last closed words, the oldest first."""
    size, num, hash_ = len(words.closed), int(words.num_closed[0]), 0
    for j in range(size):
        hash_ = (hash_ * WORD_BASES[i] + int(words.closed[(num + j) % size, i])) % PRIME
    return hash_


def scan_matches(
    tokens: Ints,
    histories: Ints,
    links: Links,
    trails: Trail,
    matches: Ints,
    hints: Ints,
    lengths: Ints,
) -> None:
    """Fill hints and the lengths of their matches (n,), and store the tokens.

    `matches` (histories, 3) are the states of all histories.
    """
    for i in range(len(hints)):
        trail, match = trail_of(trails, int(histories[i])), matches[int(histories[i])]
        expected = int(match[NEXT])
        hints[i] = int(links.tokens[expected]) if expected > 0 else -1
        lengths[i] = match[LENGTH] if expected > 0 else 0
        if i == len(tokens):
            break
        token = int(tokens[i])
        push(trail, token)
        append(links, match, token)
        seek(links, trail, match)


def append(links: Links, match: Ints, token: int) -> None:
    """Append a token to a history; the match goes on if the token agrees, else it ends."""
    position = int(links.used[0]) + 1
    links.used[0] = position
    links.tokens[position] = token
    # The first token of a history is linked from position 0, which nothing reads.
    links.after[int(match[END])] = position
    match[END] = position
    expected = int(match[NEXT])
    if expected > 0 and links.tokens[expected] == token:
        # In a run of one token this is the position just taken.
        match[NEXT] = links.after[expected]
        match[LENGTH] += 1
    else:
        match[NEXT] = match[LENGTH] = 0


def seek(links: Links, trail: Trail, match: Ints) -> None:
    """Replace the match by a longer one if there is one; then store where the contexts end."""
    for k in range(len(trail.lengths)):
        length = int(trail.lengths[k])
        if trail.seen[0] < length:
            continue
        row, check = int(trail.hashes[k, 0]) & (len(links.rows) - 1), int(trail.hashes[k, 1])
        position = int(links.rows[row, POSITION])
        if match[LENGTH] < length and position > 0 and links.rows[row, CHECK] == check:
            match[NEXT] = links.after[position]
            match[LENGTH] = length
        links.rows[row, CHECK], links.rows[row, POSITION] = check, int(match[END])


_PARTS: tuple[Callable[..., Any], ...] = (
    *(mix, trail_of, words_of, push, find, claim, claim_pair, ask),
    *(count, look, learn, read, phrase, append, seek),
)


@cache
def compiled(scan: Callable[..., None]) -> Callable[..., None]:
    """A scan compiled by Numba, or the scan itself without Numba."""
    numba = _numba()
    if numba is None:
        return scan
    try:
        return numba.njit(cache=True, nogil=True)(scan)
    except RuntimeError:
        # Installed in a read-only folder: compile again in every process.
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
