"""Whether a decoder could follow a score's order: its events, and what its prices depend on.

A method prices targets in an order of its own. Tokens and lengths of documents that come later in
this order must not change an earlier price (A01 and A07 of the field guide, parameter-golf issue
1017). The records since PR 1530 sort documents by length and fail. A hint must not depend on the
target it is for, as the hints of PR 1967 do.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import groupby
from typing import Any

import numpy as np

from underpar.audit.probes import first_documents
from underpar.data.shards import Shard
from underpar.infer.tilt import Mixture
from underpar.recipe import Recipe
from underpar.score.ledger import Score
from underpar.score.method import PUBLISHED
from underpar.score.ttt.schedule import Chunk, ChunkSizes, published_schedule, stream_schedule

# One entry of prices: document, first target, nats.
Commit = tuple[int, int, np.ndarray]
# Scores a shard; returns the prices in the order in which they were entered.
Trace = Callable[[Shard], list[Commit]]

# Kinds of events, in their order within a step.
KINDS = ("stop", "price", "adapt", "train")
# Nats; packs of different shapes round differently.
TOLERANCE = 1e-4
# In a probe: the most tokens between two updates, documents per lane, and the divisor of the limits
# of short chunks, so that a short document has chunks of all sizes.
CHUNK_TOKENS, LANE_DOCUMENTS, SHORTER = 160, 3, 16
# How many targets with a hint, and how many without, are replaced, and by how many other tokens.
NUM_TARGETS, NUM_OTHERS = 12, 4


def wrong_events(score: Score, num_targets: Sequence[int]) -> int:
    """The number of events that a loop of predict, commit, adapt does not produce in this order."""
    if unknown := sum(kind not in KINDS for kind, _, _ in score.events):
        return unknown
    lanes = score.how.get("settings", {}).get("lora_ttt")
    if lanes is not None:
        return _wrong_steps(score, num_targets, lanes)
    return _wrong_chunks(score, num_targets)


def _wrong_chunks(score: Score, num_targets: Sequence[int]) -> int:
    """Wrong events of a stream of units, which follow the file; each is priced, then learnt."""
    prices = [(first, last) for kind, first, last in score.events if kind == "price"]
    learns = any(kind == "adapt" for kind, _, _ in score.events)
    # A flat window may end within a document; the next window then begins in that document.
    overlap = bool(score.how.get("flat"))
    wrong, end, expected = 0, 0, []
    for index, (first, last) in enumerate(prices):
        wrong += not (max(0, end - overlap) <= first <= min(end, last))
        end = last + 1
        expected.append(("price", first, last))
        if learns and not 0 <= score.stopped_at <= index:
            expected.append(("adapt", first, last))
    last_priced = max(i for i, total in enumerate(num_targets) if total)
    wrong += not (last_priced < end <= len(num_targets))
    return wrong + _differences(score, expected)


def _wrong_steps(score: Score, num_targets: Sequence[int], lanes: dict[str, Any]) -> int:
    """Wrong events of lanes, whose steps have the targets of the schedule."""
    expected = []
    finished = [0]
    for step, chunks in enumerate(_steps(score.order, num_targets, lanes)):
        expected.append(("price", step, sum(chunk.count for chunk in chunks)))
        learnt = sum(chunk.count for chunk in chunks if not chunk.is_last)
        if learnt and not 0 <= score.stopped_at <= step:
            expected.append(("adapt", step, learnt))
        finished.append(finished[-1] + sum(chunk.is_last for chunk in chunks))
    wrong, trained = int(score.events != sorted(score.events, key=_position)), 0
    for step, num in ((step, num) for kind, step, num in score.events if kind == "train"):
        # The model trains on finished documents, and on more of them each time.
        wrong += not (0 < step < len(finished) and trained < num <= finished[step])
        trained = num
    return wrong + _differences(score, expected)


def _position(event: tuple[str, int, int]) -> tuple[int, int]:
    """Where an event belongs; the model trains at the end of the step before the one it names."""
    kind, step, _ = event
    return step - (kind == "train"), KINDS.index(kind)


def _differences(score: Score, expected: Sequence[tuple[str, int, int]]) -> int:
    events = [event for event in score.events if event[0] in ("price", "adapt")]
    wrong = sum(a != b for a, b in zip(events, expected, strict=False))
    return wrong + abs(len(events) - len(expected))


def _steps(order: str, num_targets: Sequence[int], lanes: dict[str, Any]) -> list[Sequence[Chunk]]:
    sizes = ChunkSizes(lanes["chunk"], tuple(lanes["short"]))
    if order != PUBLISHED:
        return list(stream_schedule(num_targets, lanes["lanes"], sizes))
    lengths = [total + 1 for total in num_targets]
    groups = published_schedule(num_targets, lengths, lanes["lanes"], sizes)
    return [chunks for group in groups for chunks in group.steps]


def short_stream(shard: Shard, num_documents: int, num_tokens: int) -> Shard:
    """The beginnings of the first documents, of unequal lengths up to `num_tokens`."""
    head = first_documents(shard, num_documents)
    most = [num_tokens - num_tokens * (i % 4) // 8 for i in range(head.num_documents)]
    return _with_documents(
        head, [head.doc(i)[:length] for i, length in zip(range(len(most)), most, strict=True)]
    )


def for_probes(recipe: Recipe, shard: Shard) -> Recipe:
    """The recipe for a probe's short text: several updates, several documents per lane, and chunks
    of all sizes in a document."""
    # Independent of the lengths of documents, because a probe changes them.
    score = replace(recipe.score, adapt_tokens=min(recipe.score.adapt_tokens, CHUNK_TOKENS))
    levers = dict(recipe.levers)
    if (lora := levers.get("lora_ttt")) is not None:
        most = max(2, shard.num_documents // LANE_DOCUMENTS)
        limits = (entry.split(":") for entry in lora["short"])
        short = tuple(f"{max(1, int(limit) // SHORTER)}:{size}" for limit, size in limits)
        levers["lora_ttt"] = {**lora, "lanes": min(lora["lanes"], most), "short": short}
    return replace(recipe, score=score, levers=levers)


def later_tokens_matter(trace: Trace, shard: Shard, vocab_size: int) -> int:
    """The number of prices that change when later tokens are replaced, over several cuts."""
    commits = trace(shard)
    changed = 0
    for cut in _cuts(commits):
        # Targets that are entered together are priced together: cut in the middle of them.
        document, first, nats = commits[cut]
        stays = len(nats) // 2
        later = [(document, first + stays, nats[stays:]), *commits[cut + 1 :]]
        after = trace(_swapped(shard, later, vocab_size))
        changed += _num_changed(_until(commits, cut, stays), _until(after, cut, stays))
    return changed


def later_lengths_matter(trace: Trace, shard: Shard) -> int:
    """The number of prices that change when documents end earlier, after the targets entered."""
    commits = trace(shard)
    changed = 0
    for cut in _cuts(commits):
        after = trace(_shortened(shard, commits[:cut]))
        # The next entry ends early. Its prices must stay, except for the new end of the document.
        stays = len(after[cut][2]) - 1 if cut < len(after) else 0
        changed += _num_changed(_until(commits, cut, stays), _until(after, cut, stays))
    return changed


def _cuts(commits: Sequence[Commit]) -> list[int]:
    return sorted({len(commits) * quarter // 4 for quarter in (1, 2, 3)})


def _until(commits: Sequence[Commit], cut: int, stays: int) -> list[Commit]:
    """The commits before a cut, and the first few prices of the one at it."""
    begun = [(document, first, nats[:stays]) for document, first, nats in commits[cut : cut + 1]]
    return [*commits[:cut], *begun]


def _num_changed(before: Sequence[Commit], after: Sequence[Commit]) -> int:
    changed = max(0, len(before) - len(after))
    for old, new in zip(before, after, strict=False):
        same = old[:2] == new[:2] and len(old[2]) == len(new[2])
        changed += not (same and bool((np.abs(old[2] - new[2]) <= TOLERANCE).all()))
    return changed


def own_targets_matter(mixture: Mixture, targets: np.ndarray, vocab_size: int) -> int:
    """The number of proposals that change when their own target is replaced, over some targets."""
    if not mixture.experts:
        return 0

    def propose(stream: np.ndarray) -> np.ndarray:
        mixture.open(1, len(targets))
        proposals = mixture.propose(0, stream)
        return np.concatenate([proposals.hints, proposals.confidence], axis=1)  # (n, 2 K)

    rng = np.random.default_rng(3)
    honest = propose(targets)
    # Hints may be rare: half of the targets are chosen among those that have one.
    has_hint = (honest[:, : len(mixture.experts)] >= 0).any(axis=1)
    kinds = [np.flatnonzero(has_hint), np.flatnonzero(~has_hint)]
    chosen = np.concatenate([rng.choice(kind, min(len(kind), NUM_TARGETS)) for kind in kinds])
    changed = 0
    for target in chosen:
        for token in rng.integers(4, vocab_size, NUM_OTHERS):
            other = propose(np.append(targets[:target], token))
            changed += not np.array_equal(other, honest[: target + 1])
    return changed


def _swapped(shard: Shard, later: Sequence[Commit], vocab_size: int) -> Shard:
    rng = np.random.default_rng(1)
    tokens = np.array(shard.tokens)
    for document, first, nats in later:
        begin = int(shard.starts[document]) + first + 1
        # The end of a document is the next one's BOS, which stays.
        end = min(begin + len(nats), int(shard.starts[document]) + len(shard.doc(document)))
        # Ids above the control pieces, so that no boundary appears.
        tokens[begin:end] = rng.integers(4, vocab_size, end - begin)
    return replace(shard, tokens=tokens)


def _shortened(shard: Shard, entered: Sequence[Commit]) -> Shard:
    """The shard, with unfinished documents ending a few tokens after the targets entered."""
    rng = np.random.default_rng(2)
    priced = np.zeros(shard.num_documents, dtype=np.int64)
    for document, entries in groupby(sorted(entered, key=lambda c: c[0]), key=lambda c: c[0]):
        priced[document] = sum(len(nats) for _, _, nats in entries)
    documents = []
    for document in range(shard.num_documents):
        tokens = shard.doc(document)
        # Nothing follows the last document: it has one target less than tokens.
        spare = int(document == shard.num_documents - 1)
        if priced[document] < len(tokens) - spare:
            tokens = tokens[: int(priced[document]) + 1 + spare + int(rng.integers(1, 5))]
        documents.append(tokens)
    return _with_documents(shard, documents)


def _with_documents(shard: Shard, documents: Sequence[np.ndarray]) -> Shard:
    lengths = np.array([len(tokens) for tokens in documents])
    starts = np.cumsum(lengths) - lengths
    return replace(shard, tokens=np.concatenate(documents), starts=starts)
