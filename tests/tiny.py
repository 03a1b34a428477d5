"""The type of the shared tiny run, for tests that name it."""

from dataclasses import dataclass
from pathlib import Path

from underpar.core.run_folder import RunFolder
from underpar.recipe import Recipe


@dataclass(frozen=True)
class TinyRun:
    """A run of baseline+cpu with model levers, scored with and without adaptation."""

    recipe: Recipe
    data: Path
    folder: RunFolder
