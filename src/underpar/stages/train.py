"""Train a recipe on a data folder into a run folder."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from underpar.artifact.size_while_training import SizeForecast
from underpar.build.levers import plug_levers, resolve_levers, transform_of
from underpar.build.model import build_model, weight_shapes
from underpar.core.console import ERR, progress_bar
from underpar.core.dist import ask_main, process_group
from underpar.core.run_folder import RunFolder, write_atomic, write_json
from underpar.core.runtime import Runtime, seed_everything
from underpar.core.versions import device_name, versions
from underpar.data.folder import DataFolder, data_identity, load_data
from underpar.data.loader import Loader
from underpar.data.shards import Shard
from underpar.data.tokens.tokenizer import Tokenizer
from underpar.errors import RecipeError, RunError
from underpar.kernels.attention import backend_of
from underpar.recipe import Recipe, TrainPart
from underpar.score.windows import chunk_documents
from underpar.stages.calibrate import calibrate_run, needs_calibration
from underpar.submit.bundle import bundle
from underpar.train.checkpoint import Position
from underpar.train.guard import Reference, read_reference
from underpar.train.loop import OnStep, Trainer
from underpar.train.loss_forecast import Forecast
from underpar.train.step import step_of
from underpar.train.validate import Validator


def train(
    recipe: Recipe,
    data: Path,
    folder: RunFolder,
    runtime: Runtime,
    quiet: bool = False,
    reference: Reference | None = None,
) -> dict[str, Any]:
    """Train to the end of the budget, to a signal, or until far behind `reference`.

    All of them leave a checkpoint.
    """
    last: dict[str, Any] = {}
    resumed = folder.checkpoint_file.exists()
    watch = Watch(reference, list(folder.metrics()) if resumed else ())
    with progress_bar("train", 1, quiet or not runtime.is_main) as bar:

        def show(line: dict[str, Any]) -> bool:
            if not last and not quiet:
                if resumed:
                    ERR.print(f"continuing {folder.path} at step {line['step']}", markup=False)
                chosen = backend_of(runtime.device, runtime.dtype)
                ERR.print(f"attention: {chosen}", markup=False)
            last.update(line)
            bar.update(spent_share(recipe.train, line), watch.add(line))
            return watch.stopped is not None

        finished = train_run(recipe, data, folder, runtime, show)
    summary = {"finished": finished, "run": str(folder.path), "recipe_hash": recipe.hash}
    summary |= {"attention": backend_of(runtime.device, runtime.dtype)}
    summary |= {"compiled": runtime.compiled}
    summary |= {"stopped": watch.stopped} if watch.stopped else {}
    shown = ("step", "tokens", "start_seconds", "seconds", "loss")
    summary |= {k: last[k] for k in shown if k in last}
    return summary | (validation_of(folder) if finished and runtime.is_main else {})


def train_run(
    recipe: Recipe,
    data_path: Path,
    folder: RunFolder,
    runtime: Runtime,
    on_step: OnStep | None = None,
) -> bool:
    """Train `recipe` into `folder`, resuming what is there. True when the budget is spent."""
    recipe = resolve_levers(recipe)
    data = load_data(data_path)
    _check_tokenizer(recipe, data.tokenizer, data_path)
    with process_group(runtime):
        # On the main rank alone; where it refuses, no rank is left waiting.
        ask_main(lambda: _begin_run(folder, recipe, data_path, data, runtime), runtime)
        finished = make_trainer(recipe, data, folder, runtime).run(on_step)
        if finished and needs_calibration(recipe):
            calibrate_run(folder, data, runtime)
        return finished


def make_trainer(recipe: Recipe, data: DataFolder, folder: RunFolder, runtime: Runtime) -> Trainer:
    """Model, loader and levers of a recipe, ready to run."""
    seed_everything(recipe.train.seed)
    part = recipe.train
    levers = plug_levers(recipe, "train").values()
    model = build_model(recipe).to(runtime.device)
    shapes = {name: tuple(weight.shape) for name, weight in model.state_dict().items()}
    size = SizeForecast(recipe, shapes, data.tokenizer.content, lambda: len(bundle(recipe)))
    return Trainer(
        model=model,
        loader=Loader(data.train, step_of(part), part.seed, part.order),
        part=part,
        runtime=runtime,
        folder=folder,
        position=Position(recipe.hash, data_identity(data)),
        forecast=Forecast(data.train.num_tokens / data.train.num_bytes),
        validator=make_validator(recipe, data.val, runtime),
        averagers=[lever for lever in levers if hasattr(lever, "average")],
        penalties=[lever for lever in levers if hasattr(lever, "penalty")],
        disguises=[lever for lever in levers if hasattr(lever, "disguise")],
        size_of=size.total_bytes,
    )


def make_validator(recipe: Recipe, shard: Shard, runtime: Runtime) -> Validator:
    """The held-out documents in the passes in which they will be scored."""
    lengths = np.diff(shard.starts, append=shard.num_tokens).tolist()
    return Validator(shard, list(chunk_documents(lengths, recipe.score.batch_tokens)), runtime)


def _begin_run(
    folder: RunFolder, recipe: Recipe, data_path: Path, data: DataFolder, runtime: Runtime
) -> None:
    wanted = {"recipe_hash": recipe.hash, "data_identity": data_identity(data)}
    if folder.about_file.exists():
        about = folder.read_json(folder.about_file)
        for key, value in wanted.items():
            if about.get(key) != value:
                raise RunError(
                    f"{folder.path} holds a run with {key} {about.get(key)}, this one has {value}; "
                    "choose another --out"
                )
    folder.write_recipe(recipe)
    write_atomic(folder.tokenizer_file, data.tokenizer.content)
    write_json(
        folder.about_file,
        {
            **wanted,
            "data": str(data_path),
            "train_tokens": data.train.num_tokens,
            "num_weights": sum(torch.Size(s).numel() for s in weight_shapes(recipe).values()),
            "device": device_name(runtime.device),
            "ranks": runtime.world,
            "compiled": runtime.compiled,
            "versions": versions(),
        },
    )


def _check_tokenizer(recipe: Recipe, tokenizer: Tokenizer, data_path: Path) -> None:
    if tokenizer.vocab_size != recipe.model.vocab_size:
        raise RecipeError(
            f"model.vocab_size = {recipe.model.vocab_size}, but the tokenizer of {data_path} has "
            f"{tokenizer.vocab_size} pieces; set model.vocab_size or build the data again"
        )
    wanted = transform_of(recipe)
    if tokenizer.transform_name != wanted:
        raise RecipeError(
            f"the recipe's text transform is {wanted}, {data_path} was built with "
            f"{tokenizer.transform_name}; name its lever or build the data again"
        )


def validation_of(folder: RunFolder) -> dict[str, float]:
    """Of a finished run, before it is quantized: bits per byte, live and averaged, and its size."""
    found = folder.read_json(folder.validation_file)
    keys = ("live_bpb", "average_bpb", "forecast_bytes")
    return {key: found[key] for key in keys if found.get(key) is not None}


class Watch:
    """What is said about a run while it trains: speed, forecast, and whether to give it up."""

    def __init__(self, reference: Reference | None, lines: Iterable[dict[str, Any]] = ()) -> None:
        self.stopped: str | None = None
        self._reference = reference
        self._validated = ""
        for line in lines:
            self._see(line)
            if reference:
                reference.add(line["progress"], line["loss"])

    def add(self, line: dict[str, Any]) -> str:
        """Take a metrics line; returns it in words, with the last look at the held-out text."""
        if self._reference:
            self.stopped = self._reference.check(line["progress"], line["loss"])
        self._see(line)
        speed = line.get("tokens_per_second") or line["tokens"] / max(line["seconds"], 1e-9)
        remark = f"step {line['step']:,}, loss {line['loss']:.3f}, {speed:,.0f} tokens/s"
        if "mfu" in line:
            remark += f", MFU {line['mfu']:.0%}"
        # The training text where the held-out one is not priced on the way.
        if "forecast_bpb" in line:
            remark += f", forecast at {line['forecast_bpb']:.4f} BPB"
        elif "forecast_train_bpb" in line:
            remark += f", training text forecast at {line['forecast_train_bpb']:.4f} BPB"
        if "forecast_bytes" in line:
            remark += f", {line['forecast_bytes'] / 1e6:.2f} MB"
        return remark + self._validated

    def _see(self, line: dict[str, Any]) -> None:
        if "val_bpb" in line:
            self._validated = f", held-out {line['val_bpb']:.4f} BPB"
        if "average_val_bpb" in line:
            self._validated += f", averaged {line['average_val_bpb']:.4f}"


def open_reference(run: RunFolder, data: Path, margin: float) -> Reference:
    """The losses of a run on the same data: nats a token of other tokens say nothing."""
    theirs = run.read_json(run.about_file).get("data_identity")
    ours = data_identity(load_data(data, verify=False, refuse_shared=False))
    if theirs != ours:
        raise RunError(
            f"{run.path} was trained on other data than {data} ({theirs}, not {ours}), so their "
            "losses cannot be compared; name another run for --stop-behind"
        )
    return read_reference(run, margin)


def data_of(run: RunFolder) -> Path:
    """The data folder that a run was started with."""
    data = run.read_json(run.about_file).get("data")
    if data is None or not Path(data).is_dir():
        raise RunError(
            f"{run.path}: its data folder {data} is not here; continue with 'underpar train "
            f"{run.recipe_file} --data FOLDER --out {run.path}'"
        )
    return Path(data)


def spent_share(part: TrainPart, line: dict[str, Any]) -> float:
    """Share of the budget spent after a logged step."""
    from underpar.train.schedule import progress

    return progress(part, line["seconds"], line["step"], line["tokens"], line.get("flops", 0.0))
