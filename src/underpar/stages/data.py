"""Get text, turn it into tokens, check the result: build, audit, fetch, import."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from underpar.build.levers import transform_of
from underpar.core.progress import SILENT, Progress
from underpar.data.build import BuildOptions, build_data
from underpar.data.copies import find_copies, repeated_documents
from underpar.data.duplicates import NearSettings, audit_duplicates
from underpar.data.folder import load_data
from underpar.data.published.exchange import ImportOptions, import_published
from underpar.data.sources.fetch import FetchOptions, FetchSummary, fetch
from underpar.data.workers import workers_for
from underpar.recipe import Recipe

# A build looks for near duplicates in so much training text: about ten seconds.
MOST_SEARCHED_BYTES = 64_000_000


def build_options(recipe: Recipe, tokenizer: Path | None = None) -> BuildOptions:
    """How a recipe turns text into tokens, with a new tokenizer or the one in a file."""
    return BuildOptions(
        vocab_size=None if tokenizer else recipe.model.vocab_size,
        holdout=recipe.data.holdout,
        tokenizer=tokenizer,
        kind=recipe.data.tokenizer,
        transform=transform_of(recipe),
        cross_words=recipe.data.cross_words,
    )


def build_data_folder(
    inputs: list[Path],
    out: Path,
    options: BuildOptions,
    progress: Progress = SILENT,
    overwrite: bool = False,
) -> dict[str, Any]:
    """Text files -> data folder; returns its manifest. An old one is kept unless `overwrite`."""
    with progress.task("data", 1) as task:

        def on_progress(stage: str, num_documents: int) -> None:
            task.update(0, f"{stage}: {num_documents:,} documents")

        manifest = build_data(inputs, out, options, on_progress, overwrite)
        task.update(1, f"{manifest['train']['tokens']:,} training tokens")
    if options.drop_near is None:
        _note_near_copies(out, options.workers, progress)
    return manifest


def _note_near_copies(folder: Path, workers: int, progress: Progress) -> None:
    """One line if held-out text has copies, or if there is too much training text to look."""
    data = load_data(folder, verify=False)
    num_bytes = data.train.num_bytes
    if num_bytes > MOST_SEARCHED_BYTES:
        progress.note(
            f"not looked for near duplicates in {num_bytes / 1e6:,.0f} MB: 'underpar data audit "
            f"{folder}' does"
        )
        return
    copied, _ = find_copies(data, min(workers, workers_for(num_bytes)))
    if copied := copied | repeated_documents(data):
        progress.note(
            f"{len(copied)} of {data.val.num_documents} held-out documents nearly repeat training "
            "text or each other, which an audit counts against a score: --drop-near 0.7 leaves "
            "copies out"
        )


def audit_data(folder: Path, settings: NearSettings, progress: Progress = SILENT) -> dict[str, Any]:
    """Exact and near duplicates between the splits of a data folder, with a verdict."""
    data = load_data(folder, refuse_shared=False)
    with progress.task("audit", data.train.num_documents) as task:

        def on_progress(done: int, total: int) -> None:
            task.update(done, f"{done:,} training documents")

        workers = workers_for(data.train.num_bytes)
        result = audit_duplicates(
            data.train, data.val, data.tokenizer.decode, settings, on_progress, workers
        )
    exact, near = result["exact"]["num_across"], result["near"]["num_pairs"]
    overlap = result["overlap"]["num_val_documents"]
    result["verdict"] = "fail" if exact or near else "pass"
    result["summary"] = (
        f"{exact} exact and {near} near duplicates across the splits; {overlap} held-out "
        f"documents share over {settings.threshold_containment:.0%} with training"
    )
    return result


def fetch_data(
    name: str, out: Path, options: FetchOptions, progress: Progress = SILENT
) -> FetchSummary:
    """Download a published set or a dataset repository."""
    with progress.task("fetch", 1) as task:

        def on_progress(path: str, done: int, total: int) -> None:
            task.update(done / max(total, 1), f"{done / 1e6:,.1f} of {total / 1e6:,.1f} MB, {path}")

        return fetch(name, out, options, on_progress)


def import_data(
    source: Path,
    out: Path,
    options: ImportOptions,
    progress: Progress = SILENT,
    overwrite: bool = False,
) -> dict[str, Any]:
    """Published token files -> data folder; returns its manifest."""
    with progress.task("import", 1) as task:

        def on_progress(split: str, num_documents: int) -> None:
            task.update(0, f"{split}: {num_documents:,} documents")

        manifest = import_published(source, out, options, on_progress, overwrite)
        task.update(1, f"{manifest['train']['tokens']:,} training tokens")
    return manifest
