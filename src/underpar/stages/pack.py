"""From weights to one file: calibrate, quantize, pack. Each is a command and leaves a file.

    weights.safetensors --calibrate--> calibration.safetensors     (`stages.calibrate`)
    both --quantize--> quantized.safetensors
    quantized.safetensors --pack--> model.upar --unpack--> the weights that are scored

Quantizing rounds and packs a few times to find the constant of the grids that fills the cap, then
tunes what is stored in fp16 and fits levers to the rounded model. Its result is written to a file
that packing reads at once, because quantizing takes minutes and packing seconds: a run that was
interrupted, or is packed again with its tokenizer outside, does not round again.

Every file names the weights and settings that it was made from. A stage refuses a calibration of
other weights, and rounds again if the rounded model belongs to other weights or settings.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from underpar.artifact.budget import Budget, read_budget
from underpar.artifact.fit import MOST_ROUNDS, Round, fit_to_cap, guess_other_bytes
from underpar.artifact.pack import Artifact, unpack
from underpar.artifact.pack import pack as pack_bytes
from underpar.artifact.size_before_training import forecast
from underpar.build.artifact import read_artifact
from underpar.build.levers import plug_levers, transform_of
from underpar.build.model import weight_shapes
from underpar.core.dist import ALONE
from underpar.core.fields import Fields
from underpar.core.locks import lock_folder
from underpar.core.makers import again
from underpar.core.progress import SILENT, Progress
from underpar.core.run_folder import RunFolder, write_atomic, write_json
from underpar.core.runtime import Runtime
from underpar.core.tensor_files import read_about, require_shapes, save_tensors
from underpar.core.versions import versions
from underpar.data.folder import DataFolder, load_data
from underpar.data.tokens.tokenizer import open_tokenizer, read_model
from underpar.errors import ArtifactError, DataError, RecipeError, RunError
from underpar.quant import tune
from underpar.quant.files import Measured, read_measured, read_quantized, save_quantized
from underpar.quant.job import QuantJob, open_job
from underpar.quant.logit_fit import LogitFit, LogitLever, Numbers, UnreadText, fit_logits
from underpar.quant.rules import CALIBRATED
from underpar.quant.schemes import QuantizedModel, Scheme, dequantize
from underpar.recipe import Recipe, Tree, from_tree, merge, to_tree
from underpar.schema import QuantPart
from underpar.stages.calibrate import (
    Trained,
    load_model,
    measure,
    naming_remedy,
    needs_calibration,
    read_trained,
    require_own_data,
    training_text,
)
from underpar.submit.bundle import bundle
from underpar.submit.script import write_script
from underpar.train.evidence import environment

OnRound = Callable[[Round], None]

# Bytes of the cap that are kept free for the numbers of each lever that is fitted after rounding.
FITTED_BYTES = 200
# These are so few numbers that more text does not change them.
FITTED_TOKENS = 1 << 18


@dataclass(frozen=True, eq=False)
class PackJob:
    """One run on its way to an artifact: how its weights are rounded, and what else is counted."""

    trained: Trained
    quant: QuantJob
    tokenizer: bytes
    cap_bytes: int
    # Bytes of a script that is counted instead of the one that scores, such as train_gpt.py.
    script_bytes: int | None = None

    @property
    def recipe(self) -> Recipe:
        """The recipe, with the [quant] section that is used."""
        return self.trained.recipe

    @cached_property
    def fitted_levers(self) -> dict[str, LogitLever]:
        """Levers of scoring whose numbers are fitted to the rounded model, by name."""
        levers = plug_levers(self.recipe, "infer")
        return {name: lever for name, lever in levers.items() if isinstance(lever, LogitLever)}

    @cached_property
    def code_bytes(self) -> int:
        """Bytes of the script that is counted; by default of the one that scores."""
        return self.script_bytes or len(bundle(self.recipe))

    @property
    def layout(self) -> dict[str, tuple[tuple[int, ...], Scheme]]:
        """Shape and scheme of every tensor of the rounded model."""
        weights, schemes = self.quant.weights, self.quant.schemes
        return {name: (weights[name].shape, schemes[name]) for name in weights}

    @property
    def reads_text(self) -> bool:
        """Whether tuning or fitting follows the rounding; both read training text."""
        return bool(self.recipe.quant.tune_steps or self.fitted_levers)

    @property
    def room_bytes(self) -> int:
        """The cap without the bytes that fitted levers may take."""
        return self.cap_bytes - FITTED_BYTES * len(self.fitted_levers)

    def artifact(self, tensors: QuantizedModel, fits: Mapping[str, Tree] | None = None) -> Artifact:
        """What is packed; `fits` are the fitted settings of levers, by name."""
        tree = merge(to_tree(self.recipe), {"levers": dict(fits or {})})
        return Artifact(from_tree(tree), self.tokenizer, tensors, self.quant.activations())

    def budget(self, data: bytes) -> Budget:
        """Every byte of a packed file and of the code that reads it."""
        return read_budget(data, self.code_bytes, self.cap_bytes)

    def total_bytes(self, tensors: QuantizedModel) -> int:
        """Bytes of a rounded model once it is packed, code and tokenizer included."""
        return self.budget(pack_bytes(self.artifact(tensors))).total_bytes

    def identity(self) -> dict[str, Any]:
        """Everything that the rounded model depends on."""
        return {
            "weights_sha256": self.trained.sha256,
            "quant": to_tree(self.recipe)["quant"],
            "cap_bytes": self.cap_bytes,
            "script_bytes": self.script_bytes,
            "calibration": self.quant.measured.about if self.quant.measured else None,
        }


def open_pack_job(
    folder: RunFolder,
    cap_bytes: int | None = None,
    part: QuantPart | None = None,
    runtime: Runtime = ALONE,
    script_bytes: int | None = None,
) -> PackJob:
    """A run's weights with their calibration.

    `part` replaces the [quant] section of the recipe. `cap_bytes` may only tighten its cap.
    """
    trained = read_trained(folder)
    recipe = replace(trained.recipe, quant=part or trained.recipe.quant)
    largest_cap = recipe.limits.cap_bytes
    if cap_bytes is not None and not 0 < cap_bytes <= largest_cap:
        raise RecipeError(f"cap {cap_bytes}: expected 1 to the recipe's {largest_cap}")
    tokenizer = read_tokenizer(folder, recipe)
    measured = None
    if needs_calibration(recipe):
        measured = _read_calibration(folder, trained, runtime)
    quant = open_job(trained.weights, recipe.quant, measured, runtime.device)
    trained = replace(trained, recipe=recipe)
    return PackJob(trained, quant, tokenizer, cap_bytes or largest_cap, script_bytes)


def read_tokenizer(folder: RunFolder, recipe: Recipe) -> bytes:
    """The run's tokenizer; a damaged one, or another than that of training, is refused."""
    path = folder.need(folder.tokenizer_file)
    remedy = f"copy {path.name} from the run's data folder"
    content = read_model(path)
    try:
        tokenizer = open_tokenizer(content, transform_of(recipe))
    except DataError as error:
        raise RunError(f"{path}: {error}; {remedy}") from error
    about = folder.read_fields(folder.about_file)
    # Runs of earlier versions do not say it.
    named = about.values.get("tokenizer_identity", tokenizer.identity)
    if tokenizer.identity != named or tokenizer.vocab_size != recipe.model.vocab_size:
        raise RunError(f"{path} is not the tokenizer that the run was trained with; {remedy}")
    return content


