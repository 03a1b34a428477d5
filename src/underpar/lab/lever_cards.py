"""What a lever says about itself and what it costs, as a card."""

from __future__ import annotations

import dataclasses
import inspect
import json
import re
import typing
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import torch

from underpar.build.levers import find_lever, lever_names, plug_lever
from underpar.build.model import build_model
from underpar.data.loader import segments_from_starts
from underpar.lab.flops import count_flops
from underpar.model.kv_cache import PackedCache
from underpar.recipe import ModelSpec, Recipe
from underpar.seams import LeverModule

NOT_MEASURED = "not measured"
FP16_BYTES = 2

_MARK = re.compile(r"\b(Source|Legal|Measured):\s*")


@dataclass(frozen=True)
class Setting:
    """One setting of a lever; the default as TOML."""

    name: str
    type: str
    default: str


@dataclass(frozen=True)
class LeverCard:
    """A lever's own words and its cost at full size with default settings, beside its `needs`."""

    name: str
    stage: str
    what: str
    why: str
    source: str
    legal: str
    measured: str
    settings: tuple[Setting, ...]
    settings_note: str
    needs: tuple[str, ...]
    neutral: str
    """How to make the model equal the one without it; empty where it is no part of the model."""
    num_parameters: int
    flops_per_token: int
    flops_percent: float
    """Of the baseline's forward pass."""
    num_bytes: int


@dataclass(frozen=True)
class Cost:
    """Parameters of a model, and operations of one forward pass for each token."""

    num_parameters: int
    flops_per_token: float


def read_card(name: str) -> LeverCard:
    """The card of one lever; an unknown name is a RecipeError."""
    module = find_lever(name)
    needs = tuple(getattr(module, "NEEDS", ()))
    # Only levers of the model change it.
    plugged = (*needs, name) if module.STAGE == "model" else needs
    own, without = cost_of(plugged), cost_of(needs)
    num_parameters = own.num_parameters - without.num_parameters
    flops = own.flops_per_token - without.flops_per_token
    return LeverCard(
        name=name,
        stage=module.STAGE,
        **parse_docstring(module.__doc__ or ""),
        settings=read_settings(module.Settings),
        settings_note=_doc(module.Settings),
        needs=needs,
        neutral=_neutral(name, module),
        num_parameters=num_parameters,
        flops_per_token=round(flops),
        flops_percent=100 * flops / cost_of(()).flops_per_token,
        num_bytes=FP16_BYTES * num_parameters,
    )


def all_cards() -> list[LeverCard]:
    """Every lever's card, in the order in which levers act."""
    return [read_card(name) for name in lever_names()]


def parse_docstring(text: str) -> dict[str, str]:
    """The parts of a lever's docstring: what, why, source, legal, measured."""
    lead, *marked = _MARK.split(text)
    first, _, rest = lead.strip().partition("\n")
    paragraphs = (_joined(p) for p in re.split(r"\n\s*\n", rest))
    parts = {"what": first.strip(), "why": "\n\n".join(p for p in paragraphs if p)}
    said: dict[str, list[str]] = {"Source": [], "Legal": [], "Measured": []}
    for mark, words in zip(marked[::2], marked[1::2], strict=True):
        said[mark].append(_joined(words))
    parts |= {mark.lower(): " ".join(filter(None, words)) for mark, words in said.items()}
    return parts | {"measured": parts["measured"] or NOT_MEASURED}


def read_settings(kind: type) -> tuple[Setting, ...]:
    """The fields of a Settings class."""
    hints = typing.get_type_hints(kind)
    fields = dataclasses.fields(kind)
    return tuple(Setting(f.name, _type_name(hints[f.name]), _toml(f.default)) for f in fields)


@cache
def cost_of(levers: tuple[str, ...]) -> Cost:
    """The full-size model with these levers, in one piece as long as its context."""
    spec = ModelSpec()
    num_tokens = spec.context
    with torch.device("meta"):
        model = build_model(Recipe(model=spec, levers={name: {} for name in levers}))
        tokens = torch.zeros(num_tokens, dtype=torch.int64)
    kv_cache = PackedCache(segments_from_starts(np.array([0]), num_tokens, spec.context).to("meta"))
    with torch.no_grad():
        num_flops = count_flops(lambda: model.eval()(tokens, kv_cache))
    return Cost(sum(p.numel() for p in model.parameters()), num_flops / num_tokens)


def _neutral(name: str, module: LeverModule) -> str:
    neutral = getattr(module, "NEUTRAL", None)
    if neutral is not None:
        values, plain = dataclasses.asdict(neutral), dataclasses.asdict(module.Settings())
        changed = (f"`{key} = {_toml(v)}`" for key, v in values.items() if v != plain[key])
        return f"settings {', '.join(changed)}"
    if module.STAGE != "model":
        return ""
    with torch.device("meta"):
        hook = plug_lever(name, module.Settings(), ModelSpec())
    words = (_doc(getattr(hook, method, None)) for method in ("neutral_", "agree_"))
    return " ".join(filter(None, words))


def _doc(what: Any) -> str:
    return _joined(inspect.getdoc(what) or "") if what is not None else ""


def _joined(text: str) -> str:
    return " ".join(text.split())


def _toml(value: Any) -> str:
    # JSON and TOML write strings, numbers, booleans and flat lists alike.
    return json.dumps(value)


def _type_name(hint: Any) -> str:
    items = typing.get_args(hint)
    return f"list of {items[0].__name__}" if items else str(hint.__name__)
