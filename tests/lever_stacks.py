"""Small stacks with one lever each, for tests that run over every lever."""

from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Any

import numpy as np
import torch
from torch import nn

from underpar.build import build_model, weight_shapes
from underpar.data.loader import Batch, pack_documents
from underpar.errors import RecipeError
from underpar.levers import LEVERS, lever_module
from underpar.model.gpt import GPT
from underpar.recipe import Recipe, load_recipe

CPU = torch.device("cpu")

ALL = list(LEVERS)
MODEL = [name for name in ALL if lever_module(name).STAGE == "model"]


def stack_with(*names: str, settings: Any = None) -> Recipe:
    """The cpu overlay with these levers, and with those that they need."""
    levers: dict[str, Any] = {}
    for name in names:
        module: Any = lever_module(name)
        levers |= {other: levers.get(other, {}) for other in getattr(module, "NEEDS", ())}
        levers[name] = asdict(settings or getattr(module, "TINY", module.Settings()))
    return _with_levers(levers)


def stack_without(name: str) -> Recipe:
    """The same stack but for the lever itself."""
    return _with_levers({other: {} for other in getattr(lever_module(name), "NEEDS", ())})


def _with_levers(levers: dict[str, Any]) -> Recipe:
    recipe = load_recipe("cpu", ["quant.rules=['*.weight int6', '* fp16']"])
    return replace(recipe, levers=levers)


def groups_of(names: Sequence[str]) -> list[tuple[str, ...]]:
    """All levers in as few stacks as can be built; two that take one place go to two stacks."""
    groups: list[tuple[str, ...]] = []
    for name in names:
        fitting = [i for i, group in enumerate(groups) if _builds(*group, name)]
        if fitting:
            groups[fitting[0]] += (name,)
        else:
            groups.append((name,))
    return groups


def _builds(*names: str) -> bool:
    try:
        weight_shapes(stack_with(*names))
    except RecipeError:
        return False
    return True


def randomized(recipe: Recipe) -> GPT:
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


def batch_of(lengths: list[int], context: int, seed: int = 0) -> Batch:
    """Random documents, packed."""
    rng = np.random.default_rng(seed)
    docs = [np.append(1, rng.integers(4, 500, n)) for n in lengths]
    return pack_documents(docs, 1, context)[0]
