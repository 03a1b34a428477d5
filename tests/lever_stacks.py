"""Small stacks with one lever each, for tests that run over every lever."""

from collections.abc import Sequence
from dataclasses import asdict, replace
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import nn

from underpar.build.model import build_model, weight_shapes
from underpar.data.batch import Batch, pack_documents
from underpar.errors import RecipeError
from underpar.levers import LEVERS, lever_module
from underpar.model.network import Network
from underpar.recipe import Recipe, load_recipe

CPU = torch.device("cpu")

ALL = list(LEVERS)


def variants_of(name: str) -> tuple[Any, ...]:
    """Settings with which a lever is tested."""
    module: Any = lever_module(name)
    return tuple(getattr(module, "TINY", (module.Settings(),)))


# Each model lever by name, and "name/1" with the second of its settings.
MODEL = [name for name in ALL if lever_module(name).STAGE == "model"]
MODEL += [f"{name}/{i}" for name in MODEL for i in range(1, len(variants_of(name)))]


def stack_with(*cases: str, settings: Any = None) -> Recipe:
    """The cpu overlay with these levers, and with those that they need."""
    levers: dict[str, Any] = {}
    for case in cases:
        name, _, variant = case.partition("/")
        levers |= {other: levers.get(other, {}) for other in needs_of(name)}
        levers[name] = asdict(settings or variants_of(name)[int(variant or 0)])
    return _with_levers(levers)


def stack_without(case: str) -> Recipe:
    """The same stack but for the lever itself."""
    return _with_levers({other: {} for other in needs_of(lever_of(case))})


def lever_of(case: str) -> str:
    """The lever of a case."""
    return case.partition("/")[0]


def needs_of(name: str) -> tuple[str, ...]:
    """Levers without which this one does nothing."""
    return tuple(getattr(lever_module(name), "NEEDS", ()))


def _with_levers(levers: dict[str, Any]) -> Recipe:
    recipe = load_recipe("cpu", ["quant.rules=['*.weight int6', '* fp16']"])
    return replace(recipe, levers=levers)


def groups_of(cases: Sequence[str]) -> list[tuple[str, ...]]:
    """All cases in as few stacks as can be built; two that take one place go to two stacks."""
    return _groups_of(tuple(cases))


@cache
def _groups_of(cases: tuple[str, ...]) -> list[tuple[str, ...]]:
    groups: list[tuple[str, ...]] = []
    for case in cases:
        fitting = [i for i, group in enumerate(groups) if _builds(*group, case)]
        if fitting:
            groups[fitting[0]] += (case,)
        else:
            groups.append((case,))
    return groups


def _builds(*cases: str) -> bool:
    if len({lever_of(case) for case in cases}) < len(cases):
        return False
    try:
        weight_shapes(stack_with(*cases))
    except RecipeError:
        return False
    return True


def randomized(recipe: Recipe) -> Network:
    """Weights away from where they start, so that every path carries something."""
    torch.manual_seed(0)
    model = build_model(recipe).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.startswith("levers."):
                parameter.add_(0.1 * torch.randn_like(parameter))
            elif parameter.ndim > 1:
                nn.init.normal_(parameter, std=0.1)
    return model


def batch_of(lengths: list[int], context: int, seed: int = 0, words: int = 500) -> Batch:
    """Random documents of so many words, packed."""
    rng = np.random.default_rng(seed)
    docs = [np.append(1, rng.integers(4, words, n)) for n in lengths]
    return pack_documents(docs, 1, context)[0]
