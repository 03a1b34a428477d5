"""A run that can be submitted, and copies of it that look like runs of other seeds."""

import json
import shutil
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from tiny import TinyRun
from underpar.audit.case import DEFAULT_LIMITS, hash_files
from underpar.audit.rules import RULES
from underpar.core.run_folder import RunFolder, write_json
from underpar.core.runtime import Runtime
from underpar.score.method import ADAPT
from underpar.stages.pack import pack_run
from underpar.stages.score import score_artifact
from underpar.submit.train_script import train_script


def make_submittable(tiny_run: TinyRun, path: Path, runtime: Runtime) -> RunFolder:
    """The tiny run, packed for a submission, scored, and with an audit that passes."""
    folder = RunFolder(shutil.copytree(tiny_run.folder.path, path))
    pack_run(folder, script_bytes=len(train_script(tiny_run.recipe)))
    score_artifact(folder.artifact_file, tiny_run.data, runtime, ADAPT)
    write_audit(folder)
    return folder


def write_audit(folder: RunFolder, verdict: str = "pass") -> None:
    """An audit of the files that are there, in which each rule has this verdict."""
    findings = [
        {"rule": rule, "verdict": verdict, "summary": "seen", "evidence": {}, "seconds": 0.0}
        for rule in RULES
    ]
    about = {"artifact_sha256": "0" * 64, "data_sha256": "0" * 64, "profile": "strict"}
    about |= {"limits": asdict(DEFAULT_LIMITS), "num_documents": 0}
    judged = {"files": hash_files(folder), "verdict": verdict, "findings": findings}
    write_json(folder.audit_file, about | judged)


def copy_run(source: RunFolder, path: Path, seed: int) -> RunFolder:
    """A copy that says it has another seed."""
    folder = RunFolder(shutil.copytree(source.path, path))
    recipe = folder.read_recipe()
    folder.write_recipe(replace(recipe, train=replace(recipe.train, seed=seed)))
    write_audit(folder)
    return folder


def change_json(path: Path, **values: Any) -> None:
    """Replace values of a JSON file."""
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))
