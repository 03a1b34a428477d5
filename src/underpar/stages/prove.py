"""R16: train_gpt.py runs from an empty folder and makes what the package makes, bit for bit.

The proof trains the recipe of the script at tiny size, with the overlay `cpu` and a budget of
steps, because a budget of seconds ends elsewhere on every machine. It does so twice:

1. `python -I train_gpt.py` in a folder that holds nothing else, in a process with an environment of
   its own that ends with an error if a module of the installed package was imported;
2. with the stages of this package, in this process.

Both get the same data, a part of the embedded corpus. The artifacts must have the same SHA-256 and
the scores the same bits for every document.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Sequence
from importlib import resources
from pathlib import Path
from typing import Any

import torch

from underpar.audit.finding import Finding, judge, not_shown
from underpar.core.progress import SILENT, Progress
from underpar.core.run_folder import RunFolder
from underpar.core.runtime import Runtime, threads
from underpar.data.build import build_data
from underpar.data.sources.corpus import demo_corpus, read_documents
from underpar.errors import RunError, UnderparError
from underpar.recipe import Recipe
from underpar.schema import TrainPart
from underpar.score.ledger import score_from_dict
from underpar.stages.data import build_options
from underpar.stages.pack import pack
from underpar.stages.score import score_artifact
from underpar.stages.train import train
from underpar.stages.train_gpt import read_recipe, scoring_of
from underpar.submit.bundle import module_path
from underpar.submit.folder import SCRIPT
from underpar.submit.train_script import RECIPE_FILE
from underpar.submit.unbundle import unbundle

# Text of the proof: so many documents of so many characters.
NUM_DOCUMENTS, MAX_CHARACTERS = 60, 1200
NUM_STEPS = 6
CPU = Runtime(torch.device("cpu"))
# One thread: sums are then made in one order.
ENVIRONMENT = {"PATH": os.defpath, "OMP_NUM_THREADS": "1"}
# Runs a script as `python SCRIPT` does, and fails if it imported from the folder named first.
RUNNER = """
import runpy, sys
package, *sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
files = [m.__file__ for name, m in sys.modules.items() if name.split(".")[0] == "underpar"]
strangers = [file for file in files if file.startswith(package)]
sys.exit(f"imported from the installed package: {strangers[0]}" if strangers else 0)
"""


def prove(
    script: Path, seed: int, progress: Progress = SILENT, num_steps: int = NUM_STEPS
) -> Finding:
    """Train `script` at tiny size from an empty folder, and compare with the package's own run."""
    with tempfile.TemporaryDirectory() as name, progress.task("proof", 4) as task:
        work = Path(name).resolve()
        sources = unbundle(script, work / "sources")
        strangers = [*sources["different"], *sources["not_in_this_package"]]
        if strangers:
            # The code of a stranger is not run.
            why = f"not run, because {strangers[0]} is not that of this package"
            return not_shown("reproduction", why, modules=strangers)
        changes = tiny_changes(num_steps)
        recipe = read_recipe(work / "sources" / RECIPE_FILE, seed, changes)
        data = make_data(recipe, work)
        task.update(1, f"{SCRIPT} trains in an empty folder")
        empty = work / "empty"
        empty.mkdir()
        shutil.copyfile(script, empty / SCRIPT)
        run_script(empty, ["--data", str(data), "--out", "run", "--seed", str(seed)], changes)
        task.update(2, "the package trains")
        with threads(1):
            folder = run_package(recipe, data, RunFolder(work / "package"), script.stat().st_size)
        task.update(4)
        return compare(RunFolder(empty / "run"), folder, recipe)


def prove_folder(folder: Path, progress: Progress = SILENT) -> Finding:
    """The proof of the script in a submission folder; a script that does not run is a fail."""
    try:
        return prove(folder / SCRIPT, TrainPart().seed, progress)
    except UnderparError as error:
        return judge("reproduction", False, f"refused: {error}")


def tiny_changes(num_steps: int) -> list[str]:
    """The overlay `cpu` as changes of single values, with a budget of steps."""
    text = (resources.files("underpar.recipes") / "cpu.toml").read_text()
    tables = tomllib.loads(text)
    tables["train"]["budget_steps"] = num_steps
    return [
        f"{section}.{key}={json.dumps(value)}"
        for section, table in tables.items()
        for key, value in table.items()
    ]


def make_data(recipe: Recipe, work: Path) -> Path:
    """A data folder for a recipe, of a part of the embedded corpus."""
    documents = read_documents([demo_corpus()])
    texts = [next(documents).text[:MAX_CHARACTERS] for _ in range(NUM_DOCUMENTS)]
    corpus = work / "documents.jsonl"
    corpus.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    build_data([corpus], work / "data", build_options(recipe))
    return work / "data"


def run_script(
    folder: Path, words: Sequence[str], changes: Sequence[str], launcher: Sequence[str] = ()
) -> None:
    """Run the train_gpt.py of `folder` there, isolated from the installed package.

    `launcher` are words before the interpreter, such as those of torchrun.
    """
    sets = [word for change in changes for word in ("--set", change)]
    package = str(module_path("underpar").parent)
    program = [sys.executable, "-I", "-c", RUNNER, package, SCRIPT]
    result = subprocess.run(
        [*launcher, *program, *words, "--device", "cpu", *sets],
        cwd=folder,
        env={**ENVIRONMENT, "HOME": str(folder)},
        capture_output=True,
        text=True,
    )
    if result.returncode:
        last = (result.stderr.strip().splitlines() or ["no message"])[-1]
        raise RunError(f"{SCRIPT} ended with exit code {result.returncode}: {last:.300}")


def run_package(recipe: Recipe, data: Path, folder: RunFolder, script_bytes: int) -> RunFolder:
    """Train, pack and score with the stages of this package, on one rank."""
    train(recipe, data, folder, CPU)
    pack(folder, CPU, script_bytes=script_bytes)
    score_artifact(folder.artifact_file, data, CPU, scoring_of(recipe))
    return folder


def compare(theirs: RunFolder, ours: RunFolder, recipe: Recipe) -> Finding:
    """The finding of a proof: the same artifact and the same bits for every document."""
    label = scoring_of(recipe).label
    sha256 = [hashlib.sha256(run.artifact_file.read_bytes()).hexdigest() for run in (theirs, ours)]
    scores = [score_from_dict(run.read_json(run.score_file(label))) for run in (theirs, ours)]
    same_score = scores[0].entries == scores[1].entries
    evidence: dict[str, Any] = {"artifact_sha256": sha256, "bpb": [score.bpb for score in scores]}
    if sha256[0] == sha256[1] and same_score:
        return judge(
            "reproduction",
            True,
            f"{recipe.train.budget_steps} steps from an empty folder: artifact {sha256[0][:12]} "
            f"and score {scores[0].bpb:.6f} are those of the package",
            **evidence,
        )
    parts = [f"artifact {sha256[0][:12]}, not {sha256[1][:12]}"] * (sha256[0] != sha256[1])
    parts += [f"score {scores[0].bpb:.8f}, not {scores[1].bpb:.8f}"] * (not same_score)
    return judge("reproduction", False, "; ".join(parts), **evidence)