def _read_calibration(folder: RunFolder, trained: Trained, runtime: Runtime) -> Measured:
    path, remedy = folder.calibration_file, again(folder.calibration_file)
    measured = read_measured(folder.need(path), runtime.device)
    if measured.about.get("weights_sha256") != trained.sha256:
        raise RunError(f"{path} belongs to other weights; {remedy}")
    weights = trained.weights
    sizes = {n: w.shape for n, w in weights.items() if CALIBRATED.fullmatch(n) and w.ndim == 2}
    calibration, fisher = measured.calibration, measured.fisher
    hessians = {name: (num_columns, num_columns) for name, (_, num_columns) in sizes.items()}
    require_shapes(path, calibration.hessians, hessians, remedy)
    outputs = {name: (num_rows,) for name, (num_rows, _) in sizes.items()}
    require_shapes(path, fisher.outputs, outputs, remedy)
    lookup = {"lookup": (trained.recipe.model.vocab_size,)}
    require_shapes(path, {"lookup": fisher.lookup}, lookup, remedy)
    counts = [calibration.num_tokens, fisher.num_tokens, *calibration.num_inputs.values()]
    if calibration.num_inputs.keys() != sizes.keys() or min(counts) < 1:
        raise RunError(f"{path} does not count the inputs of each matrix; {remedy}")
    return measured


