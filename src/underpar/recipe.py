"""Recipes: what to build, as data. Frozen dataclasses, TOML in and out, overrides, a hash.

A recipe file holds `base = "other"` and its differences only. Names stack with "+": `baseline+cpu`
is the baseline with the overlay `cpu` on top. Levers are tables under `[levers]`; their settings
are checked where levers are known, in `build`.
"""

from __future__ import annotations

import dataclasses
import difflib
import hashlib
import json
import math
import tomllib
import typing
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path
from typing import Any

from underpar.errors import RecipeError

Tree = dict[str, Any]


def require(condition: bool, message: str) -> None:
    """Raise a RecipeError with `message` unless `condition` holds."""
    if not condition:
        raise RecipeError(message)


@dataclass(frozen=True)
class DataPart:
    """How text becomes tokens."""

    holdout: float = 0.1

    def __post_init__(self) -> None:
        require(0 < self.holdout < 1, f"data.holdout = {self.holdout}: expected between 0 and 1")


# Far above any model of 16 MB: a foreign artifact's shapes are checked before they are built.
LARGEST = {
    "vocab_size": 1 << 20,
    "num_layers": 256,
    "dim": 1 << 14,
    "num_heads": 256,
    "num_kv_heads": 256,
    "mlp_dim": 1 << 16,
    "context": 1 << 20,
}


@dataclass(frozen=True)
class ModelSpec:
    """Shapes of the transformer; no behavior."""

    vocab_size: int = 8192
    num_layers: int = 11
    dim: int = 512
    num_heads: int = 8
    num_kv_heads: int = 4
    mlp_dim: int = 2048
    rope_dims: int = 16
    rope_base: float = 10_000.0
    softcap: float = 30.0
    mlp_slope: float = 0.5
    context: int = 2048
    embed_std: float = 0.005

    def __post_init__(self) -> None:
        for name, largest in LARGEST.items():
            value = getattr(self, name)
            require(0 < value <= largest, f"model.{name} = {value}: expected 1 to {largest}")
        require(
            self.dim % self.num_heads == 0 and self.num_heads % self.num_kv_heads == 0,
            f"model.dim = {self.dim}, num_heads = {self.num_heads}, num_kv_heads = "
            f"{self.num_kv_heads}: each must divide the one before",
        )
        require(
            self.rope_dims % 2 == 0 and 0 <= self.rope_dims <= self.head_dim,
            f"model.rope_dims = {self.rope_dims}: expected an even number up to {self.head_dim}",
        )
        require(self.softcap > 0, f"model.softcap = {self.softcap}: expected more than 0")

    @property
    def head_dim(self) -> int:
        """Channels of one head."""
        return self.dim // self.num_heads


@dataclass(frozen=True)
class TrainPart:
    """Budget, batch, optimizers, schedule. A budget of 0 is no limit; the first reached ends."""

    seed: int = 1337
    budget_seconds: float = 600.0
    budget_steps: int = 0
    budget_tokens: int = 0
    context: int = 2048
    micro_batch_tokens: int = 98_304
    num_micro_batches: int = 8
    matrix_lr: float = 0.026
    embed_lr: float = 0.03
    scalar_lr: float = 0.02
    matrix_decay: float = 0.095
    embed_decay: float = 0.085
    scalar_decay: float = 0.02
    momentum: float = 0.97
    momentum_start: float = 0.92
    momentum_warmup: float = 0.3
    adam_betas: tuple[float, float] = (0.9, 0.99)
    clip: float = 0.3
    warmdown: float = 0.85
    lr_floor: float = 0.1
    checkpoint_seconds: float = 60.0
    log_every: int = 1

    def __post_init__(self) -> None:
        budgets = (self.budget_seconds, self.budget_steps, self.budget_tokens)
        require(
            min(budgets) >= 0 and max(budgets) > 0,
            "train.budget_seconds, budget_steps, budget_tokens: give at least one above 0",
        )
        require(
            0 <= self.warmdown <= 1, f"train.warmdown = {self.warmdown}: expected between 0 and 1"
        )
        for name in ("micro_batch_tokens", "num_micro_batches", "context", "log_every"):
            value = getattr(self, name)
            require(value > 0, f"train.{name} = {value}: expected a positive number")


