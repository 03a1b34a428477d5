"""Claims and experiments: what is held to be true, and the variants of a recipe that test it.

A claim is an effect that others published. An experiment is a hypothesis of ours: one change of a
recipe, with and without which it is trained.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from underpar.build.levers import lever_names
from underpar.errors import BenchError
from underpar.recipe import nearest
from underpar.score.method import Method

VARIANTS = Path(__file__).with_name("variants.toml")
EXPERIMENTS = Path(__file__).with_name("experiments.toml")
# The variants of an experiment.
WITH, WITHOUT = "with", "without"
BEFORE, SCORED = "before", "scored"
FIGURES = {BEFORE: "before quantization", SCORED: "packed and scored"}


@dataclass(frozen=True)
class Variant:
    """Changes to the base recipe, and how the packed model is scored."""

    name: str
    set: tuple[str, ...] = ()
    method: Method = field(default_factory=Method)
    change: tuple[str, ...] = ()


@dataclass(frozen=True)
class Claim:
    """What somebody published, and the variants that test it if there are any."""

    name: str
    claim: str
    published: str
    source: str
    lever: str = ""
    base: str = ""
    figure: str = BEFORE
    best: str = ""
    hurts: bool = False
    """Whether the lever is claimed to make things worse."""
    decision: str = ""
    """What a person decided about an experiment, in words."""
    on: str = ""
    """The experiment whose change all runs of this one have."""
    variants: tuple[Variant, ...] = ()


def read_claims(path: Path = VARIANTS) -> dict[str, Claim]:
    """The claims of a file, by name."""
    try:
        tables = tomllib.loads(path.read_text())
        claims = {name: _claim(name, table, tables) for name, table in tables.items()}
    except (OSError, AttributeError, TypeError, ValueError, RecursionError) as error:
        raise BenchError(f"{path} is no list of claims ({error!s:.200})") from error
    for claim in claims.values():
        _check(claim, path)
    return claims


def _claim(name: str, table: Mapping[str, Any], tables: Mapping[str, Any]) -> Claim:
    if "hypothesis" in table:
        both = _settings_on(table["on"], tables) if "on" in table else ()
        rest = {key: value for key, value in table.items() if key != "both"}
        return _experiment(name, both=(*both, *_words(table, "both")), **rest)
    variants = tuple(_variant(n, t) for n, t in table.get("variants", {}).items())
    return Claim(
        name=name, **{k: v for k, v in table.items() if k != "variants"}, variants=variants
    )


def _words(table: Mapping[str, Any], key: str) -> tuple[str, ...]:
    """Settings of an experiment."""
    words = table.get(key, ())
    if isinstance(words, str) or not all(isinstance(word, str) for word in words):
        raise ValueError(f'{key} = {words!r}: settings are text, in a list: ["train.seed=1"]')
    return tuple(words)


def _settings_on(name: str, tables: Mapping[str, Any]) -> tuple[str, ...]:
    """All settings of the runs with the change of an experiment."""
    if "hypothesis" not in tables.get(name, {}):
        raise ValueError(f"on = {name!r}: no such experiment{nearest(name, list(tables))}")
    table = tables[name]
    before = _settings_on(table["on"], tables) if "on" in table else ()
    return (*before, *_words(table, "both"), *_words(table, "set"))


def _experiment(
    name: str,
    hypothesis: str,
    source: str,
    base: str,
    set: Sequence[str],
    both: tuple[str, ...],
    on: str = "",
    figure: str = BEFORE,
    expected: str = "",
    decision: str = "",
) -> Claim:
    """`set` is the change, `both` are settings of the runs with it and of those without it."""
    change = _words({"set": set}, "set")
    variants = (Variant(WITHOUT, both), Variant(WITH, (*both, *change)))
    return Claim(
        name,
        claim=hypothesis,
        published=expected,
        source=source,
        base=base,
        figure=figure,
        best=WITHOUT,
        decision=decision,
        on=on,
        variants=variants,
    )


def _variant(name: str, table: Mapping[str, Any]) -> Variant:
    if unknown := sorted({*table} - {"set", "score", "change"}):
        raise ValueError(f"variant {name!r}: unknown key {unknown[0]!r}")
    score = dict(table.get("score", {}))
    score["levers"] = tuple(score.get("levers", ()))
    return Variant(
        name, tuple(table.get("set", ())), Method(**score), tuple(table.get("change", ()))
    )


def _check(claim: Claim, path: Path) -> None:
    where = f"{path}, {claim.name}"
    if claim.lever and claim.lever not in lever_names():
        raise BenchError(f"{where}: no lever {claim.lever!r}{nearest(claim.lever, lever_names())}")
    names = [variant.name for variant in claim.variants]
    if names and claim.best not in names:
        raise BenchError(f"{where}: best = {claim.best!r} is none of {', '.join(names)}")
    if names and not claim.base:
        raise BenchError(f"{where}: variants need a base recipe")
    if claim.figure not in FIGURES:
        raise BenchError(f"{where}: figure {claim.figure!r}, expected {' or '.join(FIGURES)}")