def quantize_run(
    job: PackJob, folder: RunFolder, runtime: Runtime = ALONE, on_round: OnRound | None = None
) -> dict[str, Any]:
    """Round a run's weights so that they fill the cap; writes quantized.safetensors.

    Tuning and fitting read training text, so their seconds count as training.
    """
    started = time.perf_counter()
    tensors, about = fit_constant(job, on_round)
    if job.reads_text:
        began = time.perf_counter()
        data = load_data(Path(folder.read_fields(folder.about_file).text("data")))
        require_own_data(folder, data, runtime)
        tensors, fits = tune_and_fit(job, tensors, data, runtime)
        about["levers"] = {name: asdict(fit.numbers) for name, fit in fits.items()}
        about["fit_nats"] = {name: fit.nats for name, fit in fits.items()}
        about["tune_seconds"] = time.perf_counter() - began
    about |= {"environment": environment(runtime), "seconds": time.perf_counter() - started}
    about = {**job.identity(), **about}
    save_quantized(folder.quantized_file, tensors, about)
    return about


def pack_again(
    folder: RunFolder, part: QuantPart, data: DataFolder, runtime: Runtime = ALONE
) -> Artifact:
    """What a run packs with `part` and the constant that was found for it, made from its weights.

    Calibration, rounding, tuning and fitting are repeated; no file of theirs is read.
    """
    as_trained = read_trained(folder)
    trained = replace(as_trained, recipe=replace(as_trained.recipe, quant=part))
    about = read_about(folder.need(folder.quantized_file))
    measured = None
    if needs_calibration(trained.recipe):
        # Calibration follows the recipe of training. Its text was chosen: training text, or what
        # the model writes.
        calibration: Any = about.get("calibration")
        measured = measure(as_trained, data, runtime, str(calibration["text"]))
    quant = open_job(trained.weights, part, measured, runtime.device)
    tokenizer = folder.need(folder.tokenizer_file).read_bytes()
    job = PackJob(trained, quant, tokenizer, int(str(about["cap_bytes"])))
    tensors = job.quant.round(float(str(about["constant"])))
    fits: dict[str, LogitFit] = {}
    if job.reads_text:
        tensors, fits = tune_and_fit(job, tensors, data, runtime)
    numbers = {name: asdict(fit.numbers) for name, fit in fits.items()}
    return job.artifact(tensors, json.loads(json.dumps(numbers)))


def fit_constant(
    job: PackJob, on_round: OnRound | None = None
) -> tuple[QuantizedModel, dict[str, Any]]:
    """The rounded model that fills the cap, with its constant, its bytes and all rounds.

    A constant in the recipe is taken as it is; so is a model in which no steps are fitted.
    """

    def round_and_pack(constant: float) -> tuple[QuantizedModel, int]:
        tensors = job.quant.round(constant)
        return tensors, job.total_bytes(tensors)

    constant = job.recipe.quant.constant
    fitted_names = job.quant.grids or job.quant.widened
    if constant or not fitted_names:
        tensors, total_bytes = round_and_pack(constant)
        return tensors, {"constant": constant, "total_bytes": total_bytes}
    shapes = {name: weight.shape for name, weight in job.quant.weights.items()}
    other_bytes = guess_other_bytes(
        job.quant.schemes, shapes, job.code_bytes, job.tokenizer, fitted_names
    )
    curve, least = job.quant.rate_curve(), 1.0 if job.quant.widened else 0.0
    fitted = fit_to_cap(round_and_pack, curve, job.room_bytes, other_bytes, on_round, least)
    return fitted.made, {**asdict(fitted.best), "rounds": [asdict(r) for r in fitted.rounds]}


def tune_and_fit(
    job: PackJob, tensors: QuantizedModel, data: DataFolder, runtime: Runtime
) -> tuple[QuantizedModel, dict[str, LogitFit]]:
    """What follows rounding and reads training text: tuned fp16 tensors, fitted levers."""
    tensors = tune_controls(job, tensors, data, runtime)
    return tensors, fit_levers(job, tensors, data, job.trained.step, runtime)


def tune_controls(
    job: PackJob, tensors: QuantizedModel, data: DataFolder, runtime: Runtime
) -> QuantizedModel:
    """The model with its fp16 tensors tuned to the rounded matrices, if the result fits the cap."""
    part = job.recipe.quant
    if not part.tune_steps:
        return tensors
    rounded = {name: dequantize(tensor) for name, tensor in tensors.items()}
    student, teacher = (
        load_model(job.recipe, weights).to(runtime.device)
        for weights in (rounded, job.trained.weights)
    )
    text = training_text(job.recipe, data, part.calibration_batches)
    settings = tune.Settings(part.tune_steps, part.tune_lr)
    tuned = tune.tune_halves(tensors, student, teacher, text, runtime, settings)
    # LZMA compresses all fp16 tensors together: other values may take a few bytes more.
    return tuned if job.total_bytes(tuned) <= job.room_bytes else tensors


