"""The shipped recipe that a run's recipe is nearest to, and the values in which they differ."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

from underpar.build.levers import resolve_levers
from underpar.errors import UnderparError
from underpar.recipe import Recipe, Tree, from_tree, list_recipes, load_recipe, to_tree

# What a lever is if only one of two recipes names it.
ON, OFF = "on", "off"


@dataclass(frozen=True)
class Difference:
    """A value that the run's recipe has and the shipped one has not."""

    name: str
    base: Any
    here: Any


@dataclass(frozen=True)
class Ancestry:
    """A shipped recipe, and what differs from it."""

    base: str
    changes: tuple[Difference, ...]

    @property
    def title(self) -> str:
        """As in "demo with 2 changes"."""
        count = len(self.changes)
        return f"{self.base} with {count} change{'s' * (count != 1)}" if count else self.base


def ancestry_of(tree: Tree) -> Ancestry | None:
    """The nearest shipped recipe to a stored one; None if it is no recipe of this version."""
    try:
        here = _values(resolve_levers(from_tree(tree)))
    except UnderparError:
        return None
    found = [Ancestry(name, tuple(_differences(base, here))) for name, base in _shipped().items()]
    return min(found, key=lambda ancestry: len(ancestry.changes))


@cache
def _shipped() -> dict[str, dict[str, Any]]:
    """The values of every shipped recipe; an overlay is none by itself."""
    names = [name for name, title in list_recipes().items() if not title.startswith("An overlay")]
    return {name: _values(resolve_levers(load_recipe(name))) for name in names}


def _values(recipe: Recipe) -> dict[str, Any]:
    """Name -> value: of a part its settings, of a lever a table of settings."""
    tree = to_tree(recipe, complete=True)
    levers = {f"levers.{name}": settings for name, settings in tree.pop("levers").items()}
    parts = {f"{part}.{key}": value for part, table in tree.items() for key, value in table.items()}
    return parts | levers


def _differences(base: dict[str, Any], here: dict[str, Any]) -> Iterator[Difference]:
    for name in sorted(base.keys() | here.keys()):
        old, new = base.get(name), here.get(name)
        if old == new:
            continue
        if not name.startswith("levers."):
            yield Difference(name, old, new)
        elif old is None or new is None:
            yield Difference(name, OFF if old is None else ON, OFF if new is None else ON)
        else:
            for key in sorted(old.keys() | new.keys()):
                # A setting that is not written has the lever's default.
                if old.get(key) != new.get(key):
                    settings = old.get(key, "default"), new.get(key, "default")
                    yield Difference(f"{name}.{key}", *settings)
