"""Checkpoints: everything a resumed run needs, in one tensor file."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor

from underpar.core.fields import Fields, reading
from underpar.core.tensor_files import read_tensors, save_tensors
from underpar.errors import RunError

# Tensors by name of each part: "model", "optimizer", "average0".
Parts = Mapping[str, Mapping[str, Tensor]]


@dataclass(frozen=True)
class Position:
    """Where a run stands: everything but tensors. The loader's place is the step."""

    recipe_hash: str
    data_identity: str
    step: int = 0
    seconds: float = 0.0
    flops: float = 0.0
    context: int = 0
    """Where documents are cut, 0 without stages."""
    changed_at: int = -1
    """The step at which that last changed, -1 for never."""


def save_checkpoint(path: Path, position: Position, parts: Parts) -> None:
    """Parts with the random state and the position."""
    tensors = {f"{part}/{name}": t for part, ts in parts.items() for name, t in ts.items()}
    tensors["rng"] = torch.get_rng_state()
    save_tensors(path, tensors, asdict(position))


def read_checkpoint(
    path: Path, expected: Position
) -> tuple[Position, dict[str, dict[str, Tensor]]]:
    """Position and parts; restores the random state. Refuses another recipe's or data's run."""
    # A run is expensive: a checkpoint of a version that stored no checksum is used as it is.
    tensors, about = read_tensors(path, may_lack_checksum=True)
    with reading(path, "it is not a checkpoint of this version"):
        fields = Fields(path, about)
        for key in ("step", "context"):
            fields.count(key)
        for key in ("seconds", "flops", "changed_at"):
            fields.finite(key)
        position = Position(**about)
        torch.set_rng_state(tensors.pop("rng"))
    for key in ("recipe_hash", "data_identity"):
        found, wanted = getattr(position, key), getattr(expected, key)
        if found != wanted:
            raise RunError(
                f"{path}: {key} is {found}, this run has {wanted}; use another --out folder"
            )
    parts: dict[str, dict[str, Tensor]] = {}
    for name, tensor in tensors.items():
        part, _, rest = name.partition("/")
        parts.setdefault(part, {})[rest] = tensor
    return position, parts
