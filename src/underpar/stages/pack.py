"""From weights to one file, stage by stage over the run folder: quantize, pack, unpack.

    weights.safetensors --calibrate--> calibration.safetensors   (`calibrating`)
    both --quantize--> quantized.safetensors   (one constant, fitted to the cap)
    quantized.safetensors --pack--> model.upar --unpack--> weights as they are scored

Each stage can be run again without the ones before it; none believes a file of other weights.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch

from underpar.artifact.budget import Budget, read_budget
from underpar.artifact.fit import MOST_ROUNDS, Round, fit_to_cap
from underpar.artifact.format import squeeze
from underpar.artifact.pack import Artifact, unpack
from underpar.artifact.pack import pack as pack_bytes
from underpar.artifact.size_before_training import forecast
from underpar.build.artifact import read_artifact
from underpar.build.levers import plug_levers
from underpar.build.model import weight_shapes
from underpar.core.dist import ALONE
from underpar.core.progress import SILENT, Progress
from underpar.core.run_folder import RunFolder, write_atomic, write_json
from underpar.core.runtime import Runtime
from underpar.core.tensor_files import read_about, save_tensors
from underpar.data.folder import DataFolder, load_data
from underpar.data.tokens.tokenizer import read_model
from underpar.errors import ArtifactError, RecipeError, RunError
from underpar.quant import awq, lqer, tune
from underpar.quant.allocate import Layout, gaussian_bits, rate_curve, sensitivities
from underpar.quant.calibration import TrainingText
from underpar.quant.files import (
    Measured,
    read_measured,
    read_quantized,
    save_quantized,
)
from underpar.quant.logit_fit import LogitFit, Numbers, UnreadText, fit_logits
from underpar.quant.logsteps import to_index
from underpar.quant.rules import match_rules, quantize_model
from underpar.quant.schemes import QuantizedModel, Scheme, dequantize
from underpar.quant.solve import Solver
from underpar.recipe import Recipe, Tree, from_tree, merge, to_tree
from underpar.schema import QuantPart
from underpar.stages.calibrate import (
    Trained,
    load_model,
    needs_calibration,
    read_trained,
    require_own_data,
)
from underpar.submit.bundle import bundle

OnRound = Callable[[Round], None]


# Of the cap, kept for the numbers of a lever that are fitted once the model has its size.
FITTED_BYTES = 200


# More text says nothing new about so few numbers.
FITTED_TOKENS = 1 << 18


@dataclass(frozen=True, eq=False)
class Press:
    """A trained model, ready to be rounded with one constant after another."""

    trained: Trained
    tokenizer: bytes
    cap_bytes: int
    measured: Measured | None
    solver: Solver | None
    """None where no scheme needs a calibration."""

    @cached_property
    def schemes(self) -> dict[str, Scheme]:
        """How each tensor is stored."""
        return match_rules(list(self.trained.weights), self.trained.recipe.quant.rules)

    @cached_property
    def grids(self) -> dict[str, np.ndarray]:
        """Matrices whose steps follow the constant."""
        return {n: self.trained.weights[n] for n, s in self.schemes.items() if s.states}

    @cached_property
    def fitted(self) -> dict[str, Any]:
        """Levers of scoring with numbers that are fitted to the rounded model, by name."""
        levers = plug_levers(self.trained.recipe, "infer")
        return {name: lever for name, lever in levers.items() if hasattr(lever, "classes")}

    @property
    def room_bytes(self) -> int:
        """The cap less what fitted numbers may take."""
        return self.cap_bytes - FITTED_BYTES * len(self.fitted)

    def make(self, constant: float) -> tuple[QuantizedModel, int]:
        """The model rounded with a constant for its grids, and its bytes with the code."""
        solve = replace(self.solver, constant=constant).solve if self.solver else None
        rules = self.trained.recipe.quant.rules
        tensors = quantize_model(self.trained.weights, rules, solve)
        if self.solver and self.measured:
            tensors = lqer.correct(
                tensors,
                self.trained.weights,
                self.measured.calibration,
                self.solver.sensitivity,
                self._lqer_settings(),
                self.solver.device,
            )
        return tensors, self.budget(pack_bytes(self.artifact(tensors))).total_bytes

    def _lqer_settings(self) -> lqer.Settings:
        part = self.trained.recipe.quant
        return lqer.Settings(
            part.lqer_tensors,
            part.lqer_rank,
            part.lqer_left_bits,
            part.lqer_right_bits,
            part.lqer_group,
            part.lqer_symmetric,
            part.lqer_weighted,
        )

    def artifact(self, tensors: QuantizedModel, fits: Mapping[str, Tree] | None = None) -> Artifact:
        """What is packed, with the largest inputs of its matrices where they are known.

        `fits` are settings of levers that were fitted to it.
        """
        largest = self.measured.calibration.largest if self.measured else {}
        scales = {name: int(to_index(np.array(value))) for name, value in largest.items()}
        tree = merge(to_tree(self.trained.recipe), {"levers": dict(fits or {})})
        return Artifact(from_tree(tree), self.tokenizer, tensors, scales)

    def budget(self, data: bytes) -> Budget:
        """Every byte of a packed file and of the code that reads it."""
        return read_budget(data, self.code_bytes, self.cap_bytes)

    @cached_property
    def code_bytes(self) -> int:
        """Bytes of the script that scores."""
        return len(bundle(self.trained.recipe))

    def fit(self, on_round: OnRound | None = None) -> tuple[QuantizedModel, dict[str, Any]]:
        """The model that fills the cap, and how it was found; a given constant is no choice."""
        constant = self.trained.recipe.quant.constant
        if constant or not self.grids:
            tensors, total_bytes = self.make(constant)
            return tensors, {"constant": constant, "total_bytes": total_bytes}
        assert self.solver is not None
        layouts = {
            name: Layout(columns=self.schemes[name].columns, num_states=self.schemes[name].states)
            for name in self.grids
        }
        curve = rate_curve(self.grids, self.solver.sensitivity, layouts)
        fitted = fit_to_cap(self.make, curve, self.room_bytes, self._other_bytes(), on_round)
        best = fitted.best
        return fitted.made, {**asdict(best), "rounds": [asdict(r) for r in fitted.rounds]}

    def _other_bytes(self) -> float:
        """A guess of all but the integers of grids."""
        total: float = self.code_bytes + len(squeeze(self.tokenizer))
        for name, scheme in self.schemes.items():
            shape = self.trained.weights[name].shape
            total += 2 * scheme.num_halves(shape) + scheme.num_indices(shape)
            total += expected_bits(scheme) * self.trained.weights[name].size / 8
        return total


def expected_bits(scheme: Scheme) -> float:
    """Bits a weight that integers of a Gaussian take; 0 for halves, and for grids, which vary."""
    if not scheme.sigmas:
        return scheme.bits
    return float(gaussian_bits(scheme.sigmas / scheme.limit))


def open_press(
    folder: RunFolder,
    cap_bytes: int | None = None,
    part: QuantPart | None = None,
    runtime: Runtime = ALONE,
) -> Press:
    """A run's weights with its calibration, or another [quant] section than it was trained with.

    `cap_bytes` may only tighten the recipe's cap.
    """
    trained = read_trained(folder)
    trained = replace(trained, recipe=replace(trained.recipe, quant=part or trained.recipe.quant))
    most = trained.recipe.limits.cap_bytes
    if cap_bytes is not None and not 0 < cap_bytes <= most:
        raise RecipeError(f"cap {cap_bytes}: expected 1 to the recipe's {most}")
    tokenizer = folder.need(folder.tokenizer_file).read_bytes()
    measured = solver = None
    if needs_calibration(trained.recipe):
        measured = read_measured(folder.need(folder.calibration_file), runtime.device)
        if measured.about.get("weights_sha256") != trained.sha256:
            raise RunError(
                f"{folder.calibration_file} belongs to other weights; run 'underpar calibrate "
                f"{folder.path}' again"
            )
        costs = sensitivities(measured.calibration, measured.fisher)
        part = trained.recipe.quant
        schemes = match_rules(list(trained.weights), part.rules)
        protected = awq.choose(
            trained.weights,
            measured.calibration,
            [name for name, scheme in schemes.items() if scheme.bits and scheme.columns],
            part.awq_groups,
            part.awq_group_columns,
        )
        solver = Solver(measured.calibration, costs, 1.0, runtime.device, protected=protected)
    return Press(trained, tokenizer, cap_bytes or most, measured, solver)


def quantize_run(
    press: Press, folder: RunFolder, runtime: Runtime = ALONE, on_round: OnRound | None = None
) -> dict[str, Any]:
    """Round a run's weights so that they fill the cap; writes quantized.safetensors.

    Tuning and fitting read the text that the run was trained on: their seconds count as training.
    """
    started = time.perf_counter()
    tensors, found = press.fit(on_round)
    if press.trained.recipe.quant.tune_steps or press.fitted:
        began = time.perf_counter()
        data = load_data(Path(folder.read_json(folder.about_file)["data"]))
        require_own_data(folder, data, runtime)
        tensors = tune_controls(press, tensors, data, runtime)
        num_steps = int(str(read_about(folder.weights_file)["step"]))
        fits = fit_levers(press, tensors, data, num_steps, runtime)
        found["levers"] = {name: asdict(fit.numbers) for name, fit in fits.items()}
        found["fit_nats"] = {name: fit.nats for name, fit in fits.items()}
        found["tune_seconds"] = time.perf_counter() - began
    about = {**_identity(press), **found, "seconds": time.perf_counter() - started}
    save_quantized(folder.quantized_file, tensors, about)
    return about


def tune_controls(
    press: Press, tensors: QuantizedModel, data: DataFolder, runtime: Runtime
) -> QuantizedModel:
    """The model with its fp16 vectors tuned to what became of its matrices, where that fits."""
    part = press.trained.recipe.quant
    if not part.tune_steps:
        return tensors
    rounded = {name: dequantize(tensor) for name, tensor in tensors.items()}
    student, teacher = (
        load_model(press.trained.recipe, weights).to(runtime.device)
        for weights in (rounded, press.trained.weights)
    )
    trainable = dict(student.named_parameters())
    names = [n for n, t in tensors.items() if t.scheme.is_half and n in trainable]
    text = TrainingText(data, part.calibration_batches, part.calibration_batch_tokens)
    settings = tune.Settings(part.tune_steps, part.tune_lr)
    found = tune.tune(student, names, teacher, text, runtime, settings)
    halves = {n: replace(tensors[n], steps=v.numpy().reshape(-1)) for n, v in found.items()}
    tuned = {name: halves.get(name, tensor) for name, tensor in tensors.items()}
    # Halves are squeezed together, so other values may take a few bytes more.
    fits = press.budget(pack_bytes(press.artifact(tuned))).total_bytes <= press.room_bytes
    return tuned if fits else tensors


def fit_levers(
    press: Press, tensors: QuantizedModel, data: DataFolder, num_steps: int, runtime: Runtime
) -> dict[str, LogitFit]:
    """Numbers of the levers that calibrate the rounded model, whose run took `num_steps`."""
    if not press.fitted:
        return {}
    recipe = press.trained.recipe
    rounded = {name: dequantize(tensor) for name, tensor in tensors.items()}
    model = load_model(recipe, rounded).to(runtime.device)
    most = recipe.quant.calibration_batches * recipe.quant.calibration_batch_tokens
    text = UnreadText(data, recipe.train, num_steps, min(most, FITTED_TOKENS))
    fits = {}
    for name, lever in press.fitted.items():
        start = Numbers(lever.settings.scales, lever.settings.biases)
        fits[name] = fit_logits(model, lever.classes, start, text, runtime)
    return fits


def _identity(press: Press) -> dict[str, Any]:
    """What a rounded model depends on."""
    return {
        "weights_sha256": press.trained.sha256,
        "quant": to_tree(press.trained.recipe)["quant"],
        "cap_bytes": press.cap_bytes,
        "calibration": press.measured.about if press.measured else None,
    }


def pack_run(
    folder: RunFolder,
    cap_bytes: int | None = None,
    part: QuantPart | None = None,
    runtime: Runtime = ALONE,
    on_round: OnRound | None = None,
    tokenizer_inside: bool = True,
) -> Budget:
    """The artifact of a run, rounded first where that was not done; nothing over the cap.

    A tokenizer outside lies beside the file as tokenizer.model, and is counted all the same.
    """
    press = open_press(folder, cap_bytes, part, runtime)
    made = read_about(folder.quantized_file) if folder.quantized_file.exists() else {}
    if any(made.get(key) != value for key, value in _identity(press).items()):
        quantize_run(press, folder, runtime, on_round)
    tensors, found = read_quantized(folder.quantized_file)
    artifact = press.artifact(tensors, found.get("levers"))
    data = pack_bytes(artifact, tokenizer_inside)
    if not unpack(data, press.tokenizer).equals(artifact):
        raise ArtifactError("the packed file does not unpack to what was packed; nothing written")
    budget = press.budget(data)
    budget.enforce()
    write_atomic(folder.artifact_file, data)
    about = {"artifact_sha256": hashlib.sha256(data).hexdigest()}
    write_json(folder.budget_file, {**about, **budget.as_dict()})
    return budget


def unpack_artifact(path: Path, out: Path) -> dict[str, Any]:
    """The weights of an artifact as they are scored, fp32, in a safetensors file."""
    artifact, identity = read_artifact(path)
    weights = {name: torch.from_numpy(dequantize(t)) for name, t in artifact.tensors.items()}
    save_tensors(out, weights, {"artifact_sha256": identity})
    return {"tensors": len(weights), "weights": sum(w.numel() for w in weights.values())}


def quantize(
    folder: RunFolder,
    runtime: Runtime,
    cap_bytes: int | None = None,
    part: QuantPart | None = None,
    progress: Progress = SILENT,
) -> dict[str, Any]:
    """Round a run's weights to fill the cap."""
    with rounds_bar(progress) as show:
        press = open_press(folder, cap_bytes, part, runtime)
        found = quantize_run(press, folder, runtime, show)
    shown = ("constant", "total_bytes", "cap_bytes", "tune_seconds", "seconds")
    return {key: found[key] for key in shown if key in found}


def pack(
    folder: RunFolder,
    runtime: Runtime,
    cap_bytes: int | None = None,
    part: QuantPart | None = None,
    progress: Progress = SILENT,
    tokenizer_inside: bool = True,
) -> Budget:
    """The artifact of a run, under its cap."""
    with rounds_bar(progress) as show:
        return pack_run(folder, cap_bytes, part, runtime, show, tokenizer_inside)


@contextmanager
def rounds_bar(progress: Progress) -> Iterator[OnRound]:
    """A bar that counts how often a model was rounded and packed to find its size."""
    done = 0
    with progress.task("quantize", MOST_ROUNDS) as task:

        def show(tried: Round) -> None:
            nonlocal done
            done += 1
            task.update(done, f"{tried.total_bytes:,} bytes with constant {tried.constant:.3g}")

        task.update(0, "rounding")
        yield show
        task.update(MOST_ROUNDS)


def forecast_size(recipe: Recipe, tokenizer: Path | None = None) -> Budget:
    """The budget of a recipe before it is trained."""
    proto = read_model(tokenizer) if tokenizer else None
    return forecast(recipe, weight_shapes(recipe), len(bundle(recipe)), proto)
