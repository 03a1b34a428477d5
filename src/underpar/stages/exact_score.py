"""Score an artifact in exact mode, and say what the mode costs against the float score."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np

from underpar.build.artifact import read_artifact, require_same_tokenizer
from underpar.build.exact import build_exact_predictor
from underpar.core.progress import SILENT, Progress
from underpar.core.run_folder import RunFolder, write_json
from underpar.core.runtime import Clock, Runtime
from underpar.data.folder import data_identity, load_data
from underpar.infer.exact_predictor import FREQ_BITS
from underpar.score.ledger import Score, score_from_dict
from underpar.score.method import PLAIN, Method
from underpar.score.tally import Tally
from underpar.stages.score import Scored, describe_input, score_artifact

EXACT = Method(name="exact")


def score_exactly(
    artifact_path: Path, data_path: Path, runtime: Runtime, progress: Progress = SILENT
) -> dict[str, Any]:
    """Score the held-out documents in exact mode; the result is a file beside the artifact.

    The float score is that of the file of the plain score; without one it is made first. The exact
    score is no claim of the run, so the audit does not judge its file: anyone can decode it.
    """
    plain = _plain_score(artifact_path, data_path, runtime, progress)
    clock = Clock("load")
    artifact, identity = read_artifact(artifact_path)
    data = load_data(data_path)
    require_same_tokenizer(artifact, data.tokenizer)
    predictor = build_exact_predictor(artifact, runtime.device)
    targets = np.asarray(data.val.tokens[1:], dtype=np.int64)
    done = 0
    with clock.phase("score"), progress.task("score", len(targets)) as task:

        def show(num_tokens: int) -> None:
            nonlocal done
            done += num_tokens
            task.update(done, "exact")

        _, freqs = predictor.stream_intervals(targets, np.zeros(1, dtype=np.int64), show)
        tally = Tally(data.val)
        tally.commit_stream(0, (FREQ_BITS - np.log2(freqs)) * math.log(2))
    score = tally.score(EXACT, clock, stopped_at=-1)
    about = {
        **describe_input(artifact_path, identity, data_path, data, runtime),
        "float_bits": plain.bits,
        "cost_percent": 100 * (score.bits / plain.bits - 1),
    }
    path = RunFolder(artifact_path.parent).exact_score_file
    write_json(path, {**about, **score.as_dict()})
    told = {key: about[key] for key in ("float_bits", "cost_percent")}
    return {**Scored(score, path, about).summary(), **told}


def _plain_score(artifact: Path, data: Path, runtime: Runtime, progress: Progress) -> Score:
    """The float score of the same artifact and text."""
    folder = RunFolder(artifact.parent)
    path = folder.score_file(PLAIN.label)
    if path.is_file():
        tree = folder.read_json(path)
        _, identity = read_artifact(artifact)
        made_of = (tree.get("artifact_sha256"), tree.get("data_identity"))
        if made_of == (identity, data_identity(load_data(data))):
            return score_from_dict(tree)
    return score_artifact(artifact, data, runtime, progress=progress).score