@dataclass(frozen=True)
class QuantPart:
    """Ordered rules `pattern scheme`; a tensor takes the first rule that matches its name."""

    rules: tuple[str, ...] = ("* fp16",)

    def __post_init__(self) -> None:
        for rule in self.rules:
            require(
                len(rule.split()) == 2,
                f"quant.rules: {rule!r} is not 'pattern scheme', as in '*.up.weight int6:12.85'",
            )


@dataclass(frozen=True)
class ScorePart:
    """How the held-out text is priced."""

    batch_tokens: int = 65_536
    adapt_tokens: int = 8_192

    def __post_init__(self) -> None:
        for name in ("batch_tokens", "adapt_tokens"):
            value = getattr(self, name)
            require(value > 0, f"score.{name} = {value}: expected a positive number")


@dataclass(frozen=True)
class LimitsPart:
    """The byte budget: model file, tokenizer and code together."""

    cap_bytes: int = 16_000_000

    def __post_init__(self) -> None:
        require(self.cap_bytes > 0, f"limits.cap_bytes = {self.cap_bytes}: expected more than 0")


@dataclass(frozen=True)
class Recipe:
    """Everything that names a run. Parts are handed out; the whole is never passed down."""

    data: DataPart = DataPart()
    model: ModelSpec = ModelSpec()
    levers: dict[str, Tree] = field(default_factory=dict)
    train: TrainPart = TrainPart()
    quant: QuantPart = QuantPart()
    score: ScorePart = ScorePart()
    limits: LimitsPart = LimitsPart()

    @property
    def hash(self) -> str:
        """Ten hex digits of the resolved recipe; equal recipes have equal hashes."""
        canonical = json.dumps(to_tree(self), sort_keys=True)
        return hashlib.sha256(canonical.encode()).hexdigest()[:10]


def list_recipes() -> dict[str, str]:
    """Shipped recipes: name -> first comment line of the file."""
    found = {}
    for entry in resources.files("underpar.recipes").iterdir():
        if entry.name.endswith(".toml"):
            first = entry.read_text().splitlines()[0]
            found[entry.name.removesuffix(".toml")] = first.lstrip("# ")
    return dict(sorted(found.items()))


def read_recipe_file(path: Path) -> Recipe:
    """The recipe in one TOML file; unlike a name, a path may hold a '+'."""
    return from_tree(_read_with_base(str(path), seen=()))


def load_recipe(name: str, overrides: Sequence[str] = ()) -> Recipe:
    """Resolve `name` (shipped names or .toml paths, stacked with '+') and `a.b=c` overrides."""
    tree: Tree = {}
    for part in name.split("+"):
        tree = merge(tree, _read_with_base(part, seen=()))
    for override in overrides:
        tree = merge(tree, parse_override(override))
    return from_tree(tree)


def _read_with_base(name: str, seen: tuple[str, ...]) -> Tree:
    require(name not in seen, f"recipe {name!r}: its base leads back to itself")
    tree = _read_toml(name)
    base = tree.pop("base", None)
    return tree if base is None else merge(_read_with_base(base, (*seen, name)), tree)


def _read_toml(name: str) -> Tree:
    if name.endswith(".toml"):
        path = Path(name)
        require(path.is_file(), f"recipe file {name!r} does not exist")
        text = path.read_text()
    else:
        entry = resources.files("underpar.recipes").joinpath(f"{name}.toml")
        require(entry.is_file(), f"no recipe {name!r}{nearest(name, list(list_recipes()))}")
        text = entry.read_text()
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise RecipeError(f"recipe {name!r} is not valid TOML: {error}") from error


