"""The demo: every stage in turn on the embedded corpus, by the functions behind the commands."""

from __future__ import annotations

import shutil
import time
from pathlib import Path
from typing import Any

from underpar.core.console import OUT, show_table
from underpar.core.run_folder import RunFolder, write_atomic
from underpar.core.runtime import Runtime, open_runtime
from underpar.data.folder import load_data
from underpar.data.sources.corpus import demo_corpus
from underpar.errors import UnderparError
from underpar.infer.generate import Sampling, generate
from underpar.recipe import Recipe
from underpar.report.build import build_report
from underpar.score.method import ADAPT, PLAIN
from underpar.stages.audit import audit
from underpar.stages.data import build_data_folder, build_options
from underpar.stages.pack import pack
from underpar.stages.score import score
from underpar.stages.train import train
from underpar.stages.use import compress, decompress, open_codec

PROMPT = "The government"


def run_demo(
    recipe: Recipe, out: Path, quiet: bool = False, code_tokens: int = 0
) -> dict[str, Any]:
    """Build, train, pack, score twice, audit, compress, write, report; returns the figures.

    The audit codes every held-out document unless `code_tokens` stops it earlier.
    """
    started = time.perf_counter()
    runtime = open_runtime("cpu")
    data, folder = out / "data", fresh_run(out / "run", recipe)
    build_data_folder([demo_corpus()], data, build_options(recipe), quiet)
    trained = train(recipe, data, folder, runtime, quiet)
    if not trained["finished"]:
        raise UnderparError(
            f"stopped at step {trained.get('step', 0)}; 'underpar demo' continues it"
        )
    budget = pack(folder, runtime, quiet=quiet)
    plain, adapted = (
        score(folder.artifact_file, data, runtime, method, quiet=quiet) for method in (PLAIN, ADAPT)
    )
    verdict, _ = audit(folder, runtime, data, code_tokens, quiet)
    coded, text = use_model(folder, data, out, runtime, quiet)
    report = build_report([folder], folder.report_file)
    result = {
        "trained": trained,
        "total_bytes": budget.total_bytes,
        "plain": plain,
        "adapted": adapted,
        "audit": verdict,
        "document": coded,
        "text": text,
        "report": str(report),
        "seconds": time.perf_counter() - started,
    }
    if not quiet:
        show_result(result)
    return result


def use_model(
    folder: RunFolder, data: Path, out: Path, runtime: Runtime, quiet: bool
) -> tuple[dict[str, Any], str]:
    """Compress a held-out document and bring it back, then write a paragraph."""
    document = write_one_document(data, out / "document.txt")
    coded = compress(folder.artifact_file, document, out / "document.upz", runtime, quiet)
    decompress(folder.artifact_file, out / "document.upz", out / "document.back", runtime)
    codec = open_codec(folder.artifact_file, runtime)
    pieces = generate(codec.predictor, codec.tokenizer, PROMPT, Sampling(max_tokens=60))
    return coded, PROMPT + "".join(pieces)


def fresh_run(path: Path, recipe: Recipe) -> RunFolder:
    """The run folder; a finished demo in it makes way, an interrupted one is continued."""
    folder = RunFolder(path)
    if not path.exists() or not any(path.iterdir()):
        return folder
    about = folder.read_json(folder.about_file) if folder.about_file.exists() else {}
    # Only a demo trains on the data folder beside it.
    if about.get("data") != str(path.parent / "data"):
        raise UnderparError(f"{path} is not a demo's run; choose another --out")
    unfinished = folder.checkpoint_file.exists() and not folder.weights_file.exists()
    if not (unfinished and about.get("recipe_hash") == recipe.hash):
        shutil.rmtree(path)
    return folder


def write_one_document(data: Path, path: Path) -> Path:
    """The first held-out document, as a text file."""
    folder = load_data(data)
    write_atomic(path, folder.tokenizer.decode(folder.val.doc(0)))
    return path


def show_result(result: dict[str, Any]) -> None:
    """The short table at the end."""
    plain, adapted, coded = result["plain"], result["adapted"], result["document"]
    saved = 100 - plain["percent_of_xz"]
    rows = [
        ("held-out text", f"{plain['documents']} documents, {plain['bytes']:,} bytes"),
        ("xz -9, all in one file", f"{plain['xz_bpb']:.4f} bits per byte"),
        ("model", f"{plain['bpb']:.4f} bits per byte, {saved:.1f} % fewer than xz"),
        ("model, adapting as it reads", f"{adapted['bpb']:.4f} bits per byte"),
        ("model with its own bytes", f"{plain['bpb_with_artifact']:.4f} bits per byte"),
        ("artifact and code", f"{result['total_bytes']:,} bytes"),
        ("audit", result["audit"]),
        ("one document", f"{coded['raw_bytes']:,} -> {coded['compressed_bytes']:,} bytes and back"),
        ("report", result["report"]),
        ("seconds", f"{result['seconds']:.0f}"),
    ]
    show_table("demo", ("what", "result"), rows)
    OUT.print(result["text"], markup=False)
