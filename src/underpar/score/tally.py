"""The ledger while a score is made: each target priced once, in the order of the method."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from underpar.data.shards import Shard
from underpar.errors import RuleError
from underpar.score.ledger import Entry, Score
from underpar.score.method import STOP_BITS, Method

if TYPE_CHECKING:
    from underpar.core.runtime import Clock

# Called with a document, its first target that is entered, and the final nats (n,) of the targets.
OnCommit = Callable[[int, int, np.ndarray], None]
# Called with the share of targets done, and the bits per byte so far.
OnShare = Callable[[float, float], None]


def num_targets_of(shard: Shard) -> np.ndarray:
    """Targets per document: as many as tokens, as the next BOS ends it; the last has one less."""
    totals = np.diff(shard.starts, append=shard.num_tokens).astype(np.int64)
    totals[-1] -= 1
    return totals


class Tally:
    """Bits and targets of each document so far, and the events, in order."""

    def __init__(self, shard: Shard, on_commit: OnCommit | None = None) -> None:
        self._shard = shard
        self._on_commit = on_commit
        self._bits = np.zeros(shard.num_documents)
        self.expected = num_targets_of(shard)
        self._priced = np.zeros(shard.num_documents, dtype=np.int64)
        self.events: list[tuple[str, int, int]] = []

    def commit(self, document: int, first: int, nats: np.ndarray) -> None:
        """Enter the prices of a document's next targets; other targets are refused."""
        if first != self._priced[document]:
            raise RuleError(
                f"document {document}: target {first} was priced when {self._priced[document]} "
                "was the next"
            )
        self._bits[document] += float(np.sum(nats, dtype=np.float64)) / math.log(2)
        self._priced[document] += len(nats)
        if self._on_commit:
            self._on_commit(document, first, nats)

    def commit_stream(self, first: int, nats: np.ndarray) -> None:
        """Enter the prices of consecutive targets of the stream; target i is token i + 1."""
        while len(nats):
            document = int(np.searchsorted(self._shard.starts, first, side="right")) - 1
            target = first - int(self._shard.starts[document])
            count = min(len(nats), int(self.expected[document]) - target)
            assert count > 0, "more prices than the stream has targets"
            self.commit(document, target, nats[:count])
            first, nats = first + count, nats[count:]

    def note(self, kind: str, first: int, last: int) -> None:
        """Append an event."""
        self.events.append((kind, first, last))

    def has_priced(self, num_targets: int) -> bool:
        """True once so many targets are priced: the first ones, in the order of the stream."""
        return bool(self._priced.sum() >= num_targets)

    def is_finished(self, document: int) -> bool:
        """True once all targets of a document are priced."""
        return bool(self._priced[document] == self.expected[document])

    @property
    def share(self) -> float:
        """Share of the targets that are priced."""
        return float(self._priced.sum() / max(1, self.expected.sum()))

    @property
    def bpb(self) -> float:
        """Bits per byte so far; bytes of unfinished documents count by their share."""
        # A last document of a BOS alone has no target: its bytes count from the start.
        known = np.where(self.expected > 0, self._priced / np.maximum(1, self.expected), 1.0)
        return float(self._bits.sum() / max(1.0, float((known * self._shard.doc_bytes).sum())))

    def state(self) -> dict[str, Any]:
        """Prices and events so far."""
        return {"bits": self._bits, "priced": self._priced, "events": self.events}

    def load(self, state: Mapping[str, Any]) -> None:
        """Restore a state of the same shard."""
        self._bits, self._priced = state["bits"], state["priced"]
        self.events = [(kind, first, last) for kind, first, last in state["events"]]

    def score(self, method: Method, clock: Clock, stopped_at: int, told_bits: float = 0.0) -> Score:
        """The score, once every target is priced; `stopped_at` is -1 if learning never ended.

        `told_bits` pay for what a decoder has to be told beforehand.
        """
        return Score(
            method.label,
            self.entries(),
            clock.read(),
            self.events,
            method.order,
            stopped_at,
            told_bits + (STOP_BITS if stopped_at >= 0 else 0.0),
            method.as_dict(),
        )

    def entries(self) -> list[Entry]:
        """One entry per document, in the order of the file; all targets must be priced."""
        assert (self._priced == self.expected).all(), "a target was missed"
        columns = (self._bits, self._shard.doc_bytes, self._priced)
        return [
            Entry(document, float(bits), int(num_bytes), int(num_targets))
            for document, (bits, num_bytes, num_targets) in enumerate(zip(*columns, strict=True))
        ]
