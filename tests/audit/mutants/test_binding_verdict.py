"""The verdict binds: it is of the files that were read, by all rules, within the limits."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from forge import CPU, Forge, copy_of

from commands import invoke, run
from tiny import TinyRun
from underpar.audit.finding import PASS, Finding
from underpar.audit.rules import RULES
from underpar.errors import RunError
from underpar.report.gather import OTHER_FILES, OTHER_RULES, gather
from underpar.stages import audit as stage
from underpar.stages.audit import AuditRequest, audit_run
from watcher import Watcher

FINDING = {"verdict": PASS, "summary": "", "evidence": {}, "seconds": 0.0}


@pytest.fixture
def forge(tiny_run: TinyRun, tmp_path: Path) -> Forge:
    return copy_of(tiny_run.folder, tiny_run.data, tmp_path)


def write_audit(forge: Forge, **changes: Any) -> None:
    """An audit.json as `audit_run` writes it, with findings that all pass."""
    tree = {
        "artifact_sha256": stage.hash_files(forge.run)["model.upar"],
        "data_sha256": "0" * 64,
        "profile": "strict",
        "limits": {"cap_bytes": 16_000_000, "train_seconds": 600.0, "score_seconds": 600.0},
        "num_documents": 0,
        "files": stage.hash_files(forge.run),
        "verdict": PASS,
        "findings": [{"rule": rule, **FINDING} for rule in RULES],
    }
    forge.run.audit_file.write_text(json.dumps(tree | changes))


def shown(forge: Forge) -> str:
    audit = gather(forge.run).audit
    assert audit is not None
    return audit.verdict


def test_a_whole_audit_within_the_limits_is_shown_as_it_is(forge: Forge) -> None:
    write_audit(forge)
    assert shown(forge) == PASS


@pytest.mark.parametrize(
    "change",
    [
        lambda run: run.score_file("plain").write_text(
            run.score_file("plain").read_text().replace('"device": "cpu', '"device": "gpu')
        ),
        lambda run: run.script_file.write_bytes(b"print(0.9)"),
        lambda run: run.budget_file.write_text(run.budget_file.read_text() + " "),
        lambda run: run.metrics_file.unlink(),
        lambda run: run.score_file("tilt").write_text(run.score_file("adapt").read_text().replace(
            '"method": "adapt"', '"method": "tilt"')),
    ],
    ids=["edited", "script", "a space", "removed", "added"],
)  # fmt: skip
def test_a_judged_file_that_changed_since(forge: Forge, change: Callable[[Any], object]) -> None:
    write_audit(forge)
    change(forge.run)
    assert shown(forge) == OTHER_FILES


@pytest.mark.parametrize(
    "changes",
    [
        {"limits": {"cap_bytes": 10**9, "train_seconds": 600.0, "score_seconds": 600.0}},
        {"limits": {"cap_bytes": 16_000_000, "train_seconds": 600.0}},
        {"findings": [FINDING | {"rule": "coverage"}]},
        {"num_documents": 3, "seed": 7},
    ],
    ids=["wider limit", "no limit", "rules left out", "chosen sample"],
)  # fmt: skip
def test_an_audit_by_other_rules(forge: Forge, changes: dict[str, Any]) -> None:
    write_audit(forge, **changes)
    assert shown(forge) == OTHER_RULES


def test_a_verdict_above_its_findings(forge: Forge) -> None:
    write_audit(forge, findings=[FINDING | {"rule": "size", "verdict": "deviation"}])
    with pytest.raises(RunError, match="says pass over findings that say fail"):
        gather(forge.run)


class Meddler(Watcher):
    """Changes a file while the audit works: progress is told after each rule."""

    def __init__(self, path: Path, content: bytes) -> None:
        super().__init__()
        self.path, self.content = path, content

    def task(self, name: str, total: float) -> Any:
        self.path.write_bytes(self.content)
        return super().task(name, total)


@pytest.mark.parametrize("name", ["run/score-plain.json", "run/model.upar", "data/manifest.json"])
def test_files_that_change_during_the_audit(
    forge: Forge, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setattr(stage, "run_audit", lambda *args: [])
    path = forge.run.path.parent / name
    content = path.read_bytes()
    changed = content.replace(b'"format": 2', b'"format": 2, "more": 1')
    meddler = Meddler(path, changed if changed != content else content + b"\n")
    with pytest.raises(RunError, match="changed during the audit"):
        audit_run(forge.run, CPU, AuditRequest(forge.data), meddler)
    assert not forge.run.audit_file.exists()


def test_another_artifact_while_the_audit_reads(
    forge: Forge, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An artifact that is exchanged for the reading, and put back for the hash."""
    read, honest = stage.read_artifact, forge.run.artifact_file.read_bytes()

    def exchanged(path: Path) -> Any:
        artifact, sha256 = read(path)
        path.write_bytes(honest)
        return artifact, sha256[::-1]

    monkeypatch.setattr(stage, "read_artifact", exchanged)
    monkeypatch.setattr(stage, "run_audit", lambda *args: [])
    with pytest.raises(RunError, match="changed during the audit"):
        audit_run(forge.run, CPU, AuditRequest(forge.data))


@pytest.mark.parametrize(
    ("verdict", "words", "code"),
    [("not shown", [], 3), ("not shown", ["--strict"], 1), ("fail", [], 1), ("pass", [], 0)],
)
def test_exit_codes(
    forge: Forge, monkeypatch: pytest.MonkeyPatch, verdict: str, words: list[str], code: int
) -> None:
    monkeypatch.setattr(stage, "run_audit", lambda *args: [Finding("size", verdict, "")])
    result = invoke("audit", forge.run.path, "--device", "cpu", "--json", *words)
    assert result.exit_code == code
    assert json.loads(result.stdout)["verdict"] == verdict


def test_the_help_names_the_exit_codes() -> None:
    words = " ".join(run("audit", "--help").split())
    assert "Exit code 0: every rule passes. 1: a rule fails. 3: no rule fails" in words
