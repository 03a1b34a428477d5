"""Score files, read as claims: a file whose values no scorer writes is refused before it is judged.

The types are strict, because a wrong one may read as another number in another program: true as 1,
a text of digits as a number, a number above 2^53 as its neighbour.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from underpar.build.scoring import method_of
from underpar.core.fields import reading
from underpar.core.makers import again
from underpar.core.run_folder import RunFolder
from underpar.errors import RuleError, UnderparError
from underpar.recipe import Recipe
from underpar.score.ledger import Score, score_from_dict

# Floats are exact for whole numbers up to here.
LARGEST = 2**53

FILE = {
    "artifact_sha256": str,
    "artifact_bytes": int,
    "data": str,
    "data_identity": str,
    "device": str,
    "xz_bytes": int,
    "lossless": bool,
    "method": str,
    "bpb": float,
    "bits": float,
    "bytes": int,
    "targets": int,
    "documents": int,
    "order": str,
    "stopped_at": int,
    "side_bits": float,
    "how": dict,
    "seconds": dict,
    "events": list,
    "ledger": list,
}
ENTRY = {"document": int, "bits": float, "num_bytes": int, "num_targets": int}


@dataclass(frozen=True)
class Claims:
    """Scores that can be judged and their files, by label; why other files cannot, by name."""

    scores: dict[str, Score]
    trees: dict[str, Mapping[str, Any]]
    refused: dict[str, str]


def read_claims(folder: RunFolder, recipe: Recipe, artifact_sha256: str) -> Claims:
    """The score files of a run; `recipe` and the SHA-256 are those of its artifact."""
    scores: dict[str, Score] = {}
    trees: dict[str, Mapping[str, Any]] = {}
    refused: dict[str, str] = {}
    for path in folder.score_files():
        try:
            tree = folder.read_json(path)
            with reading(path, again(path)):
                score = _read_score(folder, path, tree)
                method_of(score, recipe)
            if tree["artifact_sha256"] != artifact_sha256:
                raise RuleError("it scores another artifact")
        except RuleError as error:
            refused[path.name] = f"{str(error)[:200]}; {again(path)}"
        except UnderparError as error:
            # It names the command itself.
            refused[path.name] = str(error)
        else:
            scores[score.method], trees[score.method] = score, tree
    return Claims(scores, trees, refused)


def _read_score(folder: RunFolder, path: Path, tree: Any) -> Score:
    _require_types(tree, FILE)
    for row in tree["ledger"]:
        _require_types(row, ENTRY)
    for name, seconds in tree["seconds"].items():
        if type(seconds) not in (int, float) or not 0 <= seconds < math.inf:
            raise RuleError(f"{name:.40} took {seconds!r:.40} seconds")
    for event in tree["events"]:
        if type(event) is not list or [type(part) for part in event] != [str, int, int]:
            raise RuleError(f"an event is {event!r:.60}")
    if path != folder.score_file(tree["method"]):
        raise RuleError(f"it says that it is the score {tree['method']!r:.40}")
    score = score_from_dict(tree)
    if not score.num_bytes or tree["bpb"] != score.bpb:
        raise RuleError(f"it says {tree['bpb']!r:.40} bits per byte, its ledger has other sums")
    return score


def _require_types(tree: Any, kinds: Mapping[str, type]) -> None:
    if type(tree) is not dict:
        raise RuleError(f"{tree!r:.40} for an object")
    for key, kind in kinds.items():
        value = tree.get(key)
        # JSON has one kind of number: a whole one is fine for bits.
        fits = type(value) is kind or (kind is float and type(value) is int)
        if not fits or (type(value) is int and abs(value) > LARGEST):
            raise RuleError(f"{key} is {value!r:.40}, expected {kind.__name__}")