def fit_levers(
    job: PackJob, tensors: QuantizedModel, data: DataFolder, num_steps: int, runtime: Runtime
) -> dict[str, LogitFit]:
    """Fit the numbers of levers to the rounded model of a run that took `num_steps`."""
    if not job.fitted_levers:
        return {}
    part = job.recipe.quant
    rounded = {name: dequantize(tensor) for name, tensor in tensors.items()}
    model = load_model(job.recipe, rounded).to(runtime.device)
    num_tokens = min(part.calibration_batches * part.calibration_batch_tokens, FITTED_TOKENS)
    text = UnreadText(data, job.recipe.train, num_steps, num_tokens)
    fits = {}
    for name, lever in job.fitted_levers.items():
        start = Numbers(lever.settings.scales, lever.settings.biases)
        fits[name] = fit_logits(model, lever.classes, start, text, runtime)
    return fits


def pack_run(
    folder: RunFolder,
    cap_bytes: int | None = None,
    part: QuantPart | None = None,
    runtime: Runtime = ALONE,
    on_round: OnRound | None = None,
    tokenizer_inside: bool = True,
    script_bytes: int | None = None,
) -> Budget:
    """Pack a run: round it if that was not done yet, pack, verify, write; nothing over the cap.

    If the tokenizer is not inside the file, it is tokenizer.model in the run folder, and counted.
    `script_bytes` are counted instead of those of the script that scores.
    """
    with lock_folder(folder.path), naming_remedy(folder):
        return _pack_run(folder, cap_bytes, part, runtime, on_round, tokenizer_inside, script_bytes)


def _pack_run(
    folder: RunFolder,
    cap_bytes: int | None,
    part: QuantPart | None,
    runtime: Runtime,
    on_round: OnRound | None,
    tokenizer_inside: bool,
    script_bytes: int | None,
) -> Budget:
    job = open_pack_job(folder, cap_bytes, part, runtime, script_bytes)
    about = read_about(folder.quantized_file) if folder.quantized_file.exists() else {}
    if any(about.get(key) != value for key, value in job.identity().items()):
        quantize_run(job, folder, runtime, on_round)
    tensors, quantized = read_quantized(folder.quantized_file)
    if {n: (t.shape, t.scheme) for n, t in tensors.items()} != job.layout:
        raise RunError(
            f"{folder.quantized_file} holds tensors of another model; run 'underpar quantize "
            f"{folder.path}' again"
        )
    fits = Fields(folder.quantized_file, {"levers": {}} | quantized).table("levers").values
    artifact = job.artifact(tensors, fits)
    data = pack_bytes(artifact, tokenizer_inside)
    if not unpack(data, job.tokenizer).equals(artifact):
        raise ArtifactError("the packed file does not unpack to what was packed; nothing written")
    budget = job.budget(data)
    budget.enforce()
    write_atomic(folder.artifact_file, data)
    digest = {"artifact_sha256": hashlib.sha256(data).hexdigest()}
    write_json(folder.budget_file, {**digest, **budget.as_dict(), "versions": versions()})
    write_script(folder, artifact.recipe, digest["artifact_sha256"])
    return budget


def unpack_artifact(path: Path, out: Path) -> dict[str, Any]:
    """Write the weights of an artifact, as they are scored, to a safetensors file in fp32."""
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
    with lock_folder(folder.path), naming_remedy(folder), rounds_bar(progress) as show:
        job = open_pack_job(folder, cap_bytes, part, runtime)
        about = quantize_run(job, folder, runtime, show)
    summary = ("constant", "total_bytes", "cap_bytes", "tune_seconds", "seconds")
    return {key: about[key] for key in summary if key in about}


def pack(
    folder: RunFolder,
    runtime: Runtime,
    cap_bytes: int | None = None,
    part: QuantPart | None = None,
    progress: Progress = SILENT,
    tokenizer_inside: bool = True,
    script_bytes: int | None = None,
) -> Budget:
    """The artifact of a run, under its cap."""
    with rounds_bar(progress) as show:
        return pack_run(folder, cap_bytes, part, runtime, show, tokenizer_inside, script_bytes)


@contextmanager
def rounds_bar(progress: Progress) -> Iterator[OnRound]:
    """A bar that counts the rounds in which a model is rounded and packed to find its size."""
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
