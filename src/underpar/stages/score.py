"""Score an artifact on held-out text."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from underpar.build.artifact import read_artifact, require_same_tokenizer
from underpar.build.scoring import ScoringRequest, how_of, open_method, run_method
from underpar.core.dist import process_group
from underpar.core.locks import lock_on_main
from underpar.core.progress import SILENT, Progress
from underpar.core.run_folder import RunFolder, write_json
from underpar.core.runtime import Clock, Runtime
from underpar.core.versions import device_name, versions
from underpar.data.folder import DataFolder, data_identity, load_data
from underpar.data.xz import xz_bytes
from underpar.errors import RuleError
from underpar.score.ledger import Score
from underpar.score.method import ADAPT, PLAIN, STREAM, Method
from underpar.score.partial import Partial, Stopped, forget
from underpar.submit.script import write_script
from underpar.train.loop import interruptible


@dataclass(frozen=True)
class Scored:
    """A score with its file and the figures it is compared with."""

    score: Score
    path: Path
    about: dict[str, Any]

    def __repr__(self) -> str:
        return f"Scored({self.score}, {self.summary()['percent_of_xz']:.1f} % of what xz needs)"

    @property
    def bpb(self) -> float:
        """Bits per byte of the held-out text."""
        return self.score.bpb

    def summary(self) -> dict[str, Any]:
        """What the command prints: bits per byte, the same text under xz, times."""
        score, xz_bytes = self.score, self.about["xz_bytes"]
        bits_with_artifact = score.bits + 8 * self.about["artifact_bytes"]
        return {
            "finished": True,
            "method": score.method,
            "bpb": score.bpb,
            "bits": score.bits,
            "bytes": score.num_bytes,
            "targets": score.num_targets,
            "documents": len(score.entries),
            "xz_bpb": 8 * xz_bytes / score.num_bytes,
            "percent_of_xz": 100 * score.bits / (8 * xz_bytes),
            "bpb_with_artifact": bits_with_artifact / score.num_bytes,
            "order": score.order,
            "stopped_at": score.stopped_at,
            "seconds": sum(score.seconds.values()),
            "file": str(self.path),
        }


def choose_method(
    adapt: bool,
    levers: Sequence[str],
    stride: int | None,
    flat: bool | None,
    order: str | None,
    seconds: float,
) -> tuple[Method, list[str]]:
    """The method that options ask for, and what they change of the recipe; None: not asked for."""
    if not adapt:
        return Method(tuple(levers), stride or 0, bool(flat), order or STREAM, seconds), []
    if levers:
        raise RuleError("--adapt uses the levers of the recipe; leave out --with or --adapt")
    windows = {"stride": stride, "flat": flat, "order": order}
    changes = [f"score.{key}={json.dumps(v)}" for key, v in windows.items() if v is not None]
    return replace(ADAPT, seconds=seconds), changes


def score_artifact(
    artifact_path: Path,
    data_path: Path,
    runtime: Runtime,
    method: Method = PLAIN,
    changes: Sequence[str] = (),
    progress: Progress = SILENT,
    is_fresh: bool = False,
) -> Scored:
    """Score an artifact on the held-out documents; the result is a file beside the artifact.

    A score that was stopped continues, unless it is to be `is_fresh`. A signal raises `Stopped`
    after the state is saved. `changes` are settings of the method's levers, as in
    "levers.lora_ttt.rank=40", or of [score].
    """
    clock = Clock("load")
    with process_group(runtime), lock_on_main(artifact_path.parent, runtime):
        return _score_artifact(
            artifact_path, data_path, runtime, method, changes, progress, is_fresh, clock
        )


def _score_artifact(
    artifact_path: Path,
    data_path: Path,
    runtime: Runtime,
    method: Method,
    changes: Sequence[str],
    progress: Progress,
    is_fresh: bool,
    clock: Clock,
) -> Scored:
    folder = RunFolder(artifact_path.parent)
    artifact, identity = read_artifact(artifact_path)
    method, recipe = open_method(artifact.recipe, method, changes)
    label = method.label
    data = load_data(data_path)
    require_same_tokenizer(artifact, data.tokenizer)
    what = {"artifact_sha256": identity, "data_identity": data_identity(data)}
    how, file = how_of(method, recipe, runtime), folder.partial_file(label)
    if is_fresh and runtime.is_main:
        forget(file)
    with interruptible() as is_asked, progress.task("score", 1) as task:

        def on_share(share: float, bpb: float) -> None:
            task.update(share, f"{label}, {bpb:.4f} bits per byte")

        partial = Partial(file, {**what, "how": how}, runtime, clock, is_asked, progress.note)
        request = ScoringRequest(method, runtime, clock, on_share, partial=partial)
        try:
            score = run_method(replace(artifact, recipe=recipe), data.val, request)
        except Stopped as stopped:
            stopped.method = label
            raise
    about = describe_input(artifact_path, identity, data_path, data, runtime)
    path = folder.score_file(score.method)
    if runtime.is_main:
        write_json(path, {**about, **score.as_dict()})
        # In a folder that is not a run, a file of the script's name belongs to somebody else.
        if folder.budget_file.is_file():
            write_script(folder, artifact.recipe, identity)
    partial.remove()
    return Scored(score, path, about)


def describe_input(
    artifact_path: Path, identity: str, data_path: Path, data: DataFolder, runtime: Runtime
) -> dict[str, Any]:
    """What was scored and where, as every score file says it."""
    return {
        "artifact_sha256": identity,
        "artifact_bytes": artifact_path.stat().st_size,
        "data": str(data_path),
        "data_identity": data_identity(data),
        "device": device_name(runtime.device),
        "versions": versions(),
        "xz_bytes": xz_bytes(data.val, data.tokenizer),
        # A lossy tokenizer scores another text than the one whose bytes are counted.
        "lossless": data.tokenizer.lossless,
    }
