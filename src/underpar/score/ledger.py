"""A score: bits and bytes of each document, their sums, and how they were made."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, replace
from typing import Any

import numpy as np

from underpar.errors import DAMAGE, RuleError


@dataclass(frozen=True)
class Entry:
    """One document: its index in the shard, bits of its targets, bytes of its raw text."""

    document: int
    bits: float
    num_bytes: int
    num_targets: int


@dataclass(frozen=True)
class Score:
    """The ledger of all documents, in the order of the file, and how it was made."""

    method: str
    entries: list[Entry]
    seconds: dict[str, float] = field(default_factory=dict)
    # What the scorer did, in order. Units of documents: ("price" or "adapt", first document, last
    # document). Lanes: ("price" or "adapt", step, targets) and ("train", step, documents). When
    # time was over: ("stop", unit or step, documents priced).
    events: list[tuple[str, int, int]] = field(default_factory=list)
    # "stream": a decoder could follow it; "published": it could not.
    order: str = "stream"
    # The unit or step from which on nothing was learnt, because time was over; -1: none.
    stopped_at: int = -1
    # Bits of what a decoder must be told besides the targets.
    side_bits: float = 0.0
    # The method and the settings of its levers.
    how: dict[str, Any] = field(default_factory=dict)

    @property
    def bits(self) -> float:
        """Bits of all targets, plus side bits."""
        return float(np.sum([e.bits for e in self.entries], dtype=np.float64)) + self.side_bits

    @property
    def num_bytes(self) -> int:
        """Raw UTF-8 bytes of the documents."""
        return sum(e.num_bytes for e in self.entries)

    @property
    def num_targets(self) -> int:
        """Targets that were priced."""
        return sum(e.num_targets for e in self.entries)

    @property
    def bpb(self) -> float:
        """Bits per byte: summed bits over summed bytes, never a mean of means."""
        return self.bits / self.num_bytes

    def __repr__(self) -> str:
        return f"Score({self.method}: {self.bpb:.4f} bits per byte of {self.num_bytes:,} bytes)"

    def as_dict(self) -> dict[str, Any]:
        """Plain values for JSON, totals first."""
        return {
            "method": self.method,
            "bpb": self.bpb,
            "bits": self.bits,
            "bytes": self.num_bytes,
            "targets": self.num_targets,
            "documents": len(self.entries),
            "order": self.order,
            "stopped_at": self.stopped_at,
            "side_bits": self.side_bits,
            "how": self.how,
            "seconds": self.seconds,
            "events": self.events,
            "ledger": [asdict(e) for e in self.entries],
        }


def _typed(value: Any, *kinds: type) -> Any:
    if type(value) not in kinds:
        raise TypeError(f"{value!r:.40} is not {kinds[0].__name__}")
    return value


def _entry(row: dict[str, Any]) -> Entry:
    entry = Entry(**row)
    for count in (entry.document, entry.num_bytes, entry.num_targets):
        _typed(count, int)
    return replace(entry, bits=float(_typed(entry.bits, int, float)))


def score_from_dict(tree: dict[str, Any]) -> Score:
    """The score that `as_dict` wrote; its totals must agree with its ledger."""
    try:
        entries = [_entry(row) for row in tree["ledger"]]
        events = [(str(kind), int(a), int(b)) for kind, a, b in tree["events"]]
        score = Score(
            _typed(tree["method"], str),
            entries,
            {phase: float(_typed(s, int, float)) for phase, s in tree["seconds"].items()},
            events,
            order=str(tree["order"]),
            stopped_at=int(tree["stopped_at"]),
            side_bits=float(_typed(tree["side_bits"], int, float)),
            how=dict(tree["how"]),
        )
        claimed = (tree["bits"], tree["bytes"], tree["targets"], tree["documents"])
    except DAMAGE as error:
        raise RuleError(f"not a score file ({error!r:.200})") from error
    if claimed != (score.bits, score.num_bytes, score.num_targets, len(entries)):
        raise RuleError("the score's totals differ from the sums of its ledger")
    return score
