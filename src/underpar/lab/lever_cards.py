"""A lever as a card: its own words, its settings, its cost and what it was measured to do."""

from __future__ import annotations

import dataclasses
import inspect
import json
import re
import tomllib
import typing
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import resources
from importlib.resources.abc import Traversable
from typing import Any

import numpy as np
import torch

from underpar.build.levers import find_lever, lever_names, plug_lever
from underpar.build.model import build_model
from underpar.data.batch import segments_from_starts
from underpar.lab.flops import count_flops
from underpar.model.kv_cache import PackedCache
from underpar.recipe import ModelSpec, Recipe
from underpar.seams import LeverModule

NOT_MEASURED = "not measured"
FP16_BYTES = 2

# What `underpar ablate` wrote, and the effects that were measured in other ways: both are optional
# parts of the package.
ABLATION = resources.files("underpar.lab").joinpath("ablation.json")
EFFECTS = resources.files("underpar.lab").joinpath("effects.toml")

# Of an effect: "cost" is one of time, not of bits.
VERDICTS = ("helps", "hurts", "none", "cost")
# A lever that hurt in so many measurements and helped in none is marked.
LOST_TWICE = 2

_MARK = re.compile(r"\b(Source|Legal|Cost):\s*")


@dataclass(frozen=True)
class Effect:
    """One measurement of a lever."""

    figure: str
    setting: str
    """Recipe, training or text, seeds and device."""
    where: str
    """The dated entry of the log, or the page, that has the figure."""
    verdict: str
    """One of VERDICTS."""
    claim: str = ""
    """The claim of `variants.toml` that it was measured for."""

    def __post_init__(self) -> None:
        assert self.verdict in VERDICTS, self


@dataclass(frozen=True)
class Setting:
    """One setting of a lever; the default as TOML."""

    name: str
    type: str
    default: str


@dataclass(frozen=True)
class LeverCard:
    """A lever's own words, its effect, and its cost with default settings at full size.

    The cost is what the lever adds to the model with the levers it needs.
    """

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
    """How to make the model equal the one without the lever; empty if it does not change it."""
    num_parameters: int
    flops_per_token: int
    flops_percent: float
    """Of the baseline's forward pass."""
    num_bytes: int
    """In fp16, before entropy coding."""

    @property
    def cost(self) -> str:
        """The lever's own words on what it costs."""
        return parse_docstring(find_lever(self.name).__doc__ or "")["cost"]


@dataclass(frozen=True)
class Cost:
    """Parameters of a model, and operations of one forward pass per token."""

    num_parameters: int
    flops_per_token: float


def read_card(name: str) -> LeverCard:
    """The card of one lever; an unknown name is a RecipeError."""
    module = find_lever(name)
    needs = tuple(getattr(module, "NEEDS", ()))
    # Only levers of stage "model" change the model.
    with_lever = cost_of((*needs, name) if module.STAGE == "model" else needs)
    without = cost_of(needs)
    num_parameters = with_lever.num_parameters - without.num_parameters
    flops = with_lever.flops_per_token - without.flops_per_token
    words = parse_docstring(module.__doc__ or "")
    return LeverCard(
        name=name,
        stage=module.STAGE,
        what=words["what"],
        why=words["why"],
        source=words["source"],
        legal=words["legal"],
        measured=measured_text(read_effects(name)),
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
    """The parts of a lever's docstring: what, why, source, legal, cost."""
    lead, *marked = _MARK.split(text)
    first, _, rest = lead.strip().partition("\n")
    paragraphs = (_joined(p) for p in re.split(r"\n\s*\n", rest))
    parts = {"what": first.strip(), "why": "\n\n".join(p for p in paragraphs if p)}
    said: dict[str, list[str]] = {"Source": [], "Legal": [], "Cost": []}
    for mark, words in zip(marked[::2], marked[1::2], strict=True):
        said[mark].append(_joined(words))
    return parts | {mark.lower(): " ".join(filter(None, words)) for mark, words in said.items()}


def read_effects(
    name: str, effects: Traversable = EFFECTS, ablation: Traversable = ABLATION
) -> tuple[Effect, ...]:
    """Everything that was measured of a lever: its row of the ablation first, then the log's."""
    measured: list[Effect] = []
    if ablation.is_file():
        result = json.loads(ablation.read_text())
        rows = [row for row in result["levers"] if row["lever"] == name]
        measured += [_ablation_effect(row, result) for row in rows]
    if effects.is_file():
        entries = tomllib.loads(effects.read_text()).get(name, [])
        measured += [_effect(entry) for entry in entries]
    return tuple(measured)


def measured_text(effects: Sequence[Effect]) -> str:
    """All effects of a lever in one line, the mark of a lever that lost twice before them."""
    lines = [f"{effect.figure} ({effect.setting}; {effect.where})" for effect in effects]
    return lost_mark(effects) + "; ".join(lines) if effects else NOT_MEASURED


def lost_mark(effects: Sequence[Effect]) -> str:
    """What stands before the effects of a lever that hurt twice and never helped, else nothing."""
    verdicts = [effect.verdict for effect in effects]
    lost = verdicts.count("hurts") >= LOST_TWICE and "helps" not in verdicts
    return "lost twice: " if lost else ""


def _effect(entry: Mapping[str, Any]) -> Effect:
    if "bpb" in entry:
        without, with_lever = entry["bpb"]
        digits = max(len(repr(value).partition(".")[2]) for value in entry["bpb"])
        gain = _mbpb(without - with_lever, max(0, digits - 3))
        figure = f"{gain} ({without:.{digits}f} to {with_lever:.{digits}f} BPB)"
    elif "gain" in entry:
        figure = _mbpb(entry["gain"] / 1000, 1)
    else:
        figure = entry["figure"]
    return Effect(
        figure, entry["setting"], entry["where"], entry["verdict"], entry.get("claim", "")
    )


def _ablation_effect(row: Mapping[str, Any], result: Mapping[str, Any]) -> Effect:
    gain, noise = row["difference_mbpb"], row["noise_mbpb"]
    within = "" if row["beyond_noise"] else f", within the noise of {noise:.1f}"
    recipe = " with ".join((result["recipe"], *result["overrides"]))
    loops = ", loops on from the first step" if row["loops_on"] else ""
    return Effect(
        f"{_mbpb(gain / 1000, 1)}{within}",
        f"{recipe} against one run without the lever, {result['tokens']:,} tokens each{loops}",
        "underpar ablate",
        ("helps" if gain > 0 else "hurts") if row["beyond_noise"] else "none",
    )


def _mbpb(gain: float, digits: int) -> str:
    """A gain in bits per byte as words."""
    size = f"{abs(1000 * gain):.{digits}f} mBPB"
    return f"{size} {'worse' if gain < 0 else 'better'}" if float(size.split()[0]) else "no change"


def read_settings(kind: type) -> tuple[Setting, ...]:
    """The fields of a Settings class."""
    hints = typing.get_type_hints(kind)
    fields = dataclasses.fields(kind)
    return tuple(Setting(f.name, _type_name(hints[f.name]), _toml(f.default)) for f in fields)


@cache
def cost_of(levers: tuple[str, ...]) -> Cost:
    """The cost of the full-size model with these levers, on one segment as long as its context."""
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
