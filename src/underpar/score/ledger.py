"""Bits and bytes of each document, and their sum. Scores of ranks merge by addition."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from underpar.errors import RuleError


@dataclass(frozen=True)
class Entry:
    """One document: its index in the shard, bits of its targets, bytes of its raw text."""

    document: int
    bits: float
    num_bytes: int
    num_targets: int


@dataclass(frozen=True)
class Score:
    """The ledger of every document priced, in stream order, with what produced it."""

    method: str
    entries: list[Entry]
    seconds: dict[str, float] = field(default_factory=dict)
    # What the scorer did, in order: ("price" | "adapt", first document, last document).
    events: list[tuple[str, int, int]] = field(default_factory=list)

    @property
    def bits(self) -> float:
        """Bits of all targets."""
        return float(np.sum([e.bits for e in self.entries], dtype=np.float64))

    @property
    def num_bytes(self) -> int:
        """Raw UTF-8 bytes of the documents."""
        return sum(e.num_bytes for e in self.entries)

    @property
    def num_targets(self) -> int:
        """Targets priced."""
        return sum(e.num_targets for e in self.entries)

    @property
    def bpb(self) -> float:
        """Bits per byte: summed bits over summed bytes, never a mean of means."""
        return self.bits / self.num_bytes

    def __add__(self, other: Score) -> Score:
        """Both shares of one stream; a document in both is refused."""
        if self.method != other.method:
            raise RuleError(f"scores of methods {self.method!r} and {other.method!r} do not add")
        entries = sorted(self.entries + other.entries, key=lambda e: e.document)
        if len({e.document for e in entries}) != len(entries):
            raise RuleError("a document was scored twice")
        phases = {*self.seconds, *other.seconds}
        seconds = {p: max(self.seconds.get(p, 0), other.seconds.get(p, 0)) for p in sorted(phases)}
        return Score(self.method, entries, seconds, self.events + other.events)

    def as_dict(self) -> dict[str, Any]:
        """Plain values for JSON, totals first."""
        return {
            "method": self.method,
            "bpb": self.bpb,
            "bits": self.bits,
            "bytes": self.num_bytes,
            "targets": self.num_targets,
            "documents": len(self.entries),
            "seconds": self.seconds,
            "events": self.events,
            "ledger": [asdict(e) for e in self.entries],
        }


def score_from_dict(tree: dict[str, Any]) -> Score:
    """The score that `as_dict` wrote; its totals must agree with its ledger."""
    try:
        entries = [Entry(**row) for row in tree["ledger"]]
        events = [(str(kind), int(a), int(b)) for kind, a, b in tree["events"]]
        score = Score(tree["method"], entries, tree["seconds"], events)
        claimed = (tree["bits"], tree["bytes"], tree["targets"], tree["documents"])
    except (KeyError, TypeError, ValueError) as error:
        raise RuleError(f"not a score file ({error!r})") from error
    if claimed != (score.bits, score.num_bytes, score.num_targets, len(entries)):
        raise RuleError("the score's totals differ from the sums of its ledger")
    return score
