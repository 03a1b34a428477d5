"""underpar: the best language model that fits in a byte budget, with a score it can prove."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from underpar.core.runtime import guard_cpu

if TYPE_CHECKING:
    from pathlib import Path

    from underpar.api import Model

__version__ = "0.1.0"

# Before the first operation of torch: oneDNN reads the setting only once.
guard_cpu()


def load(artifact: str | Path, device: str = "cpu") -> Model:
    """Open an artifact: `m = underpar.load("model.upar")`, then m.score, m.generate, m.compress."""
    # Imported by name and only now: `underpar --help` does not wait for torch, and the counted
    # script, which follows imports, does not contain the API.
    model: Model = import_module("underpar.api").Model.open(artifact, device)
    return model
