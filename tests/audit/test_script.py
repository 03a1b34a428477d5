"""The counted script is run from an empty folder, and only if it is the bundle."""

import dataclasses
import json
import shutil
from pathlib import Path

import pytest

from tiny import TinyRun
from underpar.audit.case import Case
from underpar.audit.finding import FAIL, NOT_SHOWN, PASS
from underpar.audit.script import script
from underpar.core.run_folder import RunFolder, write_json
from underpar.core.runtime import Runtime
from underpar.errors import UnderparError
from underpar.stages.audit import AuditRequest, open_case


@pytest.fixture
def case(tiny_run: TinyRun, tmp_path: Path, runtime: Runtime) -> Case:
    shutil.copytree(tiny_run.folder.path, tmp_path / "run")
    return open_case(RunFolder(tmp_path / "run"), runtime, AuditRequest(tiny_run.data, seed=0))


def with_script(case: Case, text: str) -> Case:
    """A case whose script is `text`, and in which that is what is expected."""
    case.folder.script_file.write_text(text)
    return dataclasses.replace(case, expected_script=lambda: text.encode())


def test_the_script_alone_gives_the_bits_of_the_score(
    case: Case, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    # A package of that name in a folder that PYTHONPATH names is not imported.
    (tmp_path / "underpar").mkdir()
    (tmp_path / "underpar" / "__init__.py").write_text("raise SystemExit('imported')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    finding = script(case)
    assert finding.verdict == PASS, finding.summary
    assert finding.evidence["num_modules"] > 20
    plain = case.scores["plain"]
    entries = [dataclasses.replace(e, bits=0.9 * e.bits) for e in plain.entries]
    better = {"plain": dataclasses.replace(plain, entries=entries)}
    assert script(dataclasses.replace(case, scores=better)).verdict == FAIL


def test_a_script_that_uses_the_installed_package_fails(case: Case) -> None:
    score = json.dumps(case.scores["plain"].as_dict())
    chosen = "import sys; sys.path.insert(0, '/nowhere')"
    used = with_script(case, f"{chosen}\nimport json, underpar.errors\nprint({score!r})")
    finding = script(used)
    assert finding.verdict == FAIL and finding.summary.startswith("0 of ")


def test_a_script_that_ends_with_an_error_is_refused(case: Case) -> None:
    with pytest.raises(UnderparError, match="code 1: KeyError"):
        script(with_script(case, "{}['no']"))


def test_another_script_is_not_run(case: Case, tmp_path: Path) -> None:
    trace = tmp_path / "trace"
    case.folder.script_file.write_text(f"open({str(trace)!r}, 'w')")
    assert script(case).verdict == FAIL
    about = case.folder.read_json(case.folder.about_file)
    write_json(case.folder.about_file, about | {"versions": {"underpar": "0.0.1"}})
    finding = script(case)
    assert finding.verdict == NOT_SHOWN and "underpar 0.0.1" in finding.summary
    case.folder.script_file.unlink()
    assert script(case).verdict == NOT_SHOWN
    assert not trace.exists()
