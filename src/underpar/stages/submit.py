"""Finished runs of one recipe -> the folder of a submission: script, logs, figures, README.

A run is taken only if every stage has done its work on the files that are there, and the audit has
judged these very files. All runs must have one recipe, apart from the seed, one data folder and one
version of the code.
"""

from __future__ import annotations

import hashlib
import shlex
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from statistics import mean, stdev
from typing import Any

from underpar import __version__
from underpar.artifact.unpack import LazyArtifact
from underpar.audit.case import DEFAULT_LIMITS
from underpar.audit.finding import FAIL, VERDICTS
from underpar.core.makers import again, maker_of
from underpar.core.run_folder import RunFolder, run_at, write_json
from underpar.core.tensor_files import read_about
from underpar.data.new_folder import new_folder
from underpar.errors import RuleError, RunError
from underpar.recipe import Recipe, to_tree
from underpar.report.facts import AuditResult
from underpar.report.gather import gather
from underpar.score.ledger import Score, score_from_dict
from underpar.stages.audit import spent_seconds
from underpar.stages.train_gpt import scoring_of
from underpar.submit.folder import (
    README,
    REQUIREMENTS,
    SCRIPT,
    SUBMISSION,
    readme,
    requirements,
)
from underpar.submit.log import log_name, train_log, val_loss
from underpar.submit.train_script import train_script, without_seed

# The machine of the contest's track with a limit of time (rules R02, R03).
TRACK_DEVICE, TRACK_RANKS = "H100", 8


@dataclass(frozen=True)
class Author:
    """What a submission says of its author and of itself."""

    author: str = ""
    github_id: str = ""
    name: str = ""
    blurb: str = ""


@dataclass(frozen=True)
class SeedRun:
    """One run of a submission, with what its files say."""

    folder: RunFolder
    recipe: Recipe
    about: dict[str, Any]
    validation: dict[str, Any]
    score: Score
    audit: AuditResult
    train_seconds: float
    # Bytes of the script that the packer counted; None: of the one that only scores.
    script_bytes: int | None

    @property
    def seed(self) -> int:
        """The seed of the run."""
        return self.recipe.train.seed

    @property
    def eval_seconds(self) -> float:
        """Seconds of scoring."""
        return sum(self.score.seconds.values())

    @property
    def model_bytes(self) -> int:
        """Bytes of the artifact."""
        return self.folder.artifact_file.stat().st_size


def write_submission(
    runs: Sequence[Path],
    out: Path,
    author: Author,
    cap_bytes: int = DEFAULT_LIMITS.cap_bytes,
    overwrite: bool = False,
) -> dict[str, Any]:
    """Write the submission folder `out` of some runs; returns the content of submission.json."""
    # The folder appears complete or not at all.
    with new_folder(out, lambda folder: _check_replaceable(folder, overwrite)) as folder:
        batch = sorted((read_run(run_at(path)) for path in runs), key=lambda run: run.seed)
        script = train_script(batch[0].recipe)
        with _expecting_values(*runs):
            require_one_batch(batch)
            for run in batch:
                require_counted(run, len(script), cap_bytes)
            tree = describe(batch, script, author)
            for run in batch:
                log = train_log(run.folder, run.score.method, len(script))
                (folder / log_name(run.seed)).write_text(log)
            findings = {run.seed: run.audit.findings for run in batch}
            (folder / README).write_text(readme(tree, batch[0].recipe, findings))
        (folder / SCRIPT).write_bytes(script)
        (folder / REQUIREMENTS).write_text(requirements(batch[0].recipe, tree))
        write_json(folder / SUBMISSION, tree)
    return tree


def _check_replaceable(folder: Path, overwrite: bool) -> None:
    if not overwrite:
        raise RunError(f"{folder} exists; choose another --out, or replace it with --overwrite")
    if not (folder / SUBMISSION).is_file():
        raise RunError(
            f"{folder} is no submission folder, so it is not replaced; choose another --out"
        )


@contextmanager
def _expecting_values(*runs: Path) -> Iterator[None]:
    """Inside, a value that the files of runs lack, or have in another shape, is a RunError."""
    try:
        yield
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        names = " or ".join(map(str, runs))
        why = f"{type(error).__name__}: {error!s:.80}"
        raise RunError(f"{names}: a file lacks a value ({why}); run its stage again") from error


