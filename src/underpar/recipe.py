"""Recipes: everything that defines a run, as data. Read and write TOML, override values, hash.

A recipe file holds `base = "other"` and only its differences from that base. Names stack with
"+": `baseline+cpu` is the baseline with the overlay `cpu` on top. Each lever is a table under
`[levers]`. Its settings are checked in `build`, because this module does not know the levers.
A table `[scale]` holds factors on what the file stands on; a resolved recipe has the results.
"""

from __future__ import annotations

import dataclasses
import difflib
import hashlib
import json
import tomllib
import typing
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path
from types import UnionType
from typing import Any

from underpar.errors import RecipeError
from underpar.recipes.scale import Scale, scaled
from underpar.schema import (
    BYTE_IDS,
    DataPart,
    HNetPart,
    LimitsPart,
    ModelSpec,
    QuantPart,
    ScorePart,
    TrainPart,
    require,
)

Tree = dict[str, Any]
# Key -> the value before, and after.
Changes = dict[str, tuple[Any, Any]]

# Far above any recipe: bytes of a file, tables in tables, bases of bases.
MOST_BYTES, MOST_LEVELS, MOST_BASES = 1 << 20, 32, 32
# Types of values that JSON has too: recipes are hashed and stored as JSON.
PLAIN_TYPES = (str, int, float, list, dict)
# Above any number of tokens or bytes, and small enough for tensors and files.
LARGEST_NUMBER = 1e15


@dataclass(frozen=True)
class Recipe:
    """All values that define a run. A function that needs one section takes that section."""

    data: DataPart = field(default_factory=DataPart)
    model: ModelSpec = field(default_factory=ModelSpec)
    hnet: HNetPart | None = None
    levers: dict[str, Tree] = field(default_factory=dict)
    train: TrainPart = field(default_factory=TrainPart)
    quant: QuantPart = field(default_factory=QuantPart)
    score: ScorePart = field(default_factory=ScorePart)
    limits: LimitsPart = field(default_factory=LimitsPart)

    @property
    def hash(self) -> str:
        """Ten hex digits of SHA-256; equal recipes have equal hashes."""
        canonical = json.dumps(to_tree(self), sort_keys=True)
        return hashlib.sha256(canonical.encode()).hexdigest()[:10]


def list_recipes() -> dict[str, str]:
    """Shipped recipes: name -> first comment line of the file."""
    titles = {}
    for entry in resources.files("underpar.recipes").iterdir():
        if entry.name.endswith(".toml"):
            first = entry.read_text().splitlines()[0]
            titles[entry.name.removesuffix(".toml")] = first.lstrip("# ")
    return dict(sorted(titles.items()))


def read_recipe_file(path: Path) -> Recipe:
    """The recipe in one TOML file; a '+' in the path has no meaning here."""
    return from_tree(_stacked({}, str(path), {}))


def load_recipe(name: str, overrides: Sequence[str] = ()) -> Recipe:
    """The recipe of shipped names or .toml paths, stacked with '+', with overrides `a.b=c`."""
    tree: Tree = {}
    for part in name.split("+"):
        tree = _stacked(tree, part, {})
    for override in overrides:
        tree = merge(tree, parse_override(override))
    return from_tree(tree)


def scaled_values(name: str) -> Changes:
    """What the tables [scale] of a stack changed: key -> the value before, and after."""
    tree: Tree = {}
    changes: Changes = {}
    for part in name.split("+"):
        tree = _stacked(tree, part, changes)
    return changes


def _stacked(below: Tree, name: str, changes: Changes, seen: tuple[str, ...] = ()) -> Tree:
    """`below` with a recipe file and its bases on top; what [scale] changed goes to `changes`."""
    require(name not in seen, f"recipe {name!r}: its base leads back to itself")
    require(len(seen) < MOST_BASES, f"recipe {name!r}: more than {MOST_BASES} bases of bases")
    tree = read_toml(name)
    base, factors = tree.pop("base", None), tree.pop("scale", None)
    if base is not None:
        require(isinstance(base, str), f"recipe {name!r}: base = {base!r:.60}, expected a name")
        below = _stacked(below, base, changes, (*seen, name))
    if factors is not None:
        require(isinstance(factors, Mapping), f"scale = {factors!r:.60}: expected a table [scale]")
        recipe, scale = from_tree(below), Scale(**fields_from(Scale, factors, "scale"))
        changes |= (found := scaled(scale, recipe.train, recipe.levers))
        for key, (_, after) in found.items():
            below = merge(below, nested(key, after))
    return merge(below, tree)


