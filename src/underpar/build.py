"""The composition root: recipe and weights -> model and predictor, with levers plugged in.

Only this file knows both stages and levers.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from underpar.artifact.unpack import Artifact, LazyArtifact
from underpar.data.tokens.tokenizer import Tokenizer, open_tokenizer, read_model
from underpar.data.transforms import IDENTITY
from underpar.errors import ArtifactError, DataError
from underpar.infer.predictor import Predictor
from underpar.levers import LEVERS, lever_module
from underpar.model.gpt import GPT
from underpar.quant.schemes import dequantize
from underpar.recipe import Recipe, fields_from, require, require_known
from underpar.seams import Adapter, LeverModule


def lever_names() -> list[str]:
    """Every lever, in the order in which levers at one seam act."""
    return list(LEVERS)


def find_lever(name: str) -> LeverModule:
    """The module of a lever; an unknown name is refused with the nearest one."""
    require_known(name, list(LEVERS), f"unknown lever {name!r}")
    return lever_module(name)


# Rows, widths and lengths that levers may ask for: a foreign recipe is checked before it is built.
LARGEST_SIZE = 1 << 24


def lever_settings(recipe: Recipe) -> dict[str, Any]:
    """Checked settings of every lever that the recipe names."""
    settings = {}
    for name, table in recipe.levers.items():
        module = find_lever(name)
        kind = module.Settings
        settings[name] = kind(**fields_from(kind, table, f"levers.{name}"))
        _check_sizes(name, settings[name])
        for other in getattr(module, "NEEDS", ()):
            require(other in recipe.levers, f"lever {name!r} does nothing without {other!r}")
    return settings


def _check_sizes(name: str, settings: Any) -> None:
    for key, value in asdict(settings).items():
        largest = max(value, default=0) if isinstance(value, tuple) else value
        require(
            not isinstance(largest, int) or largest <= LARGEST_SIZE,
            f"levers.{name}.{key} = {value}: expected at most {LARGEST_SIZE}",
        )


def resolve_levers(recipe: Recipe) -> Recipe:
    """The recipe with every lever's defaults written out, so that its hash covers them."""
    settings = lever_settings(recipe)
    return replace(recipe, levers={name: asdict(s) for name, s in settings.items()})


def plug_levers(recipe: Recipe, stage: str) -> dict[str, Any]:
    """The recipe's levers of one stage, built from their settings, by name."""
    plugged = {}
    given = lever_settings(recipe)
    # The table's order, not the recipe's: it is the order in which levers at one seam act.
    for name, settings in ((name, given[name]) for name in LEVERS if name in given):
        module = lever_module(name)
        if stage == module.STAGE:
            plugged[name] = module.plug(settings, recipe.model)
    return plugged


def build_model(recipe: Recipe) -> GPT:
    """The network with the recipe's model levers, freshly initialized."""
    modules: dict[str, nn.Module] = plug_levers(recipe, "model")
    return GPT(recipe.model, modules)


def weight_shapes(recipe: Recipe) -> dict[str, tuple[int, ...]]:
    """Name -> shape of every weight, without allocating any."""
    with torch.device("meta"), _WithoutNumbers():
        model = build_model(recipe)
    return {name: tuple(t.shape) for name, t in model.state_dict().items()}


class _WithoutNumbers(TorchFunctionMode):
    """Inside, nothing is drawn, and ranges are made on the CPU.

    For tensors without memory torch would load its compiler to do so, which takes seconds.
    """

    DRAWS = (nn.init.kaiming_uniform_, nn.init.normal_, Tensor.normal_, Tensor.uniform_)

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in self.DRAWS:
            return args[0] if args else kwargs["tensor"]
        return func(*args, **({"device": "cpu"} if func is torch.arange else {}) | dict(kwargs))


def build_predictor(
    artifact: Artifact,
    device: torch.device,
    adapters: Sequence[Adapter] = (),
    dtype: torch.dtype = torch.float32,
) -> Predictor:
    """The predictor of an artifact: dequantized weights, strictly loaded; products in `dtype`."""
    expected = weight_shapes(artifact.recipe)
    found = {name: t.shape for name, t in artifact.tensors.items()}
    if found != expected:
        wrong = sorted(
            {n for n in expected.keys() | found.keys() if expected.get(n) != found.get(n)}
        )
        raise ArtifactError(f"artifact's tensors do not fit its recipe: {', '.join(wrong[:3])}")
    model = build_model(artifact.recipe)
    weights = {name: torch.from_numpy(dequantize(t)) for name, t in artifact.tensors.items()}
    model.load_state_dict(weights)
    return Predictor(model, device, list(adapters), dtype)


def transform_of(recipe: Recipe) -> str:
    """Name of the recipe's text transform, the lever of stage "data"; "identity" without one."""
    names = list(plug_levers(recipe, "data"))
    require(len(names) < 2, f"levers {' and '.join(names)}: one text transform at a time")
    return names[0] if names else IDENTITY


def build_tokenizer(artifact: Artifact) -> Tokenizer:
    """The artifact's tokenizer, which must fit its model."""
    try:
        tokenizer = open_tokenizer(artifact.tokenizer, transform_of(artifact.recipe))
    except DataError as error:
        raise ArtifactError(f"artifact's tokenizer cannot be used: {error}") from error
    if tokenizer.vocab_size != artifact.recipe.model.vocab_size:
        raise ArtifactError(
            f"artifact's tokenizer has {tokenizer.vocab_size} pieces, its model expects "
            f"{artifact.recipe.model.vocab_size}"
        )
    return tokenizer


def read_artifact(path: Path) -> tuple[Artifact, str]:
    """The artifact in a file and the SHA-256 of that file, in hex.

    A tokenizer that the artifact only names lies beside it, as tokenizer.model.
    """
    try:
        data = path.read_bytes()
    except OSError as error:
        raise ArtifactError(f"cannot read artifact {path}: {error.strerror}") from error
    try:
        file = LazyArtifact(data)
        beside = path.with_name("tokenizer.model")
        tokenizer = read_model(beside) if file.names_tokenizer else None
        return file.unpack(tokenizer), hashlib.sha256(data).hexdigest()
    except (ArtifactError, DataError) as error:
        raise ArtifactError(f"{path}: {error}") from error


def require_same_tokenizer(artifact: Artifact, tokenizer: Tokenizer) -> None:
    """Refuse data that another tokenizer made."""
    own = build_tokenizer(artifact).identity
    if own != tokenizer.identity:
        raise ArtifactError(
            f"artifact has tokenizer {own[:12]}, the data were built with "
            f"{tokenizer.identity[:12]} (transform {tokenizer.transform_name}); build the data "
            "with the artifact's tokenizer"
        )
