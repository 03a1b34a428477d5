"""Train a recipe on a data folder into a run folder."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from shlex import quote
from typing import Any

import numpy as np
import torch

from underpar.artifact.fit import guess_other_bytes
from underpar.artifact.format import squeeze
from underpar.artifact.size_while_training import SizeForecast
from underpar.artifact.table import MAX_WEIGHTS
from underpar.build.levers import plug_levers, resolve_levers, transform_of
from underpar.build.model import build_model, weight_shapes
from underpar.core.dist import ask_main, process_group
from underpar.core.locks import lock_on_main
from underpar.core.progress import SILENT, Progress
from underpar.core.run_folder import RunFolder, write_atomic, write_json
from underpar.core.runtime import (
    Runtime,
    free_memory_bytes,
    is_machine_busy,
    seed_everything,
)
from underpar.core.versions import device_name, versions
from underpar.data.folder import DataFolder, data_identity, data_sha256, load_data
from underpar.data.shards import Shard
from underpar.data.tokens.tokenizer import Tokenizer
from underpar.errors import RecipeError, RunError, one_line
from underpar.kernels.attention import backend_of
from underpar.quant.rules import check_rules
from underpar.recipe import Recipe, TrainPart
from underpar.score.windows import chunk_documents
from underpar.stages.calibrate import calibrate_run, needs_calibration
from underpar.stages.start import start_trainer
from underpar.submit.bundle import bundle
from underpar.train.checkpoint import Position
from underpar.train.evidence import KEPT, Evidence
from underpar.train.guard import Reference, read_reference
from underpar.train.loop import Trainer
from underpar.train.loss_forecast import Forecast
from underpar.train.meter import SpeedWatch, matmul_flops
from underpar.train.schedule import progress as progress_of
from underpar.train.step import open_loader
from underpar.train.validate import Validator

# The width from which a model keeps a GPU busy.
WIDE_MODEL = 512
# Outputs of a block's matrices that training keeps for the way back.
SAVED_OUTPUTS = ("attn.q.weight", "attn.k.weight", "attn.v.weight", "mlp.up.weight")
# Matrices whose input it keeps.
SAVED_INPUTS = ("attn.q.weight", "mlp.up.weight")


def train(
    recipe: Recipe,
    data_path: Path,
    folder: RunFolder,
    runtime: Runtime,
    progress: Progress = SILENT,
    reference: Reference | None = None,
    num_kept: int = KEPT,
) -> dict[str, Any]:
    """Train `recipe` into `folder`, continuing the run that is there; returns a summary.

    Training ends when the budget is spent, at a signal, or when the loss is far behind that of
    `reference`. Each of them leaves a checkpoint. `finished` in the summary says whether the
    budget is spent. `num_kept` checkpoints stay in the folder, from which an audit repeats steps.
    """
    recipe = resolve_levers(recipe)
    data = load_data(data_path)
    _check_tokenizer(recipe, data.tokenizer, data_path)

    def refuse() -> None:
        require_scored_lengths(recipe)
        shapes = weight_shapes(recipe)
        require_packable(recipe, shapes, data.tokenizer.content)
        # On other devices smaller micro-batches are tried.
        if runtime.device.type == "cpu":
            require_memory(recipe, shapes, free_memory_bytes(runtime.device))

    with process_group(runtime):
        # Before the folder is made. A refusal of the main rank ends the other ranks too.
        ask_main(refuse, runtime)
        with lock_on_main(folder.path, runtime, create=True):
            return _train(recipe, data_path, data, folder, runtime, progress, reference, num_kept)


def _train(
    recipe: Recipe,
    data_path: Path,
    data: DataFolder,
    folder: RunFolder,
    runtime: Runtime,
    progress: Progress,
    reference: Reference | None,
    num_kept: int,
) -> dict[str, Any]:
    resumed = folder.checkpoint_file.exists()
    earlier = list(folder.metrics("progress", "loss", "tokens", "seconds")) if resumed else []
    if reference:
        for line in earlier:
            reference.add(line["progress"], line["loss"])
    remark = ProgressLine(earlier)
    last: dict[str, Any] = {}
    stopped: str | None = None

    if runtime.device.type == "cpu" and is_machine_busy():
        progress.note(
            "other processes use this machine: training is slower, and a budget in seconds buys "
            "fewer steps ('underpar doctor' compares its speed with known ones)"
        )
    # The matrices of small recipes are no measure of a GPU, and MPS has no clock to wait for.
    is_measured = runtime.device.type == "cpu" or (
        runtime.device.type == "cuda" and recipe.model.dim >= WIDE_MODEL
    )
    watch = SpeedWatch(lambda: runtime.world * matmul_flops(runtime)) if is_measured else None
    with progress.task("train", 1) as task:

        def on_step(line: dict[str, Any]) -> bool:
            nonlocal stopped
            if not last:
                if resumed:
                    progress.note(f"continuing {folder.path} at step {line['step']}")
                # Not earlier: the first call may have to wait for a backend to be compiled.
                progress.note(f"attention: {backend_of(runtime.device, runtime.dtype)}")
            last.update(line)
            if reference:
                stopped = reference.check(line["progress"], line["loss"])
            task.update(spent_share(recipe.train, line), remark.add(line))
            if watch and (slow := watch.see(line["seconds"], line["flops"])):
                progress.note(slow)
            return stopped is not None

        # Only the main rank prepares the folder; its refusal ends the other ranks too.
        asked = recipe
        task.update(0, "compiling, before the clock starts" if runtime.compiled else "first step")
        recipe = ask_main(lambda: begun_recipe(folder, asked, data), runtime)
        recipe, runtime, trainer = start_trainer(
            lambda recipe, runtime: make_trainer(recipe, data, folder, runtime, num_kept),
            recipe,
            runtime,
            progress.note,
        )
        for note in trainer.rewrites.notes():
            progress.note(note)
        ask_main(lambda: begin_run(folder, recipe, data_path, data, runtime, asked), runtime)
        trainer.validator.on_begin = lambda: task.update(
            spent_share(recipe.train, last) if last else 0, "pricing the held-out text"
        )
        with telling_why(folder, runtime, lambda: stopped):
            finished = trainer.run(on_step)
            if finished and needs_calibration(recipe):
                task.update(1, "calibrating")
                calibrate_run(folder, data, runtime.for_float64)

    summary = {"finished": finished, "run": str(folder.path), "recipe_hash": recipe.hash}
    summary |= {"attention": backend_of(runtime.device, runtime.dtype)}
    summary |= {"compiled": runtime.compiled}
    summary |= {"stopped": stopped} if stopped else {}
    keys = ("step", "tokens", "start_seconds", "seconds", "loss")
    summary |= {key: last[key] for key in keys if key in last}
    return summary | (validation_of(folder) if finished and runtime.is_main else {})


@contextmanager
def telling_why(
    folder: RunFolder, runtime: Runtime, stopped: Callable[[], str | None]
) -> Iterator[None]:
    """If training ends inside before its time, failure.json says why; the report shows it."""
    if runtime.is_main:
        folder.failure_file.unlink(missing_ok=True)
    try:
        yield
        reason = stopped()
    except Exception as error:
        if runtime.is_main:
            write_json(folder.failure_file, {"reason": one_line(error)})
        raise
    if reason and runtime.is_main:
        write_json(folder.failure_file, {"reason": reason})


def make_trainer(
    recipe: Recipe,
    data: DataFolder,
    folder: RunFolder,
    runtime: Runtime,
    num_kept: int = KEPT,
) -> Trainer:
    """Model, loader and levers of a recipe, ready to run."""
    seed_everything(recipe.train.seed)
    part = recipe.train
    levers = plug_levers(recipe, "train").values()
    model = build_model(recipe)
    for lever in levers:
        if hasattr(lever, "initialize"):
            lever.initialize(model)
    model = model.to(runtime.device)
    equippers = [lever for lever in levers if hasattr(lever, "equip")]
    for lever in equippers:
        lever.equip(model)
    more_targets = [lever for lever in levers if hasattr(lever, "more_targets")]
    for lever in more_targets:
        lever.begin(data.tokenizer.pieces, runtime.device)
    shapes = {name: tuple(weight.shape) for name, weight in model.state_dict().items()}
    origin = {"recipe_hash": recipe.hash, "data_sha256": data_sha256(data), "seed": part.seed}
    size = SizeForecast(recipe, shapes, data.tokenizer.content, lambda: len(bundle(recipe)))
    return Trainer(
        model=model,
        loader=open_loader(data.train, part, runtime.world),
        part=part,
        runtime=runtime,
        folder=folder,
        evidence=Evidence(folder, origin, runtime, num_kept),
        position=Position(recipe.hash, data_identity(data)),
        forecast=Forecast(data.train.num_tokens / data.train.num_bytes),
        validator=make_validator(recipe, data.val, runtime),
        averagers=[lever for lever in levers if hasattr(lever, "average")],
        penalties=[lever for lever in levers if hasattr(lever, "penalty")],
        weighers=[lever for lever in levers if hasattr(lever, "weigh")],
        more_targets=more_targets,
        fake_quantizers=[lever for lever in levers if hasattr(lever, "fake_quantize")],
        pushers=[lever for lever in levers if hasattr(lever, "push")],
        equippers=equippers,
        size_of=size.total_bytes,
    )


def make_validator(recipe: Recipe, shard: Shard, runtime: Runtime) -> Validator:
    """Validation on the held-out documents, in the forward passes that scoring will use."""
    lengths = np.diff(shard.starts, append=shard.num_tokens).tolist()
    return Validator(shard, list(chunk_documents(lengths, recipe.score.batch_tokens)), runtime)


def begun_recipe(folder: RunFolder, recipe: Recipe, data: DataFolder) -> Recipe:
    """The recipe of the run that the folder holds, which began with `recipe`; or `recipe`.

    The two differ if micro-batches did not fit in memory. The folder of another recipe or of other
    data is refused.
    """
    if not folder.about_file.exists():
        return recipe
    about = folder.read_json(folder.about_file)
    asked = about.get("asked_recipe_hash", about.get("recipe_hash"))
    held = {"recipe_hash": asked, "data_identity": about.get("data_identity")}
    for key, value in {"recipe_hash": recipe.hash, "data_identity": data_identity(data)}.items():
        # The recipe in the folder names the same run.
        if held[key] != value and (key, about.get(key)) != ("recipe_hash", value):
            raise RunError(
                f"{folder.path} holds a run with {key} {held[key]}, this one has {value}; "
                "choose another --out"
            )
    return recipe if asked == about.get("recipe_hash") else folder.read_recipe()


def begin_run(
    folder: RunFolder,
    recipe: Recipe,
    data_path: Path,
    data: DataFolder,
    runtime: Runtime,
    asked: Recipe | None = None,
) -> None:
    """Write the files that name a run; `asked` is the recipe before micro-batches were fitted."""
    wanted = {"recipe_hash": recipe.hash, "data_identity": data_identity(data)}
    if asked is not None and asked.hash != recipe.hash:
        wanted["asked_recipe_hash"] = asked.hash
    begun = folder.read_json(folder.about_file) if folder.about_file.exists() else {}
    machine = {
        "device": device_name(runtime.device),
        "ranks": runtime.world,
        "compiled": runtime.compiled,
        "versions": versions(),
    }
    if folder.weights_file.exists():
        # Nothing is left to train: the run stays that of the machine which made it.
        machine |= {key: begun[key] for key in machine if key in begun}
    folder.write_recipe(recipe)
    write_atomic(folder.tokenizer_file, data.tokenizer.content)
    write_json(
        folder.about_file,
        {
            **wanted,
            "date": begun.get("date") or datetime.now(UTC).date().isoformat(),
            "data": str(data_path),
            "train_tokens": data.train.num_tokens,
            "train_bytes": data.train.num_bytes,
            "tokenizer_identity": data.tokenizer.identity,
            "num_weights": sum(torch.Size(s).numel() for s in weight_shapes(recipe).values()),
            **machine,
        },
    )


def require_scored_lengths(recipe: Recipe) -> None:
    """Refuse to train at lengths that no score would use.

    Longer steps cost time, and what they learn about far tokens would never be asked for.
    """
    part, scored = recipe.train, max(recipe.model.context, recipe.score.context)
    longest = part.longest_context
    key = "contexts" if part.contexts else "stages" if part.stages else "context"
    if longest > scored:
        raise RecipeError(
            f"train.{key} reaches {longest} tokens, scoring reads {scored} (model.context); set "
            f"model.context = {longest} or train at shorter lengths"
        )


def require_packable(
    recipe: Recipe, shapes: Mapping[str, tuple[int, ...]], tokenizer: bytes
) -> None:
    """Refuse, before the first step, a model that no training could make fit its cap.

    Sizes are the least that any weights could have, without code: grids take no bytes, fp16 numbers
    half of theirs, other integers half of the bits of Gaussian weights.
    """
    schemes = check_rules(shapes, recipe.quant.rules)
    num_weights = sum(math.prod(shape) for shape in shapes.values())
    if num_weights > MAX_WEIGHTS:
        raise RecipeError(f"the model has {num_weights} weights: a file holds {MAX_WEIGHTS}")
    least = guess_other_bytes(schemes, shapes, 0, b"") / 2 + len(squeeze(tokenizer))
    cap_bytes = recipe.limits.cap_bytes
    if least > cap_bytes:
        raise RecipeError(
            f"{num_weights} weights take at least {least:.0f} bytes by quant.rules, the cap is "
            f"{cap_bytes}; use fewer bits, a smaller model or a larger limits.cap_bytes"
        )


def require_memory(
    recipe: Recipe, shapes: Mapping[str, tuple[int, ...]], free_bytes: float
) -> None:
    """Refuse, before the first step, micro-batches that cannot be held in memory.

    What every block keeps for the way back is at least its two inputs, queries, keys, values and
    the hidden layer, in half precision. Each weight has a gradient and a momentum, in fp32.
    """
    part = recipe.train
    num_tokens = max(part.micro_sizes or (part.micro_batch_tokens,))
    width = 0.0
    for name, shape in shapes.items():
        # The main network of an H-Net reads chunks of several tokens.
        share = 1 / recipe.hnet.bytes_per_chunk if recipe.hnet and name.startswith("main.") else 1
        if name.endswith(SAVED_OUTPUTS):
            width += share * shape[0]
        if name.endswith(SAVED_INPUTS):
            width += share * shape[1]
    weights_bytes = 12 * sum(math.prod(shape) for shape in shapes.values())
    least = weights_bytes + 2 * num_tokens * width
    if least > free_bytes:
        raise RecipeError(
            f"train.micro_batch_tokens = {num_tokens}: a step needs at least {least / 1e9:.1f} GB, "
            f"{free_bytes / 1e9:.1f} GB are free; use smaller micro-batches, and more of them "
            "(train.num_micro_batches)"
        )


def _check_tokenizer(recipe: Recipe, tokenizer: Tokenizer, data_path: Path) -> None:
    if tokenizer.vocab_size != recipe.model.vocab_size:
        raise RecipeError(
            f"model.vocab_size = {recipe.model.vocab_size}, but the tokenizer of {data_path} has "
            f"{tokenizer.vocab_size} pieces; set model.vocab_size, or run 'underpar data "
            "build TEXT --out DATA --recipe RECIPE'"
        )
    wanted = transform_of(recipe)
    if tokenizer.transform_name != wanted:
        raise RecipeError(
            f"the recipe's text transform is {wanted}, {data_path} was built with "
            f"{tokenizer.transform_name}; name its lever, or run 'underpar data build TEXT "
            "--out DATA --recipe RECIPE'"
        )


def validation_of(folder: RunFolder) -> dict[str, float]:
    """What a finished run measured before quantization: bits per byte and the forecast size."""
    validation = folder.read_fields(folder.validation_file)
    keys = ("live_bpb", "average_bpb", "forecast_bytes")
    measured = [key for key in keys if validation.values.get(key) is not None]
    for key in measured:
        validation.number(key)
    return {key: validation.values[key] for key in measured}


class ProgressLine:
    """A line of metrics in words, with the bits per byte of the last validation."""

    def __init__(self, earlier: Iterable[dict[str, Any]] = ()) -> None:
        self._validated = ""
        for line in earlier:
            self._remember_validation(line)

    def add(self, line: dict[str, Any]) -> str:
        """The words for the next line of metrics."""
        self._remember_validation(line)
        words = f"step {line['step']:,}, loss {line['loss']:.3f}{self._validated}"
        # Without validations during training, the forecast is that of the training text.
        if "forecast_bpb" in line:
            words += f", heading for {line['forecast_bpb']:.4f} BPB"
        elif "forecast_train_bpb" in line:
            words += f", heading for {line['forecast_train_bpb']:.4f} BPB of training text"
        if "forecast_bytes" in line:
            words += f", {line['forecast_bytes'] / 1e6:.2f} MB"
        if "bytes_per_chunk" in line:
            words += f", {line['bytes_per_chunk']:.2f} bytes per chunk"
        speed = line.get("tokens_per_second") or line["tokens"] / max(line["seconds"], 1e-9)
        words += f", {speed:,.0f} tokens/s"
        return words + (f", MFU {line['mfu']:.0%}" if "mfu" in line else "")

    def _remember_validation(self, line: dict[str, Any]) -> None:
        # The averaged weights are those that are packed.
        measured = line.get("average_val_bpb", line.get("val_bpb"))
        if measured is not None:
            self._validated = f", held-out {measured:.4f} BPB"


def open_reference(run: RunFolder, data: Path, margin: float) -> Reference:
    """The losses of an earlier run, to stop a worse one early; both need the same data.

    Losses are in nats per token, which only compare on the same tokens.
    """
    theirs = run.read_json(run.about_file).get("data_identity")
    ours = data_identity(load_data(data, verify=False, refuse_shared=False))
    if theirs != ours:
        raise RunError(
            f"{run.path} was trained on other data than {data} ({theirs}, not {ours}), so their "
            "losses cannot be compared; name another run for --stop-behind"
        )
    return read_reference(run, margin)


def data_of(run: RunFolder) -> Path:
    """The data folder that a run was trained on."""
    if not run.about_file.exists():
        raise RunError(f"{run.path} does not say on which data it was trained; give --data FOLDER")
    data = run.read_fields(run.about_file).text("data")
    if not Path(data).is_dir():
        raise RunError(
            f"{run.path}: its data folder {data} is not here; give --data FOLDER, or continue "
            f"training with 'underpar train {quote(str(run.recipe_file))} --data FOLDER --out "
            f"{quote(str(run.path))}'"
        )
    return Path(data)


def spent_share(part: TrainPart, line: dict[str, Any]) -> float:
    """Share of the budget that is spent after a logged step."""
    return progress_of(part, line["seconds"], line["step"], line["tokens"], line.get("flops", 0.0))