def read_toml(name: str) -> Tree:
    """The tables of a recipe as they are written, its base not resolved."""
    if name.endswith(".toml"):
        path = Path(name)
        require(path.is_file(), f"recipe file {name!r} does not exist")
        size = path.stat().st_size
        require(size <= MOST_BYTES, f"recipe file {name!r} has {size} bytes: over {MOST_BYTES}")
        raw = path.read_bytes()
    else:
        entry = resources.files("underpar.recipes").joinpath(f"{name}.toml")
        if not entry.is_file():
            raise RecipeError(f"no recipe {name!r}{nearest(name, list(list_recipes()))}")
        raw = entry.read_bytes()
    try:
        return parse_toml(raw.decode())
    except ValueError as error:
        raise RecipeError(f"recipe {name!r} is not valid TOML: {error!s:.200}") from error


def parse_toml(text: str) -> Tree:
    """The tables of a TOML text; a ValueError if it is no TOML, or nested deeper than any recipe.

    Brackets and dots may nest tables more deeply than Python can walk through them.
    """
    try:
        tree = tomllib.loads(text)
    except RecursionError as error:
        raise ValueError("nested too deeply") from error
    level: list[Any] = [tree]
    for _ in range(MOST_LEVELS):
        level = [inner for value in level for inner in _values_in(value)]
        odd = [value for value in level if not isinstance(value, PLAIN_TYPES)]
        if odd:
            raise ValueError(f"{odd[0]!r} is a date or a time, which no recipe has")
    if level:
        raise ValueError(f"nested too deeply: more than {MOST_LEVELS} levels")
    return tree


def _values_in(value: Any) -> list[Any]:
    if isinstance(value, dict):
        return [*value.values()]
    return value if isinstance(value, list) else []


def merge(base: Tree, change: Tree) -> Tree:
    """`base` with the values of `change` instead of its own, table by table."""
    merged = dict(base)
    for key, value in change.items():
        old = merged.get(key)
        both = isinstance(value, Mapping) and isinstance(old, Mapping)
        merged[key] = merge(dict(old or {}), dict(value)) if both else value
    return merged


def parse_override(text: str) -> Tree:
    """`a.b=c` as nested tables; c is a TOML value, or else a string without quotes."""
    key, mark, value = text.partition("=")
    require(bool(mark and key.strip()), f"--set {text!r}: expected section.key=value")
    try:
        parsed = parse_toml(f"value = {value}")["value"]
    except ValueError:
        parsed = value
    names = key.strip().split(".")
    require(len(names) < MOST_LEVELS, f"--set {text!r:.60}: expected section.key=value")
    return nested(key.strip(), parsed)


def nested(key: str, value: Any) -> Tree:
    """`value` at a key such as "train.seed", as nested tables."""
    for name in reversed(key.split(".")):
        value = {name: value}
    return typing.cast(Tree, value)


def nearest(name: str, choices: Sequence[str]) -> str:
    """A hint for an error message: the closest of `choices`, or all of them."""
    close = difflib.get_close_matches(name, choices, n=1)
    return f"; did you mean {close[0]!r}?" if close else f"; choose from {', '.join(choices)}"


def require_known(name: str, choices: Sequence[str], complaint: str) -> None:
    """Raise a RecipeError unless `name` is one of `choices`; the message has a hint."""
    if name not in choices:
        raise RecipeError(complaint + nearest(name, choices))


def from_tree(tree: Tree) -> Recipe:
    """The recipe of nested tables. Unknown keys, wrong types and bad values are errors."""
    parts = {f.name: f for f in dataclasses.fields(Recipe)}
    values: Tree = {}
    for name, table in tree.items():
        require_known(name, list(parts), f"unknown section {name!r}")
        require(isinstance(table, Mapping), f"{name} = {table!r}: expected a table [{name}]")
        values[name] = _levers(table) if name == "levers" else _part(name, table)
    model, data = values.get("model", ModelSpec()), values.get("data", DataPart())
    if data.tokenizer == "bytes":
        values["model"] = dataclasses.replace(model, vocab_size=BYTE_IDS)
    # An overlay may have values for networks that the recipe does not name.
    values["hnet"] = values.get("hnet", HNetPart()) if model.network == "hnet" else None
    return Recipe(**values)