def merge(base: Tree, change: Tree) -> Tree:
    """`base` with the values of `change` laid over it, table by table."""
    merged = dict(base)
    for key, value in change.items():
        old = merged.get(key)
        both = isinstance(value, Mapping) and isinstance(old, Mapping)
        merged[key] = merge(dict(old or {}), dict(value)) if both else value
    return merged


def parse_override(text: str) -> Tree:
    """`a.b=c` as a tree; c is a TOML value, or a bare word taken as a string."""
    key, mark, value = text.partition("=")
    require(bool(mark and key.strip()), f"--set {text!r}: expected section.key=value")
    try:
        parsed = tomllib.loads(f"value = {value}")["value"]
    except tomllib.TOMLDecodeError:
        parsed = value
    tree: Any = parsed
    for name in reversed(key.strip().split(".")):
        tree = {name: tree}
    return typing.cast(Tree, tree)


def nearest(name: str, choices: Sequence[str]) -> str:
    """A hint for a message: the closest of `choices`, or all of them."""
    close = difflib.get_close_matches(name, choices, n=1)
    return f"; did you mean {close[0]!r}?" if close else f"; choose from {', '.join(choices)}"


def from_tree(tree: Tree) -> Recipe:
    """A validated Recipe from nested tables; unknown keys are refused with the nearest name."""
    parts = {f.name: f for f in dataclasses.fields(Recipe)}
    values: Tree = {}
    for name, table in tree.items():
        require(name in parts, f"unknown section {name!r}{nearest(name, list(parts))}")
        require(isinstance(table, Mapping), f"{name} = {table!r}: expected a table [{name}]")
        values[name] = _levers(table) if name == "levers" else _part(name, table)
    return Recipe(**values)


def _part(name: str, table: Mapping[str, Any]) -> Any:
    kind = typing.get_type_hints(Recipe)[name]
    return kind(**fields_from(kind, table, name))


def fields_from(kind: type, table: Mapping[str, Any], where: str) -> Tree:
    """Check `table` against the fields of dataclass `kind`: names, then types."""
    hints = typing.get_type_hints(kind)
    names = [f.name for f in dataclasses.fields(kind)]
    values = {}
    for key, value in table.items():
        require(key in names, f"unknown key {where}.{key}{nearest(key, names)}")
        values[key] = _typed(hints[key], value, f"{where}.{key}")
    return values


def _typed(hint: Any, value: Any, where: str) -> Any:
    if typing.get_origin(hint) is tuple:
        require(isinstance(value, list | tuple), f"{where} = {value!r}: expected a list")
        items = typing.get_args(hint)
        fixed = items[-1] is not Ellipsis
        require(
            not fixed or len(value) == len(items),
            f"{where} = {value!r}: expected {len(items)} values",
        )
        return tuple(_typed(items[0], v, where) for v in value)
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        value = float(value)
    finite = not isinstance(value, float) or math.isfinite(value)
    require(finite, f"{where} = {value!r}: expected a finite number")
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


def to_tree(recipe: Recipe) -> Tree:
    """The recipe as plain nested tables."""
    tree = dataclasses.asdict(recipe)
    return typing.cast(Tree, json.loads(json.dumps(tree)))


def to_toml(recipe: Recipe) -> str:
    """The resolved recipe as TOML that `load_recipe` reads back to an equal recipe."""
    lines = []
    for name, table in to_tree(recipe).items():
        if name == "levers":
            for lever, settings in table.items():
                lines += [f"[levers.{lever}]", *_toml_lines(settings), ""]
        else:
            lines += [f"[{name}]", *_toml_lines(table), ""]
    return "\n".join(lines)


def _toml_lines(table: Tree) -> list[str]:
    # JSON and TOML write strings, numbers, booleans and flat lists alike.
    return [f"{key} = {json.dumps(value)}" for key, value in table.items()]
