"""The stages as functions over files. Each command is one of them; the demo calls these too."""

from __future__ import annotations

import lzma
import platform
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from underpar import __version__
from underpar.artifact.budget import Budget
from underpar.artifact.forecast import forecast
from underpar.artifact.size_forecast import SizeForecast
from underpar.artifact.unpack import Artifact
from underpar.audit.case import Case, Rescore
from underpar.audit.finding import FAIL, NOT_SHOWN, PASS, Finding
from underpar.audit.order import for_probes
from underpar.audit.rules import run_audit
from underpar.build import (
    build_model,
    build_predictor,
    build_tokenizer,
    plug_levers,
    read_artifact,
    require_same_tokenizer,
    resolve_levers,
    transform_of,
    weight_shapes,
)
from underpar.calibrating import calibrate, needs_calibration
from underpar.codec.stream import Codec
from underpar.console import ERR
from underpar.data.folder import DataFolder, data_identity, load_data
from underpar.data.loader import Loader
from underpar.data.shards import Shard
from underpar.data.tokens.tokenizer import Tokenizer, read_model
from underpar.errors import RecipeError, RunError
from underpar.infer.predictor import Predictor
from underpar.recipe import Recipe
from underpar.run import RunFolder, write_atomic, write_json
from underpar.runtime import Clock, Runtime, seed_everything
from underpar.score.ledger import Score, score_from_dict
from underpar.score.method import PLAIN, Method
from underpar.score.partial import Partial, forget
from underpar.score.tally import OnCommit
from underpar.score.windows import chunk_documents
from underpar.scoring import (
    OnShare,
    Way,
    how_of,
    method_of,
    mixture_of,
    open_method,
    run_method,
)
from underpar.submit.bundle import bundle
from underpar.train.checkpoint import Position, read_about
from underpar.train.dist import ask_main, process_group
from underpar.train.forecast import Forecast
from underpar.train.loop import OnStep, Trainer, interruptible
from underpar.train.step import step_of
from underpar.train.validate import Validator


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
            calibrate(folder, data, runtime)
        return finished


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


def versions() -> dict[str, str]:
    """What the numbers were made with."""
    return {
        "underpar": __version__,
        "python": platform.python_version(),
        "torch": str(torch.__version__),
    }


