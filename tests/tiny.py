"""The type of the shared tiny run, for tests that name it."""

from dataclasses import dataclass
from pathlib import Path

from underpar.recipe import Recipe
from underpar.run import RunFolder


@dataclass(frozen=True)
class TinyRun:
    """A run of baseline+cpu with model levers, scored with and without adaptation."""

    recipe: Recipe
    data: Path
    folder: RunFolder
