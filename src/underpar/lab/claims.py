"""Claims: effects that others published, and the variants of a recipe that can test them."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from underpar.build.levers import lever_names
from underpar.errors import BenchError
from underpar.recipe import nearest
from underpar.score.method import Method

VARIANTS = Path(__file__).with_name("variants.toml")
BEFORE, SCORED = "before", "scored"
FIGURES = {BEFORE: "before quantization", SCORED: "packed and scored"}


@dataclass(frozen=True)
class Variant:
    """Changes to the base recipe, and how the packed model is scored."""

    name: str
    set: tuple[str, ...] = ()
    method: Method = field(default_factory=Method)
    change: tuple[str, ...] = ()

    def score_words(self) -> list[str]:
        """The options of `underpar score`."""
        method = self.method
        words = [word for name in method.levers for word in ("--with", name)]
        words += ["--stride", str(method.stride)] if method.stride else []
        words += ["--flat"] if method.flat else []
        words += [] if method.order == Method().order else ["--order", method.order]
        return words + [word for change in self.change for word in ("--set", change)]


@dataclass(frozen=True)
class Claim:
    """What somebody published, and the variants that test it if there are any."""

    name: str
    lever: str
    claim: str
    published: str
    source: str
    base: str = ""
    figure: str = BEFORE
    best: str = ""
    hurts: bool = False
    """Whether the lever is claimed to make things worse."""
    variants: tuple[Variant, ...] = ()


def read_claims(path: Path = VARIANTS) -> dict[str, Claim]:
    """The claims of a file, by name."""
    try:
        tables = tomllib.loads(path.read_text())
        claims = {name: _claim(name, table) for name, table in tables.items()}
    except (OSError, AttributeError, TypeError, ValueError) as error:
        raise BenchError(f"{path} is no list of claims ({error!s:.200})") from error
    for claim in claims.values():
        _check(claim, path)
    return claims


def _claim(name: str, table: Mapping[str, Any]) -> Claim:
    variants = tuple(_variant(n, t) for n, t in table.get("variants", {}).items())
    return Claim(
        name=name, **{k: v for k, v in table.items() if k != "variants"}, variants=variants
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
    if claim.lever not in lever_names():
        raise BenchError(f"{where}: no lever {claim.lever!r}{nearest(claim.lever, lever_names())}")
    names = [variant.name for variant in claim.variants]
    if names and claim.best not in names:
        raise BenchError(f"{where}: best = {claim.best!r} is none of {', '.join(names)}")
    if names and not claim.base:
        raise BenchError(f"{where}: variants need a base recipe")
    if claim.figure not in FIGURES:
        raise BenchError(f"{where}: figure {claim.figure!r}, expected {' or '.join(FIGURES)}")
