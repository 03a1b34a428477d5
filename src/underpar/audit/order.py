"""The order of a score's events: whether they are those of a loop of predict, commit, adapt.

What prices depend on is tried in traces.py; this file reads what the score says of itself (A05, A06
and A07 of the field guide, parameter-golf issue 1017).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from underpar.score.ledger import Score
from underpar.score.method import PUBLISHED
from underpar.score.ttt.schedule import Chunk, ChunkSizes, published_schedule, stream_schedule

# Kinds of events, in their order within a step.
KINDS = ("stop", "price", "adapt", "train")


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
    groups = published_schedule(num_targets, lengths, lanes["group"], sizes)
    return [chunks for group in groups for chunks in group.steps]
