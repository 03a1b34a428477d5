"""The ledger while it is written: each target priced once, in the order of the method."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from underpar.data.shards import Shard
from underpar.errors import RuleError
from underpar.score.ledger import Entry

# Document, its first target among those entered, and their nats (n,), with all mixing done.
OnCommit = Callable[[int, int, np.ndarray], None]


class Tally:
    """Bits and targets of each document so far, and what was done, in order."""

    def __init__(self, shard: Shard, on_commit: OnCommit | None = None) -> None:
        self._shard = shard
        self._on_commit = on_commit
        self._bits = np.zeros(shard.num_documents)
        # The last document is followed by nothing: one target less.
        self.expected = np.diff(shard.starts, append=shard.num_tokens).astype(np.int64)
        self.expected[-1] -= 1
        self._priced = np.zeros(shard.num_documents, dtype=np.int64)
        self.events: list[tuple[str, int, int]] = []

    def commit(self, document: int, first: int, nats: np.ndarray) -> None:
        """Add the prices of consecutive targets, which must be a document's next ones."""
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
        """Add the prices of consecutive targets of the stream; target i is token i + 1."""
        place = 0
        while place < len(nats):
            document = int(np.searchsorted(self._shard.starts, first + place, side="right")) - 1
            own = first + place - int(self._shard.starts[document])
            count = min(len(nats) - place, int(self.expected[document]) - own)
            assert count > 0, "more prices than the stream has targets"
            self.commit(document, own, nats[place : place + count])
            place += count

    def note(self, kind: str, first: int, last: int) -> None:
        """Remember what was done, behind everything before it."""
        self.events.append((kind, first, last))

    def is_finished(self, document: int) -> bool:
        """True once all of a document is priced."""
        return bool(self._priced[document] == self.expected[document])

    @property
    def share(self) -> float:
        """Share of the targets that are priced."""
        return float(self._priced.sum() / max(1, self.expected.sum()))

    @property
    def bpb(self) -> float:
        """Bits per byte so far; bytes of unfinished documents count by their share."""
        # A last document that is a BOS alone has nothing to wait for.
        known = np.where(self.expected > 0, self._priced / np.maximum(1, self.expected), 1.0)
        return float(self._bits.sum() / max(1.0, float((known * self._shard.doc_bytes).sum())))

    def state(self) -> dict[str, Any]:
        """What was entered and done so far."""
        return {"bits": self._bits, "priced": self._priced, "events": self.events}

    def load(self, state: Mapping[str, Any]) -> None:
        """Go on from a state of the same shard."""
        self._bits, self._priced = state["bits"], state["priced"]
        self.events = [(kind, first, last) for kind, first, last in state["events"]]

    def entries(self) -> list[Entry]:
        """One entry for each document, in the order of the file; all of them must be priced."""
        assert (self._priced == self.expected).all(), "a target was missed"
        columns = (self._bits, self._shard.doc_bytes, self._priced)
        return [
            Entry(document, float(bits), int(num_bytes), int(num_targets))
            for document, (bits, num_bytes, num_targets) in enumerate(zip(*columns, strict=True))
        ]
