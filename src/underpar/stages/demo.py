"""The demo: every stage in turn on the embedded corpus, by the functions that the commands call."""

from __future__ import annotations

import shutil
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from underpar.core.locks import lock_folder
from underpar.core.progress import SILENT, Progress
from underpar.core.run_folder import RunFolder, write_atomic
from underpar.core.runtime import Runtime, open_runtime
from underpar.data.folder import MANIFEST_NAME, folder_aside, hash_file, load_data, read_manifest
from underpar.data.sources.corpus import demo_corpus
from underpar.errors import UnderparError
from underpar.infer.generate import Sampling, generate
from underpar.recipe import Recipe
from underpar.report.build import build_report
from underpar.score.method import ADAPT, PLAIN
from underpar.stages.audit import AuditRequest, audit_run
from underpar.stages.data import build_data_folder, build_options
from underpar.stages.pack import pack
from underpar.stages.score import score_artifact
from underpar.stages.train import train
from underpar.stages.use import compress, decompress, open_codec

PROMPT = "The government"
# Enough for a run that anyone can repeat; `underpar audit` and `demo --full` take all.
SAMPLE = AuditRequest(num_documents=12, code_tokens=12_000, num_retrained=10)
# All documents, and the whole training once more.
FULL = AuditRequest()


def run_demo(
    recipe: Recipe, out: Path, progress: Progress = SILENT, is_full: bool = False
) -> dict[str, Any]:
    """Build, train, pack, score twice, audit, compress, generate, report; returns the figures.

    The audit repeats a few training steps, and the plain score and the coding on a few random
    documents; with `is_full` all of them.
    """
    with lock_folder(out, create=True):
        return _run_demo(recipe, out, progress, is_full)


def _run_demo(recipe: Recipe, out: Path, progress: Progress, is_full: bool) -> dict[str, Any]:
    started = time.perf_counter()
    runtime = open_runtime("cpu")
    data, folder = out / "data", fresh_run(out / "run", recipe)
    has_old = is_demo_data(data)
    build_data_folder([demo_corpus()], data, build_options(recipe), progress, overwrite=has_old)
    trained = train(recipe, data, folder, runtime, progress)
    if not trained["finished"]:
        raise UnderparError(
            f"stopped at step {trained.get('step', 0)}; 'underpar demo' continues it"
        )
    budget = pack(folder, runtime, progress=progress)
    plain, adapted = (
        score_artifact(folder.artifact_file, data, runtime, method, progress=progress).summary()
        for method in (PLAIN, ADAPT)
    )
    request = replace(FULL if is_full else SAMPLE, data=data)
    audited = audit_run(folder, runtime, request, progress)
    coded, text = use_model(folder, data, out, runtime, progress)
    report = build_report([folder], folder.report_file)
    return {
        "trained": trained,
        "total_bytes": budget.total_bytes,
        "plain": plain,
        "adapted": adapted,
        "audit": audited.verdict,
        "audited": "all documents" if is_full else "a random sample; --full takes all",
        "document": coded,
        "text": text,
        "report": str(report),
        "seconds": time.perf_counter() - started,
    }


def use_model(
    folder: RunFolder, data: Path, out: Path, runtime: Runtime, progress: Progress
) -> tuple[dict[str, Any], str]:
    """Compress a held-out document and decompress it, then generate a paragraph."""
    artifact = folder.artifact_file
    document = write_one_document(data, out / "document.txt")
    coded = compress(artifact, document, out / "document.upz", runtime, progress)
    decompress(artifact, out / "document.upz", out / "document.back", runtime)
    codec = open_codec(artifact, runtime)
    pieces = generate(codec.predictor, codec.tokenizer, PROMPT, Sampling(max_tokens=60))
    return coded, PROMPT + "".join(pieces)


def fresh_run(path: Path, recipe: Recipe) -> RunFolder:
    """The demo's run folder; a finished demo in it is removed, an interrupted one continues."""
    folder, aside = RunFolder(path), folder_aside(path)
    if aside.is_dir():
        shutil.rmtree(aside)
    if not path.exists() or not any(path.iterdir()):
        return folder
    about = folder.read_json(folder.about_file) if folder.about_file.exists() else {}
    # Only a demo trains on the data folder beside it.
    if about.get("data") != str(path.parent / "data"):
        raise UnderparError(f"{path} is not a demo's run; choose another --out")
    unfinished = folder.checkpoint_file.exists() and not folder.weights_file.exists()
    if not (unfinished and about.get("recipe_hash") == recipe.hash):
        with lock_folder(path):
            # Renamed first: a kill must not leave half of a run, which would not be recognized.
            path.rename(aside)
        shutil.rmtree(aside)
    return folder


def is_demo_data(path: Path) -> bool:
    """Whether a data folder was built by the demo, which may then replace it; False without one."""
    if not (path / MANIFEST_NAME).exists():
        return False
    inputs = read_manifest(path).get("inputs", [])
    if [row.get("sha256") for row in inputs] != [hash_file(demo_corpus())]:
        raise UnderparError(f"{path} is not a demo's data; choose another --out")
    return True


def write_one_document(data: Path, path: Path) -> Path:
    """The first held-out document, as a text file."""
    folder = load_data(data)
    write_atomic(path, folder.tokenizer.decode(folder.val.doc(0)))
    return path
