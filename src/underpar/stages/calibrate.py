"""Calibrate a trained model: the inputs of its matrices, and what errors in them cost."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from underpar.build.model import build_model, weight_shapes
from underpar.core.dist import ask_main, process_group
from underpar.core.fields import Fields
from underpar.core.locks import lock_on_main
from underpar.core.makers import again
from underpar.core.run_folder import RunFolder
from underpar.core.runtime import Runtime
from underpar.core.tensor_files import read_tensors, require_shapes
from underpar.data.folder import DataFolder, data_identity, hash_file, load_data
from underpar.errors import DivergedError, RecipeError, RunError
from underpar.infer.predictor import Predictor
from underpar.model.network import Network
from underpar.quant import fisher
from underpar.quant.calibration import SelfGenerated, Text, TrainingText, collect
from underpar.quant.files import Measured, save_measured
from underpar.quant.rules import match_rules
from underpar.recipe import Recipe
from underpar.train.evidence import environment
from underpar.train.guard import lower_rate

# The most tokens of a lane in which the model writes its own calibration text.
LANE_TOKENS = 2048


@dataclass(frozen=True, eq=False)
class Trained:
    """The weights of a run, by name, the SHA-256 of their file, and the steps of the run."""

    recipe: Recipe
    weights: dict[str, np.ndarray]
    sha256: str
    step: int


def read_trained(folder: RunFolder) -> Trained:
    """The final weights of a run."""
    recipe = folder.read_recipe()
    path = folder.need(folder.weights_file)
    # A run is expensive: weights of versions that stored no checksum are used as they are.
    tensors, about = read_tensors(path, may_lack_checksum=True)
    if about.get("recipe_hash") != recipe.hash:
        raise RunError(f"{path} was trained with another recipe; {again(path)}")
    require_shapes(path, tensors, weight_shapes(recipe), again(path))
    weights = {name: t.float().numpy() for name, t in sorted(tensors.items())}
    return Trained(recipe, weights, hash_file(path), Fields(path, about).count("step"))


def load_model(recipe: Recipe, weights: Mapping[str, np.ndarray]) -> Network:
    """The recipe's network with these weights."""
    model = build_model(recipe)
    model.load_state_dict({name: torch.from_numpy(w) for name, w in weights.items()})
    return model


def needs_calibration(recipe: Recipe) -> bool:
    """Whether the scheme of any tensor needs a calibration."""
    schemes = match_rules(list(weight_shapes(recipe)), recipe.quant.rules)
    return any(scheme.calibrated for scheme in schemes.values())


@contextmanager
def naming_remedy(folder: RunFolder) -> Iterator[None]:
    """Inside, the error of a run that diverged names the command that trains it more slowly."""
    try:
        yield
    except DivergedError as error:
        raise DivergedError(f"{error}; the run diverged, {lower_rate(folder)}") from error


def calibrate_run(
    folder: RunFolder, data: DataFolder, runtime: Runtime, source: str = ""
) -> Measured:
    """Calibrate a run on training text, or on text that it writes; all ranks together.

    `source` is "train" or "self"; empty: as the recipe says. Writes calibration.safetensors.
    """
    require_own_data(folder, data, runtime)
    trained = ask_main(lambda: read_trained(folder), runtime)
    with naming_remedy(folder):
        measured = measure(trained, data, runtime, source)
    ask_main(lambda: save_measured(folder.calibration_file, measured), runtime)
    return measured


def measure(trained: Trained, data: DataFolder, runtime: Runtime, source: str = "") -> Measured:
    """The calibration of trained weights; all ranks together."""
    started = time.perf_counter()
    part = trained.recipe.quant
    source = source or part.calibration
    model = load_model(trained.recipe, trained.weights).to(runtime.device)
    batches = (part.calibration_batches, min(part.fisher_batches, part.calibration_batches))
    whole, few = (_text(source, trained.recipe, data, model, number) for number in batches)
    calibration = collect(model, whole, runtime)
    gradients = fisher.measure(model, few, runtime)
    runtime.synchronize()
    about = {
        "weights_sha256": trained.sha256,
        "text": source,
        "tokens": calibration.num_tokens,
        "environment": environment(runtime),
        "seconds": time.perf_counter() - started,
    }
    return Measured(calibration, gradients, about)


def require_own_data(folder: RunFolder, data: DataFolder, runtime: Runtime) -> None:
    """Refuse data other than the run's: its training text may be held-out text of the run."""
    about = ask_main(lambda: folder.read_json(folder.about_file), runtime)
    trained_on, offered = about.get("data_identity"), data_identity(data)
    if offered != trained_on:
        raise RunError(
            f"{folder.path} was trained on data {trained_on}, these are {offered}; name the folder "
            "that it was trained on"
        )


def _text(source: str, recipe: Recipe, data: DataFolder, model: Network, num_batches: int) -> Text:
    if source == "train":
        return training_text(recipe, data, num_batches)
    if source != "self":
        raise RecipeError(f"calibration text {source!r}: expected 'train' or 'self'")
    device = next(model.parameters()).device
    lane_tokens = min(LANE_TOKENS, model.spec.context)
    return SelfGenerated(
        Predictor(model, device, []).stepper,
        num_batches,
        num_lanes=max(1, recipe.quant.calibration_batch_tokens // lane_tokens),
        lane_tokens=lane_tokens,
    )


def training_text(recipe: Recipe, data: DataFolder, num_batches: int) -> TrainingText:
    """Batches of training text as the recipe's calibration reads them."""
    batch_tokens, piece_tokens = recipe.quant.calibration_batch_tokens, recipe.train.piece_tokens
    return TrainingText(data, num_batches, batch_tokens, piece_tokens=piece_tokens)


def calibrate(folder: RunFolder, data: Path, runtime: Runtime, source: str = "") -> dict[str, Any]:
    """Calibrate a run; returns the text, its tokens and the seconds."""
    with process_group(runtime), lock_on_main(folder.path, runtime):
        about = calibrate_run(folder, load_data(data), runtime, source).about
    return {key: value for key, value in about.items() if key != "environment"}
