"""Build the network and the predictor of a recipe or an artifact, with levers plugged in."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from underpar.artifact.unpack import Artifact
from underpar.build.levers import plug_levers, plug_outer_levers
from underpar.errors import ArtifactError
from underpar.infer.predictor import Predictor
from underpar.model.gpt import GPT
from underpar.model.network import Network
from underpar.quant.schemes import dequantize
from underpar.recipe import Recipe
from underpar.seams import Adapter

# Imported by its name, so that the counted script of a GPT does not carry it.
HNET = "underpar.model.hnet"


def build_model(recipe: Recipe) -> Network:
    """The network with the recipe's model levers, freshly initialized."""
    modules: dict[str, nn.Module] = plug_levers(recipe, "model")
    if recipe.hnet is None:
        return GPT(recipe.model, modules)
    network: Network = import_module(HNET).HNet(
        recipe.model, recipe.hnet, modules, partial(plug_outer_levers, recipe.hnet)
    )
    return network


def weight_shapes(recipe: Recipe) -> dict[str, tuple[int, ...]]:
    """Name -> shape of every weight, without allocating any."""
    with torch.device("meta"), _ShapesOnly():
        model = build_model(recipe)
    return {name: tuple(t.shape) for name, t in model.state_dict().items()}


class _ShapesOnly(TorchFunctionMode):
    """Inside, random initialization does nothing, and `torch.arange` makes CPU tensors.

    "meta" tensors have a shape but no memory. To initialize one, or to make a range of them, torch
    would import its compiler. That takes seconds, and every command that checks a recipe would wait
    for it.
    """

    RANDOM = (nn.init.kaiming_uniform_, nn.init.normal_, Tensor.normal_, Tensor.uniform_)

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in self.RANDOM:
            return args[0] if args else kwargs["tensor"]
        return func(*args, **({"device": "cpu"} if func is torch.arange else {}) | dict(kwargs))


def build_predictor(
    artifact: Artifact,
    device: torch.device,
    adapters: Sequence[Adapter] = (),
    dtype: torch.dtype = torch.float32,
) -> Predictor:
    """The predictor of an artifact, with its dequantized weights; matrix products in `dtype`."""
    return Predictor(weighted_model(artifact), device, list(adapters), dtype)


def weighted_model(artifact: Artifact) -> Network:
    """The network of an artifact with its dequantized weights."""
    expected = weight_shapes(artifact.recipe)
    shapes = {name: t.shape for name, t in artifact.tensors.items()}
    if shapes != expected:
        names = {**expected, **shapes}
        wrong = sorted(name for name in names if expected.get(name) != shapes.get(name))
        raise ArtifactError(f"artifact's tensors do not fit its recipe: {', '.join(wrong[:3])}")
    model = build_model(artifact.recipe)
    weights = {name: torch.from_numpy(dequantize(t)) for name, t in artifact.tensors.items()}
    model.load_state_dict(weights)
    return model
