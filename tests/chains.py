"""Forged chains: entries changed, and every hash computed again, as their owner can do."""

import json
from collections.abc import Callable
from typing import Any

from underpar.core.run_folder import RunFolder
from underpar.train.evidence import NOTHING, next_hash, read_chain

Entries = list[dict[str, Any]]


def forge(folder: RunFolder, change: Callable[[Entries], Entries]) -> None:
    """Change the entries of a chain; the new chain has no broken link."""
    entries = change([{k: v for k, v in e.items() if k != "hash"} for e in _read(folder)])
    lines, before = [], NOTHING
    for entry in entries:
        before = next_hash(before, entry)
        lines.append(json.dumps({**entry, "hash": before}) + "\n")
    folder.evidence_file.write_text("".join(lines))


def _read(folder: RunFolder) -> Entries:
    return read_chain(folder.evidence_file)


def made_elsewhere(entries: Entries) -> Entries:
    """The same run from another processor."""
    for entry in entries:
        if "environment" in entry:
            entry["environment"]["processor"] = "another"
    return entries


def other_start(entries: Entries) -> Entries:
    """A run that began with other weights than those of its seed."""
    first = next(entry for entry in entries if entry["kind"] == "checkpoint")
    first["parts"]["model"] = "0" * 64
    return entries