def device_name(device: torch.device) -> str:
    """The device in words."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{device.type}, {torch.get_num_threads()} threads"


def forecast_size(recipe: Recipe, tokenizer: Path | None = None) -> Budget:
    """The budget of a recipe before it is trained."""
    proto = read_model(tokenizer) if tokenizer else None
    return forecast(recipe, weight_shapes(recipe), len(bundle(recipe)), proto)


@dataclass(frozen=True)
class Scored:
    """A score with its file and the figures it is compared with."""

    score: Score
    path: Path
    about: dict[str, Any]


def score_artifact(
    artifact_path: Path,
    data_path: Path,
    runtime: Runtime,
    method: Method = PLAIN,
    changes: Sequence[str] = (),
    on_share: OnShare | None = None,
) -> Scored:
    """Score an artifact on the held-out documents; the result lies beside the artifact.

    It continues what was stopped; a signal ends it with `Stopped`, to be continued.
    `changes` are settings of the method's levers, "levers.lora_ttt.rank=40".
    """
    clock, folder = Clock("load"), RunFolder(artifact_path.parent)
    artifact, identity = read_artifact(artifact_path)
    method, recipe = open_method(artifact.recipe, method, changes)
    data = load_data(data_path)
    require_same_tokenizer(artifact, data.tokenizer)
    what = {"artifact_sha256": identity, "data_identity": data_identity(data)}
    how, file = how_of(method, recipe, runtime), folder.partial_file(method.label)
    with process_group(runtime), interruptible() as is_asked:
        partial = Partial(file, {**what, "how": how}, runtime, clock, is_asked, _tell)
        way = Way(method, runtime, clock, on_share, partial=partial)
        score = run_method(replace(artifact, recipe=recipe), data.val, way)
    about = {
        "artifact_sha256": identity,
        "artifact_bytes": artifact_path.stat().st_size,
        "data": str(data_path),
        "data_identity": data_identity(data),
        "device": device_name(runtime.device),
        "xz_bytes": xz_bytes(data.val, data.tokenizer),
        # A lossy tokenizer scores another text than the one whose bytes are counted.
        "lossless": data.tokenizer.lossless,
    }
    path = folder.score_file(score.method)
    if runtime.is_main:
        write_json(path, {**about, **score.as_dict()})
    partial.remove()
    return Scored(score, path, about)


def _tell(line: str) -> None:
    ERR.print(line, markup=False, soft_wrap=True)


def forget_partial(artifact_path: Path, method: Method) -> None:
    """Have the next score by this method start over."""
    forget(RunFolder(artifact_path.parent).partial_file(method.label))


def xz_bytes(shard: Shard, tokenizer: Tokenizer) -> int:
    """What `xz -9` makes of all documents in one file: the yardstick."""
    text = b"".join(tokenizer.decode(shard.doc(i)) for i in range(shard.num_documents))
    return len(lzma.compress(text, preset=9))


def audit_run(
    folder: RunFolder,
    runtime: Runtime,
    data_path: Path | None = None,
    code_tokens: int = 0,
    on_rule: Callable[[Finding], None] | None = None,
) -> tuple[str, list[Finding]]:
    """Judge a run's scores; writes audit.json and returns the overall verdict and the findings."""
    artifact, identity = read_artifact(folder.need(folder.artifact_file))
    data = load_data(data_path or Path(folder.read_json(folder.about_file)["data"]))
    require_same_tokenizer(artifact, data.tokenizer)
    scores = _read_scores(folder, identity)

    def open_predictor(dtype: torch.dtype = torch.float32) -> Predictor:
        return build_predictor(artifact, runtime.device, dtype=dtype)

    case = Case(
        recipe=artifact.recipe,
        open_predictor=open_predictor,
        codec=Codec(open_predictor(), build_tokenizer(artifact), identity),
        artifact_file=folder.artifact_file,
        code_bytes=len(bundle(counted_recipe(artifact.recipe, scores))),
        data=data,
        rescore=rescorer(artifact, runtime),
        open_mixture=lambda score: mixture_of(score, artifact.recipe),
        scores=scores,
        runtime=runtime,
        spent_seconds=_spent_seconds(folder),
        code_tokens=code_tokens,
    )
    findings = run_audit(case, on_rule)
    overall = next(v for v in (FAIL, NOT_SHOWN, PASS) if v in {f.verdict for f in findings})
    rows = [finding.as_dict() for finding in findings]
    about = {"artifact_sha256": identity, "verdict": overall, "findings": rows}
    write_json(folder.audit_file, about)
    return overall, findings


def counted_recipe(recipe: Recipe, scores: Mapping[str, Score]) -> Recipe:
    """The recipe with every lever that its scores were made with: their code counts too."""
    levers = dict(recipe.levers)
    for score in scores.values():
        levers |= method_of(score, recipe)[1].levers
    return replace(recipe, levers=levers)


def rescorer(artifact: Artifact, runtime: Runtime) -> Rescore:
    """What runs the method of a score on a few short documents, whatever its limit of time."""

    def rescore(score: Score, shard: Shard, on_commit: OnCommit) -> Score:
        method, recipe = method_of(score, artifact.recipe)
        way = Way(replace(method, seconds=0.0), runtime.for_probes, on_commit=on_commit)
        return run_method(replace(artifact, recipe=for_probes(recipe, shard)), shard, way)

    return rescore


def _spent_seconds(folder: RunFolder) -> dict[str, float]:
    """Time with training text, by stage."""
    spent = {"train": float(folder.read_json(folder.validation_file)["seconds"])}
    files = {"calibrate": folder.calibration_file, "tune": folder.quantized_file}
    keys = {"calibrate": "seconds", "tune": "tune_seconds"}
    for stage, path in files.items():
        about = read_about(path) if path.exists() else {}
        if keys[stage] in about:
            spent[stage] = float(str(about[keys[stage]]))
    return spent


def _read_scores(folder: RunFolder, identity: str) -> dict[str, Score]:
    scores = {}
    for path in folder.score_files():
        tree = folder.read_json(path)
        if tree.get("artifact_sha256") != identity:
            raise RunError(f"{path} scores another artifact; run 'underpar score' again")
        scores[tree["method"]] = score_from_dict(tree)
    return scores


def open_codec(artifact_path: Path, runtime: Runtime) -> Codec:
    """An artifact file, ready to predict, to write and to compress."""
    artifact, identity = read_artifact(artifact_path)
    return Codec(build_predictor(artifact, runtime.device), build_tokenizer(artifact), identity)
