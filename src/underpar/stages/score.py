"""Score an artifact on held-out text."""

from __future__ import annotations

import lzma
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from underpar.build.artifact import read_artifact, require_same_tokenizer
from underpar.build.scoring import ScoringRequest, how_of, open_method, run_method
from underpar.core.console import ERR, progress_bar
from underpar.core.dist import process_group
from underpar.core.run_folder import RunFolder, write_json
from underpar.core.runtime import Clock, Runtime
from underpar.core.versions import device_name
from underpar.data.folder import data_identity, load_data
from underpar.data.shards import Shard
from underpar.data.tokens.tokenizer import Tokenizer
from underpar.score.ledger import Score
from underpar.score.method import PLAIN, Method
from underpar.score.partial import Partial, forget
from underpar.score.tally import OnShare
from underpar.train.loop import interruptible


def score(
    artifact: Path,
    data: Path,
    runtime: Runtime,
    method: Method = PLAIN,
    changes: Sequence[str] = (),
    quiet: bool = False,
) -> dict[str, Any]:
    """Bits per byte on the held-out text, with xz beside it."""
    with progress_bar(method.label, 1, quiet or not runtime.is_main) as bar:

        def show(share: float, bpb: float) -> None:
            bar.update(share, f"{bpb:.4f} bits per byte")

        scored = score_artifact(artifact, data, runtime, method, changes, show)
    result, xz = scored.score, scored.about["xz_bytes"]
    return {
        "finished": True,
        "method": result.method,
        "bpb": result.bpb,
        "bits": result.bits,
        "bytes": result.num_bytes,
        "targets": result.num_targets,
        "documents": len(result.entries),
        "xz_bpb": 8 * xz / result.num_bytes,
        "percent_of_xz": 100 * result.bits / (8 * xz),
        "bpb_with_artifact": (result.bits + 8 * scored.about["artifact_bytes"]) / result.num_bytes,
        "order": result.order,
        "stopped_at": result.stopped_at,
        "seconds": sum(result.seconds.values()),
        "file": str(scored.path),
    }


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
        request = ScoringRequest(method, runtime, clock, on_share, partial=partial)
        score = run_method(replace(artifact, recipe=recipe), data.val, request)
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
