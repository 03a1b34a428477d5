"""Run folder -> plain values for the page. Reads only files, and checks every value."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from underpar.audit.case import DEFAULT_LIMITS, hash_files
from underpar.audit.finding import PASS, VERDICTS, worst
from underpar.audit.rules import RULES
from underpar.core.fields import Fields
from underpar.core.makers import again
from underpar.core.run_folder import RunFolder
from underpar.data.folder import hash_file
from underpar.errors import RunError
from underpar.recipe import read_toml
from underpar.report.ancestry import ancestry_of
from underpar.report.facts import (
    AuditResult,
    Comparison,
    FindingRow,
    Pairs,
    RunReport,
    ScoreResult,
    Sizes,
    Step,
    TensorSize,
)
from underpar.score.ledger import Entry, Score

# Longest evidence value shown, in characters.
EVIDENCE_CHARACTERS = 300
# Verdicts that are shown in place of the audit's own: a judged file is not the one on disk; rules
# were left out, or limits were wider than those of the contest.
OTHER_FILES, OTHER_RULES = "of other files", "by other rules"


def gather(folder: RunFolder) -> RunReport:
    """Read the files that stages have written into `folder` so far."""
    folder.require_files()
    try:
        return _gather(folder)
    except RecursionError as error:
        raise RunError(f"{folder.path} holds a file nested too deeply to be shown") from error


def _gather(folder: RunFolder) -> RunReport:
    about = _read(folder, folder.about_file)
    failure = _read(folder, folder.failure_file)
    artifact = folder.artifact_file
    # The file is shown as it is: resolving its base could read files outside the folder.
    recipe = read_toml(str(folder.recipe_file)) if folder.recipe_file.exists() else {}
    scores = _scores(folder)
    return RunReport(
        name=folder.path.resolve().name,
        path=str(folder.path),
        recipe_hash=about.text("recipe_hash") if about else None,
        about=tuple(flatten(about.values)) if about else (),
        recipe=tuple(_sections("", recipe)),
        ancestry=ancestry_of(recipe) if recipe else None,
        failure=failure.text("reason") if failure else "",
        final_bpb=_final_bpb(_read(folder, folder.validation_file)),
        bytes_per_token=_bytes_per_token(about, scores),
        is_trained=folder.weights_file.exists() or artifact.exists(),
        steps=_steps(folder),
        sizes=_sizes(_read(folder, folder.budget_file)),
        scores=scores,
        audit=_audit(folder, _read(folder, folder.audit_file)),
        artifact_sha256=hash_file(artifact) if artifact.is_file() else None,
    )


def _read(folder: RunFolder, path: Path) -> Fields | None:
    return folder.read_fields(path) if path.exists() else None


def _sections(prefix: str, table: dict[str, Any]) -> Iterator[tuple[str, Pairs]]:
    plain = {key: value for key, value in table.items() if not isinstance(value, dict)}
    inner = {key: value for key, value in table.items() if isinstance(value, dict)}
    if plain or (prefix and not inner):
        yield prefix, tuple((key, show(value)) for key, value in plain.items())
    for key, value in inner.items():
        yield from _sections(f"{prefix}.{key}" if prefix else key, value)


def show(value: Any) -> str:
    """A JSON or TOML value for people: strings without quotes, a line per string of a list."""
    if isinstance(value, str):
        return value
    if isinstance(value, list):
        texts = [show(item) for item in value]
        return ("\n" if any(isinstance(item, str) for item in value) else ", ").join(texts)
    return json.dumps(value, default=str)


def flatten(table: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    """Nested objects as dotted names and texts; numbers have thousands separators."""
    for key, value in table.items():
        if isinstance(value, dict):
            yield from flatten(value, f"{prefix}{key}.")
        elif isinstance(value, int) and not isinstance(value, bool):
            yield prefix + key, f"{value:,}"
        else:
            yield prefix + key, show(value)


def _steps(folder: RunFolder) -> tuple[Step, ...]:
    return tuple(_step(Fields(folder.metrics_file, line)) for line in folder.metrics())


def _step(line: Fields) -> Step:
    return Step(
        line.count("step"),
        line.number("loss"),
        line.number("lr_scale"),
        line.count("tokens"),
        line.number("seconds"),
        # The averaged weights are those that are packed.
        next((line.number(k) for k in ("average_val_bpb", "val_bpb") if k in line.values), None),
    )


def _final_bpb(validation: Fields | None) -> float | None:
    keys = ("average_bpb", "live_bpb")
    known = [key for key in keys if validation and validation.values.get(key) is not None]
    return validation.number(known[0]) if validation and known else None


def _bytes_per_token(about: Fields | None, scores: dict[str, ScoreResult]) -> float | None:
    if about and {"train_bytes", "train_tokens"} <= about.values.keys():
        num_bytes, num_tokens = about.count("train_bytes"), about.count("train_tokens")
    else:
        entries = [e for result in scores.values() for e in result.score.entries]
        num_bytes = sum(e.num_bytes for e in entries)
        num_tokens = sum(e.num_targets for e in entries)
    return num_bytes / num_tokens if num_bytes and num_tokens else None


def _sizes(budget: Fields | None) -> Sizes | None:
    if budget is None:
        return None
    tensors = [
        TensorSize(
            row.text("name"),
            " \u00d7 ".join(show(row.values.get("shape")).split(", ")),
            row.text("scheme"),
            row.number("bytes"),
            row.number("bits_per_weight"),
        )
        for row in budget.rows("tensors")
    ]
    return Sizes(
        total_bytes=budget.count("total_bytes"),
        cap_bytes=budget.count("cap_bytes"),
        model_file_bytes=budget.count("model_file_bytes"),
        num_weights=budget.count("num_weights"),
        classes=tuple(sorted(budget.numbers("classes").items(), key=lambda kind: -kind[1])),
        tensors=tuple(sorted(tensors, key=lambda tensor: -tensor.num_bytes)),
    )


def _scores(folder: RunFolder) -> dict[str, ScoreResult]:
    scores = {}
    for path in folder.score_files():
        tree = _read(folder, path)
        assert tree is not None
        result = _score(tree)
        if folder.score_file(result.score.method) != path:
            raise RunError(f"{path} holds method {result.score.method!r}; {again(path)}")
        scores[result.score.method] = result
    # The plain score first: the others are compared with it.
    return dict(sorted(scores.items(), key=lambda item: (item[0] != "plain", item[0])))


def _score(tree: Fields) -> ScoreResult:
    entries = [
        Entry(
            document=row.count("document"),
            bits=row.number("bits"),
            num_bytes=row.count("num_bytes"),
            num_targets=row.count("num_targets"),
        )
        for row in tree.rows("ledger")
    ]
    score = Score(
        tree.text("method"),
        entries,
        tree.numbers("seconds"),
        order=tree.text("order"),
        side_bits=tree.number("side_bits"),
    )
    xz_bytes = tree.count("xz_bytes")
    if not score.num_bytes or not xz_bytes:
        raise RunError(f"{tree.file} prices no text; {again(tree.file)}")
    return ScoreResult(
        score,
        Comparison(score.num_bytes, score.bits, xz_bytes, tree.count("artifact_bytes")),
        tree.text("artifact_sha256"),
        tree.text("data_identity"),
        tree.text("device"),
    )


def _audit(folder: RunFolder, tree: Fields | None) -> AuditResult | None:
    if tree is None:
        return None
    findings = tuple(_finding(row) for row in tree.rows("findings"))
    verdict, profile = _verdict(tree), tree.text("profile")
    judged, here = tree.table("files").values, hash_files(folder)
    verdicts = [finding.verdict for finding in findings]
    judged_as = worst(verdicts, profile) if verdicts else "nothing"
    if verdict != judged_as:
        raise RunError(
            f"{tree.file} says {verdict} over findings that say {judged_as}; {again(tree.file)}"
        )
    changed = sorted(name for name in {*judged, *here} if judged.get(name) != here.get(name))
    missing = sorted({*RULES} - {finding.rule for finding in findings})
    limits = tree.table("limits").values
    wider = sorted(
        k for k, v in asdict(DEFAULT_LIMITS).items() if v and not _is_within(limits.get(k), v)
    )
    num_documents = tree.count("num_documents")
    told = [f"{name} {show(limits.get(name))}" for name in wider]
    # Who chooses the seed knows which documents are drawn.
    if num_documents and tree.values.get("seed") is not None:
        told.append("a sample by a seed of choice")
    if missing or (told and verdict == PASS):
        verdict = OTHER_RULES
    return AuditResult(
        OTHER_FILES if changed else verdict,
        tree.text("artifact_sha256"),
        tree.text("data_sha256"),
        profile,
        tuple(changed),
        findings,
        missing=tuple(missing),
        wider=tuple(told),
        num_documents=num_documents,
        verdict_then=verdict,
    )


def _is_within(limit: Any, default: float) -> bool:
    return isinstance(limit, int | float) and 0 < limit <= default


def _finding(row: Fields) -> FindingRow:
    evidence = flatten(row.table("evidence").values)
    pairs = [(name, text[:EVIDENCE_CHARACTERS]) for name, text in evidence]
    return FindingRow(
        row.text("rule"), _verdict(row), row.text("summary"), tuple(pairs), row.number("seconds")
    )


def _verdict(tree: Fields) -> str:
    verdict = tree.text("verdict")
    if verdict not in VERDICTS:
        raise RunError(f"{tree.file}: verdict {verdict[:60]!r} is none of {', '.join(VERDICTS)}")
    return verdict
