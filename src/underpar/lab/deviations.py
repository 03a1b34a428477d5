"""Where a shipped recipe differs from the published system that it is named after, and why.

The list is `deviations.toml`. A recipe that stacks overlays on a published one differs from it in
values too; those are found by comparing the two.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from importlib import resources
from pathlib import Path
from typing import Any

from underpar.build.levers import resolve_levers
from underpar.errors import RecipeError
from underpar.recipe import Recipe, Tree, load_recipe, nearest, read_toml, require, to_tree

LIST = resources.files("underpar.lab").joinpath("deviations.toml")
# Why a value is another one than that of the published recipe, if no entry says it.
STACKED = "set by what is stacked on the published recipe"
# An entry of these keys alone says that nothing differs.
NONE = "none"


@dataclass(frozen=True)
class Deviation:
    """One difference. `key` is empty for what no value of a recipe says."""

    what: str
    published: Any
    here: Any
    why: str
    key: str = ""


def read_deviations() -> dict[str, tuple[Deviation, ...]]:
    """The list: name of a published recipe -> its deviations."""
    tree = tomllib.loads(LIST.read_text())
    return {
        name: tuple(Deviation(**entry) for entry in entries if NONE not in entry)
        for name, entries in tree.items()
    }


def published_name(name: str) -> str:
    """The published recipe that `name` stands on: named itself, or the base of a part."""
    known = read_deviations()
    parts = name.split("+")
    while parts:
        if found := [part for part in parts if Path(part).stem in known]:
            return Path(found[0]).stem
        bases = [read_toml(part).get("base") for part in parts]
        parts = [base for base in bases if isinstance(base, str)]
    raise RecipeError(f"recipe {name!r} stands on no published system{nearest(name, list(known))}")


def deviations_of(name: str, recipe: Recipe) -> list[Deviation]:
    """All deviations of `recipe`, which is that of `name`: listed ones, then values set on top."""
    published = published_name(name)
    plain = to_tree(resolve_levers(load_recipe(published)), complete=True)
    tree = to_tree(resolve_levers(recipe), complete=True)
    rows = []
    for row in read_deviations()[published]:
        if row.key and not says(tree, row):
            row = replace(row, here=value_at(tree, row.key), why=f"{row.why}; {STACKED}")
        rows.append(row)
    listed = {row.key for row in rows}
    return rows + [
        Deviation(key, before, here, STACKED, key)
        for key, before, here in _differences(plain, tree)
        if key not in listed
    ]


def says(tree: Tree, row: Deviation) -> bool:
    """Whether the recipe's value at the entry's key is `here`, or a list that holds it.

    A lever that is not in the recipe is false, as in a recipe.
    """
    value = value_at(tree, row.key)
    return bool(value == row.here or (isinstance(value, list) and row.here in value))


def value_at(tree: Tree, key: str) -> Any:
    """The value at a key such as "levers.loop.start"; a missing lever is false."""
    value: Any = tree
    names = key.split(".")
    for place, name in enumerate(names):
        if not isinstance(value, dict) or name not in value:
            require(
                names[0] == "levers" and place == len(names) - 1 == 1,
                f"no key {key!r} in the recipe",
            )
            return False
        value = value[name]
    return True if names[0] == "levers" and len(names) == 2 else value


def _differences(before: Tree, here: Tree, prefix: str = "") -> Iterator[tuple[str, Any, Any]]:
    """Keys with different values, and both values. A whole lever is true or false."""
    for name in sorted({*before, *here}):
        key, values = prefix + name, (before.get(name, False), here.get(name, False))
        if all(isinstance(value, dict) for value in values):
            yield from _differences(*values, f"{key}.")
        elif values[0] != values[1]:
            old, new = (True if isinstance(value, dict) else value for value in values)
            yield key, old, new
