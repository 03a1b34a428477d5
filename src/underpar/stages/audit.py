"""Judge a run: its size, its data, its clocks, its scores, its codec."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from underpar.artifact.unpack import Artifact
from underpar.audit.case import (
    DEFAULT_LIMITS,
    Case,
    Limits,
    Rescore,
    changed_data_files,
    hash_files,
)
from underpar.audit.claims import read_claims
from underpar.audit.finding import STRICT, Finding, overall
from underpar.audit.kraft import flatten
from underpar.audit.rules import RULES, run_audit
from underpar.audit.traces import for_probes
from underpar.build.adaptation import adaptation_for
from underpar.build.artifact import build_tokenizer, read_artifact, require_same_tokenizer
from underpar.build.model import build_predictor
from underpar.build.scoring import ScoringRequest, method_of, mixture_of, run_method
from underpar.codec.stream import Codec
from underpar.core.fields import Fields
from underpar.core.locks import lock_folder
from underpar.core.makers import again
from underpar.core.progress import SILENT, Progress
from underpar.core.run_folder import RunFolder, write_json
from underpar.core.runtime import Runtime
from underpar.core.tensor_files import read_about
from underpar.core.versions import versions
from underpar.data.folder import data_sha256, load_data
from underpar.data.shards import Shard
from underpar.errors import RuleError, RunError
from underpar.infer.predictor import Predictor
from underpar.score.ledger import Score
from underpar.score.tally import OnCommit
from underpar.stages.pack import pack_again
from underpar.stages.train import make_trainer
from underpar.submit.bundle import bundle
from underpar.submit.script import counted_recipe

# Precisions of matrix products, by their names in score files.
PRODUCTS = {str(dtype): dtype for dtype in (torch.float32, torch.bfloat16)}


@dataclass(frozen=True)
class AuditRequest:
    """What an auditor asks for."""

    # Default: the data that the run was trained on.
    data: Path | None = None
    limits: Limits = DEFAULT_LIMITS
    # strict or precedent: whether deviations of accepted records are tolerated.
    profile: str = STRICT
    # See `Case`; 0 stands for all documents and tokens.
    num_documents: int = 0
    code_tokens: int = 0
    num_retrained: int | None = None
    # The seed of the audit's random choices; without one they cannot be known in advance.
    seed: int | None = None

    def __post_init__(self) -> None:
        counts = {
            "--documents": self.num_documents,
            "--code-tokens": self.code_tokens,
            "--retrain": self.num_retrained,
        }
        for name, count in counts.items():
            if count is not None and count < 0:
                raise RuleError(f"{name} {count}: expected 0 or more")


WHOLE = AuditRequest()


@dataclass(frozen=True)
class Audited:
    """The verdict on a run and the findings that it is made of."""

    verdict: str
    findings: list[Finding]
    data_sha256: str

    def __repr__(self) -> str:
        rules = [f"{finding.rule}: {finding.verdict}" for finding in self.findings]
        return f"Audited({self.verdict}: {', '.join(rules)})"

    def as_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return {
            "verdict": self.verdict,
            "data_sha256": self.data_sha256,
            "findings": [finding.as_dict() for finding in self.findings],
        }


def audit_run(
    folder: RunFolder,
    runtime: Runtime,
    request: AuditRequest = WHOLE,
    progress: Progress = SILENT,
) -> Audited:
    """Judge a run rule by rule; writes audit.json with the SHA-256 of every file it judged."""
    folder.require_files()
    with lock_folder(folder.path):
        return _audit_run(folder, runtime, request, progress)


def _audit_run(
    folder: RunFolder, runtime: Runtime, request: AuditRequest, progress: Progress
) -> Audited:
    judged = hash_files(folder)
    case = open_case(folder, runtime, request)
    with progress.task("audit", len(RULES)) as task:
        done = 0

        def on_rule(finding: Finding) -> None:
            nonlocal done
            done += 1
            task.update(done, f"{finding.rule}: {finding.verdict}")

        findings = run_audit(case, on_rule)
    read = case.artifact_sha256 == judged[folder.artifact_file.name]
    if not read or hash_files(folder) != judged:
        raise RunError(
            f"files in {folder.path} changed during the audit; {again(folder.audit_file)}"
        )
    if changed := changed_data_files(case.data_path, case.data):
        raise RunError(
            f"{', '.join(changed)} in {case.data_path} changed during the audit; "
            f"{again(folder.audit_file)}"
        )
    verdict = overall(findings, request.profile)
    audited = Audited(verdict, findings, data_sha256(case.data))
    about = {
        "artifact_sha256": judged[folder.artifact_file.name],
        "profile": request.profile,
        "limits": asdict(request.limits),
        "num_documents": request.num_documents,
        "code_tokens": request.code_tokens,
        "num_retrained": request.num_retrained,
        "seed": request.seed,
        "files": judged,
        "versions": versions(),
        "data": str(case.data_path),
    }
    write_json(folder.audit_file, about | audited.as_dict())
    return audited


def open_case(folder: RunFolder, runtime: Runtime, request: AuditRequest) -> Case:
    """Read everything that is judged."""
    artifact, sha256 = read_artifact(folder.need(folder.artifact_file))
    data_path = request.data or Path(folder.read_fields(folder.about_file).text("data"))
    # Documents in both splits are judged by a rule.
    data = load_data(data_path, refuse_shared=False)
    require_same_tokenizer(artifact, data.tokenizer)
    claims = read_claims(folder, artifact.recipe, sha256)

    def open_predictor(dtype: torch.dtype = torch.float32) -> Predictor:
        return build_predictor(artifact, runtime.device, dtype=dtype)

    return Case(
        folder=folder,
        artifact_sha256=sha256,
        recipe=artifact.recipe,
        artifact=artifact,
        open_predictor=open_predictor,
        rescore=rescorer(artifact, runtime),
        rescore_flat=lambda alphabet: rescorer(artifact, runtime, alphabet),
        repeat=repeater(artifact, runtime),
        open_mixture=lambda score: mixture_of(score, artifact),
        open_adaptation=lambda score: adaptation_for(
            artifact, *method_of(score, artifact.recipe), _as_scored(score, runtime)
        ),
        open_trainer=lambda: make_trainer(
            folder.read_recipe(), data, folder, replace(runtime, compiled=False)
        ),
        pack_again=lambda: pack_again(folder, artifact.recipe.quant, data, runtime),
        expected_script=lambda: bundle(counted_recipe(artifact.recipe, claims.scores.values())),
        codec=Codec(open_predictor(), build_tokenizer(artifact), sha256),
        data=data,
        data_path=data_path,
        scores=claims.scores,
        claims=claims.trees,
        refused=claims.refused,
        runtime=runtime,
        spent_seconds=spent_seconds(folder),
        limits=request.limits,
        rng=np.random.default_rng(request.seed),
        num_documents=request.num_documents,
        code_tokens=request.code_tokens,
        num_retrained=request.num_retrained,
    )


def rescorer(artifact: Artifact, runtime: Runtime, alphabet: np.ndarray | None = None) -> Rescore:
    """A function that repeats the method of a score on short documents, without its time limit.

    With an `alphabet` the model is flattened: it knows next to nothing but these tokens.
    """
    # By context, in which the methods of a run may differ.
    untouched: dict[int, Predictor] = {}

    def reopen(*args: Any) -> Predictor:
        """The artifact's predictor. Building one takes longer than a short text."""
        wanted, device, adapters, dtype = args
        context = wanted.recipe.model.context
        if context not in untouched:
            untouched[context] = build_predictor(wanted, device, dtype=dtype)
        model = deepcopy(untouched[context].model)
        if alphabet is not None:
            flatten(model, alphabet)
        return Predictor(model, device, list(adapters), dtype)

    def rescore(score: Score, shard: Shard, on_commit: OnCommit) -> Score:
        method, recipe = method_of(score, artifact.recipe)
        request = ScoringRequest(
            replace(method, seconds=0.0),
            runtime.for_probes,
            on_commit=on_commit,
            open_predictor=reopen,
        )
        return run_method(
            replace(artifact, recipe=for_probes(recipe, shard, method.stride)), shard, request
        )

    return rescore