def read_run(folder: RunFolder) -> SeedRun:
    """A run that is trained, packed, scored and audited; any other is refused."""
    with _expecting_values(folder.path):
        return _read_run(folder)


def _read_run(folder: RunFolder) -> SeedRun:
    recipe, about = folder.read_recipe(), folder.read_json(folder.about_file)
    folder.need(folder.weights_file)
    validation = folder.read_json(folder.validation_file)
    artifact = folder.need(folder.artifact_file).read_bytes()
    quantized = read_about(folder.need(folder.quantized_file))
    _require_as_trained(folder, recipe, LazyArtifact(artifact), quantized)
    method = scoring_of(recipe)
    path = folder.score_file(method.label)
    if not path.exists():
        raise RunError(f"{path} does not exist; run '{maker_of(path)}' first")
    tree = folder.read_json(path)
    if tree["artifact_sha256"] != hashlib.sha256(artifact).hexdigest():
        raise RunError(f"{path} is the score of another artifact; {again(path)}")
    counted = quantized.get("script_bytes")
    return SeedRun(
        folder=folder,
        recipe=recipe,
        about=about,
        validation=validation,
        score=score_from_dict(tree),
        audit=_read_audit(folder),
        train_seconds=sum(spent_seconds(folder).values()),
        script_bytes=None if counted is None else int(str(counted)),
    )


def _require_as_trained(
    folder: RunFolder, recipe: Recipe, artifact: LazyArtifact, quantized: Mapping[str, object]
) -> None:
    """Refuse options of packing that train_gpt.py, which has only the recipe, would not repeat."""
    changed = None
    if artifact.header.recipe.quant != recipe.quant:
        changed = "--set"
    elif quantized["cap_bytes"] != recipe.limits.cap_bytes:
        changed = "--cap"
    elif artifact.names_tokenizer:
        changed = "--tokenizer-apart"
    if changed:
        raise RunError(
            f"{folder.path} was packed with {changed}, which its recipe does not say; run "
            f"'underpar pack {shlex.quote(str(folder.path))} --for-submission' without it"
        )


def _read_audit(folder: RunFolder) -> AuditResult:
    """The audit of a run, as the report reads it; it may lack evidence, but may not fail."""
    folder.need(folder.audit_file)
    audit = gather(folder).audit
    assert audit is not None, "the file is there"
    if audit.verdict == FAIL:
        rules = ", ".join(f.rule for f in audit.findings if f.verdict == FAIL)
        raise RunError(f"{folder.path} fails its audit ({rules}); it cannot be submitted")
    if audit.verdict not in VERDICTS:
        changed = f" ({', '.join(audit.changed[:3])} changed)" if audit.changed else ""
        raise RunError(
            f"{folder.audit_file} is {audit.verdict}{changed}; {again(folder.audit_file)}"
        )
    return audit


def require_one_batch(batch: Sequence[SeedRun]) -> None:
    """Refuse runs that differ in more than their seed."""
    first = batch[0]
    for run in batch[1:]:
        pair = f"{first.folder.path} and {run.folder.path}"
        key = _first_difference(
            to_tree(without_seed(first.recipe)), to_tree(without_seed(run.recipe))
        )
        if key:
            raise RunError(f"{pair} differ in {key}; a submission is one recipe with several seeds")
        for name in ("data_identity", "versions", "ranks", "device"):
            ours, theirs = first.about.get(name), run.about.get(name)
            if ours != theirs:
                raise RunError(
                    f"{pair} differ in their {name} ({ours}, {theirs}); train them alike"
                )
    seeds = [run.seed for run in batch]
    twice = next((seed for seed in seeds if seeds.count(seed) > 1), None)
    if twice is not None:
        raise RunError(f"two runs have seed {twice}; a submission counts each seed once")
    trained_by = first.about["versions"]["underpar"]
    if trained_by != __version__:
        raise RunError(
            f"{first.folder.path} was trained by underpar {trained_by}, this is {__version__}: its "
            "train_gpt.py would be other code; submit with the version that trained"
        )