def _part(name: str, table: Mapping[str, Any]) -> Any:
    if name == "hnet":
        levers = table.get("levers", {})
        require(isinstance(levers, Mapping), "hnet.levers: expected tables [hnet.levers.NAME]")
        shapes = fields_from(HNetPart, {k: v for k, v in table.items() if k != "levers"}, name)
        return HNetPart(**shapes, levers=_levers(levers))
    kind = typing.get_type_hints(Recipe)[name]
    return kind(**fields_from(kind, table, name))


def fields_from(kind: type, table: Mapping[str, Any], where: str) -> Tree:
    """The values of `table` for the fields of dataclass `kind`; names and types are checked."""
    hints = typing.get_type_hints(kind)
    names = [f.name for f in dataclasses.fields(kind)]
    values = {}
    for key, value in table.items():
        require_known(key, names, f"unknown key {where}.{key}")
        values[key] = _typed(hints[key], value, f"{where}.{key}")
    return values


def _typed(hint: Any, value: Any, where: str) -> Any:
    if isinstance(hint, UnionType):
        # One value or a list of them.
        is_list = isinstance(value, list | tuple)
        kinds = typing.get_args(hint)
        hint = next(kind for kind in kinds if (typing.get_origin(kind) is tuple) == is_list)
    if typing.get_origin(hint) is tuple:
        require(isinstance(value, list | tuple), f"{where} = {value!r}: expected a list")
        items = typing.get_args(hint)
        fixed = items[-1] is not Ellipsis
        require(
            not fixed or len(value) == len(items),
            f"{where} = {value!r}: expected {len(items)} values",
        )
        return tuple(_typed(items[0], v, where) for v in value)
    finite = not isinstance(value, int | float) or abs(value) <= LARGEST_NUMBER
    require(finite, f"{where} = {value!r}: expected a finite number, at most {LARGEST_NUMBER:.0e}")
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        value = float(value)
    right = isinstance(value, hint) and not (isinstance(value, bool) and hint is not bool)
    require(right, f"{where} = {value!r}: expected {hint.__name__}")
    return value


def _levers(table: Mapping[str, Any]) -> dict[str, Tree]:
    levers = {}
    for name, settings in table.items():
        if settings is False:
            continue
        require(
            settings is True or isinstance(settings, Mapping),
            f"levers.{name} = {settings!r}: expected a table of settings, true or false",
        )
        levers[name] = {} if settings is True else dict(settings)
    return dict(sorted(levers.items()))


def to_tree(recipe: Recipe, complete: bool = False) -> Tree:
    """The recipe as plain nested tables.

    Settings that older versions lack are left out at their defaults, unless it is to be `complete`.
    """
    tree = dataclasses.asdict(recipe)
    if recipe.hnet is None:
        del tree["hnet"]
    for name, table in tree.items():
        part = getattr(recipe, name)
        for known in () if name == "levers" or complete else dataclasses.fields(part):
            if known.metadata.get("added") and getattr(part, known.name) == known.default:
                del table[known.name]
    return typing.cast(Tree, json.loads(json.dumps(tree)))


def to_toml(recipe: Recipe, complete: bool = False) -> str:
    """The resolved recipe as TOML that `load_recipe` reads back to an equal recipe."""
    lines = []
    for name, table in to_tree(recipe, complete).items():
        if name == "levers":
            lines += _lever_lines(name, table)
        else:
            plain = {key: value for key, value in table.items() if key != "levers"}
            lines += [f"[{name}]", *_toml_lines(plain), ""]
            lines += _lever_lines(f"{name}.levers", table.get("levers", {}))
    return "\n".join(lines)


def _lever_lines(where: str, levers: Tree) -> list[str]:
    lines = []
    for lever, settings in levers.items():
        lines += [f"[{where}.{lever}]", *_toml_lines(settings), ""]
    return lines


def _toml_lines(table: Tree) -> list[str]:
    # JSON and TOML write strings, numbers, booleans and flat lists in the same way.
    return [f"{key} = {json.dumps(value)}" for key, value in table.items()]