def repeater(artifact: Artifact, runtime: Runtime) -> Callable[[Score, Shard], Score]:
    """A function that scores documents as a score says it was made: precision, levers, stop."""

    def repeat(score: Score, shard: Shard) -> Score:
        method, recipe = method_of(score, artifact.recipe)
        request = ScoringRequest(method, _as_scored(score, runtime), now=_clock_that_stops(score))
        return run_method(replace(artifact, recipe=recipe), shard, request)

    return repeat


def _as_scored(score: Score, runtime: Runtime) -> Runtime:
    """The runtime with the precision of a score."""
    products = PRODUCTS.get(str(score.how.get("products")))
    if products is None:
        raise RunError(f"the score {score.method} does not say its precision")
    return replace(runtime, precision=products)


def _clock_that_stops(score: Score) -> Callable[[], float]:
    """A clock by which learning ends where the score says it did.

    A deadline reads its clock once when it is set, and then once per unit or step.
    """
    readings = -1

    def now() -> float:
        nonlocal readings
        readings += 1
        is_over = 0 <= score.stopped_at < readings
        return float("inf") if is_over else 0.0

    return now


def spent_seconds(folder: RunFolder) -> dict[str, float]:
    """Seconds that each stage spent on training text."""
    spent = {"train": folder.read_fields(folder.validation_file).number("seconds")}
    files = {"calibrate": folder.calibration_file, "tune": folder.quantized_file}
    keys = {"calibrate": "seconds", "tune": "tune_seconds"}
    for stage, path in files.items():
        about = Fields(path, read_about(path) if path.exists() else {})
        if keys[stage] in about.values:
            spent[stage] = about.number(keys[stage])
    return spent