def _first_difference(a: Any, b: Any, where: str = "") -> str:
    """The name of the first value that differs between two trees, with both values; or ""."""
    if isinstance(a, dict) and isinstance(b, dict):
        keys = sorted({*a, *b})
        pairs = (_first_difference(a.get(k), b.get(k), f"{where}.{k}".strip(".")) for k in keys)
        return next(filter(None, pairs), "")
    return "" if a == b else f"{where} ({a}, {b})"


def require_counted(run: SeedRun, script_bytes: int, cap_bytes: int) -> None:
    """Refuse a run over the cap, or one whose packer counted other code than its train_gpt.py."""
    total = run.model_bytes + script_bytes
    if total > cap_bytes:
        raise RuleError(
            f"{run.folder.path}: {run.model_bytes} (model.upar) + {script_bytes} ({SCRIPT}) = "
            f"{total} bytes, {total - cap_bytes} over the cap of {cap_bytes}; run 'underpar pack "
            f"{run.folder.path} --for-submission', then score and audit again"
        )
    if run.script_bytes != script_bytes:
        counted = "that of score.py" if run.script_bytes is None else f"{run.script_bytes} bytes"
        raise RunError(
            f"{run.folder.path} was packed with other code counted ({counted}) than its {SCRIPT} "
            f"({script_bytes} bytes); run 'underpar pack {run.folder.path} --for-submission', then "
            "score and audit again"
        )


def describe(batch: Sequence[SeedRun], script: bytes, author: Author) -> dict[str, Any]:
    """The content of submission.json. Names follow parameter-golf's records, such as PR 1493."""
    first, code_bytes = batch[0], len(script)
    losses, bpbs = [val_loss(run.score) for run in batch], [run.score.bpb for run in batch]
    largest = max(run.model_bytes for run in batch)
    ranks, device = first.about["ranks"], first.about["device"]
    seconds = [max(run.train_seconds, run.eval_seconds) for run in batch]
    is_timed = TRACK_DEVICE in device and ranks == TRACK_RANKS and max(seconds) <= 600
    spec, levers = first.recipe.model, ", ".join(first.recipe.levers) or "none"
    blurb = f"{spec.num_layers} layers of {spec.dim}, {spec.vocab_size} tokens, levers: {levers}"
    return {
        **asdict(author),
        "name": author.name or f"underpar {without_seed(first.recipe).hash}",
        "blurb": author.blurb or blurb,
        "date": datetime.now(UTC).date().isoformat(),
        "track": "10min_16mb" if is_timed else "non_record_16mb",
        "val_loss": mean(losses),
        "val_bpb": mean(bpbs),
        "val_loss_std": stdev(losses) if len(batch) > 1 else None,
        "val_bpb_std": stdev(bpbs) if len(batch) > 1 else None,
        "seeds": [run.seed for run in batch],
        "seed_results": {str(run.seed): _seed_result(run, code_bytes) for run in batch},
        # What the cap limits: the file of the largest model and train_gpt.py, as it is here.
        "bytes_total": largest + code_bytes,
        "bytes_model": largest,
        "bytes_code": code_bytes,
        "code_counted": SCRIPT,
        "code_sha256": hashlib.sha256(script).hexdigest(),
        "score_method": first.score.method,
        "hardware": f"{ranks}x {device}",
        "pytorch_version": first.about["versions"]["torch"],
        "data_identity": first.about["data_identity"],
        "recipe": without_seed(first.recipe).hash,
        "tool": f"underpar {__version__}",
    }


def _seed_result(run: SeedRun, code_bytes: int) -> dict[str, Any]:
    return {
        "val_loss": val_loss(run.score),
        "val_bpb": run.score.bpb,
        "pre_quant_val_bpb": run.validation.get("average_bpb") or run.validation["live_bpb"],
        "artifact_bytes": run.model_bytes + code_bytes,
        "bytes_model": run.model_bytes,
        "artifact_sha256": hashlib.sha256(run.folder.artifact_file.read_bytes()).hexdigest(),
        "steps": run.validation["step"],
        "train_seconds": run.train_seconds,
        "eval_seconds": run.eval_seconds,
        "audit": run.audit.verdict,
    }
