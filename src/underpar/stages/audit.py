"""Judge a run: its size, its scores, its codec."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import torch

from underpar.artifact.unpack import Artifact
from underpar.audit.case import Case, Rescore
from underpar.audit.finding import FAIL, NOT_SHOWN, PASS, Finding
from underpar.audit.order import for_probes
from underpar.audit.rules import RULES, run_audit
from underpar.build.artifact import build_tokenizer, read_artifact, require_same_tokenizer
from underpar.build.model import build_predictor
from underpar.build.scoring import ScoringRequest, method_of, mixture_of, run_method
from underpar.codec.stream import Codec
from underpar.core.progress import SILENT, Progress
from underpar.core.run_folder import RunFolder, write_json
from underpar.core.runtime import Runtime
from underpar.core.tensor_files import read_about
from underpar.data.folder import load_data
from underpar.data.shards import Shard
from underpar.errors import RunError
from underpar.infer.predictor import Predictor
from underpar.recipe import Recipe
from underpar.score.ledger import Score, score_from_dict
from underpar.score.tally import OnCommit
from underpar.submit.bundle import bundle


def audit_run(
    folder: RunFolder,
    runtime: Runtime,
    data_path: Path | None = None,
    code_tokens: int = 0,
    progress: Progress = SILENT,
) -> tuple[str, list[Finding]]:
    """Judge a run rule by rule; writes audit.json, returns the overall verdict and the findings.

    `data_path` defaults to the data that the run was trained on. `code_tokens` above 0 ends the
    check of the codec after that many tokens.
    """
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
    with progress.task("audit", len(RULES)) as task:
        done = 0

        def on_rule(finding: Finding) -> None:
            nonlocal done
            done += 1
            task.update(done, f"{finding.rule}: {finding.verdict}")

        findings = run_audit(case, on_rule)
    overall = next(v for v in (FAIL, NOT_SHOWN, PASS) if v in {f.verdict for f in findings})
    rows = [finding.as_dict() for finding in findings]
    about = {"artifact_sha256": identity, "verdict": overall, "findings": rows}
    write_json(folder.audit_file, about)
    return overall, findings


def counted_recipe(recipe: Recipe, scores: Mapping[str, Score]) -> Recipe:
    """The recipe with the levers of all scores added: the code of each of them is counted."""
    levers = dict(recipe.levers)
    for score in scores.values():
        levers |= method_of(score, recipe)[1].levers
    return replace(recipe, levers=levers)


def rescorer(artifact: Artifact, runtime: Runtime) -> Rescore:
    """A function that repeats the method of a score on short documents, without its time limit."""

    def rescore(score: Score, shard: Shard, on_commit: OnCommit) -> Score:
        method, recipe = method_of(score, artifact.recipe)
        request = ScoringRequest(
            replace(method, seconds=0.0), runtime.for_probes, on_commit=on_commit
        )
        return run_method(replace(artifact, recipe=for_probes(recipe, shard)), shard, request)

    return rescore


def _spent_seconds(folder: RunFolder) -> dict[str, float]:
    """Seconds that each stage spent on training text."""
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
