"""Scoring table: what each way to score gains and costs, on one artifact, text and machine.

    plain, sliding windows of several strides, SGD on chunks of windows, per-document adapters in
    the published order and in the decodable one, then with the global phase, the n-gram tilt, and
    strengths that are learned

Every row is `underpar score` with the options that the row names, run in one process after a
warm-up, with the verdict of the audit's probes for its order: do later tokens or later lengths
change a price? Seconds are those of pricing and learning, without loading. Each row names the
machine that measured it and the time at which its process began. OUT gets scoring.json, with
every row as soon as it is measured, and scoring.md. A stopped run continues. The probes can be
left to another run with the same OUT, on any machine: that run measures no row again.

A file may name other rows: `adaptation.toml` has settings of adapters, `packing.toml` settings of
rounding, for which a run with weights and calibration is packed anew. Rows price the same
documents, so their gains are paired by document.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np

from underpar.artifact.unpack import Artifact
from underpar.audit import order
from underpar.audit.behaviour import probe_size
from underpar.audit.probes import FIRST_TEXT_ID, first_documents
from underpar.audit.traces import Commit, Experiment, for_probes, random_beginnings
from underpar.build.artifact import read_artifact
from underpar.build.recipe import quant_part
from underpar.build.scoring import ScoringRequest, open_method, run_method
from underpar.core.fields import Fields
from underpar.core.locks import lock_folder
from underpar.core.progress import SILENT, Progress
from underpar.core.run_folder import RunFolder, write_atomic, write_json
from underpar.core.runtime import Clock, Runtime, open_runtime
from underpar.core.stats import Interval, student_interval
from underpar.core.versions import device_name, versions
from underpar.data.folder import load_data
from underpar.data.shards import Shard
from underpar.errors import UnderparError
from underpar.kernels.attention import backend_of
from underpar.lab.results import into_page
from underpar.score.method import PUBLISHED, STREAM, Method
from underpar.stages.pack import pack_run

WARM_UP_DOCUMENTS = 4
# Files of a run that packing reads.
NEEDED_TO_PACK = (
    "recipe_file",
    "about_file",
    "weights_file",
    "calibration_file",
    "tokenizer_file",
)
# Phases that are not pricing: reading files, compiling.
APART = ("load", "warm-up")


@dataclass(frozen=True)
class Row:
    """A way to score, with the settings of its levers."""

    title: str
    method: Method
    changes: tuple[str, ...] = ()
    pack: tuple[str, ...] = ()
    """Changes of [quant] with which the run is packed anew."""


# Tokens of a forward pass.
PASS = ("score.batch_tokens=65536",)
# What the published order implies, in the order of the file: 24 documents side by side, the window
# of every chunk read again, ended documents decaying (PR 2014).
FRESH = (
    "levers.lora_ttt.lanes=24",
    "levers.lora_ttt.keys=fresh",
    "levers.lora_ttt.decay_all=true",
)
LORA = ("lora_ttt",)
GLOBAL = (*LORA, "phased_sgd")
LANES = ("levers.lora_ttt.lanes=256",)
# SGD that follows the stream: published chunks, and a rate that falls over all of them (PR 1894).
STREAM_SGD = {"stream_sgd": "SGD on all weights", "ttt_e2e": "SGD on the last MLPs"}
CHUNKS = (*PASS, "score.adapt_tokens=32768")
# Said in each row, as an artifact's recipe may say otherwise.
FIXED, HEDGE = ("levers.tilt.strength=fixed",), ("levers.tilt.strength=hedge",)

ROWS = (
    Row("plain", Method(), PASS),
    *(Row(f"sliding, stride {n}", Method(stride=n), PASS) for n in (64, 512, 1024, 1536, 2048)),
    *(Row(f"flat, stride {n}", Method(stride=n, flat=True), PASS) for n in (64, 512, 1024)),
    Row("LoRA, published order", Method(LORA, order=PUBLISHED)),
    Row("LoRA, published order + global", Method(GLOBAL, order=PUBLISHED)),
    Row("LoRA, stream, fresh keys", Method(LORA, name="lora_ttt-fresh"), FRESH),
    Row("LoRA, stream", Method(LORA), LANES),
    Row("+ global", Method(GLOBAL), LANES),
    Row("+ tilt", Method((*GLOBAL, "tilt")), (*LANES, *FIXED)),
    Row("+ hedge", Method((*GLOBAL, "tilt"), name="hedge"), (*LANES, *HEDGE)),
    Row(
        "+ match and counts",
        Method((*GLOBAL, "tilt", "match", "counts"), name="experts"),
        (*LANES, *HEDGE),
    ),
    *(
        Row(
            f"{title}, {'flat, ' if flat else ''}stride 64",
            Method((lever,), stride=64, flat=flat),
            (*CHUNKS, f"levers.{lever}.cosine=true"),
        )
        for lever, title in STREAM_SGD.items()
        for flat in (False, True)
    ),
)


@dataclass(frozen=True)
class Request:
    """Which artifact to score, on which text, which rows, and where the results go."""

    artifact: Path
    data: Path
    out: Path
    rows: tuple[int, ...] = ()
    num_documents: int = 0
    device: str = "auto"
    has_probes: bool = True
    file: Path | None = None
    """A TOML file of other rows."""


def read_rows(path: Path) -> tuple[Row, ...]:
    """The rows of a file: name -> levers, stride, flat, order, set, pack."""
    try:
        tables = tomllib.loads(path.read_text())
        return tuple(_row(name, **table) for name, table in tables.items())
    except (OSError, TypeError, ValueError) as error:
        raise UnderparError(f"{path} is no list of ways to score ({error!s:.200})") from error


def _row(
    title: str,
    set: Sequence[str] = (),
    pack: Sequence[str] = (),
    levers: Sequence[str] = (),
    stride: int = 0,
    flat: bool = False,
    order: str = STREAM,
) -> Row:
    for words in (set, pack, levers):
        if isinstance(words, str) or not all(isinstance(word, str) for word in words):
            raise ValueError(f'{title!r}: settings are text, in a list: ["levers.lora_ttt.rank=8"]')
    return Row(title, Method(tuple(levers), stride, flat, order), (*set,), (*pack,))


def measure(request: Request, progress: Progress = SILENT) -> dict[str, Any]:
    """Measure the rows that OUT/scoring.json lacks, write scoring.md; returns the record."""
    all_rows = read_rows(request.file) if request.file else ROWS
    if unknown := [i for i in request.rows if not 0 <= i < len(all_rows)]:
        raise UnderparError(f"--rows {unknown[0]}: expected 0 to {len(all_rows) - 1}")
    artifact, identity = read_artifact(request.artifact)
    shard = first_documents(load_data(request.data).val, request.num_documents)
    runtime = open_runtime(request.device)
    path = request.out / "scoring.json"
    record: dict[str, Any] = {
        "artifact_sha256": identity,
        "documents": shard.num_documents,
        "rows": [],
    }
    if path.exists():
        record = RunFolder(request.out).read_json(path)
        about = record.get("artifact_sha256"), record.get("documents")
        if about != (identity, shard.num_documents):
            raise UnderparError(f"{path} is of another artifact or text; choose another --out")
    rows = {row.text("title"): row.values for row in Fields(path, record).rows("rows")}
    chosen = [all_rows[i] for i in request.rows] if request.rows else list(all_rows)
    for row in chosen:
        # All settings are checked before any time is spent.
        open_method(artifact.recipe, row.method, row.changes)
        quant_part(RunFolder(request.artifact.parent), row.pack) if row.pack else None
    made = _made(runtime)
    # A warm-up: libraries and kernels initialize themselves.
    run_method(
        artifact, first_documents(shard, WARM_UP_DOCUMENTS), ScoringRequest(Method(), runtime)
    )
    with lock_folder(request.out, create=True), progress.task("scoring", len(chosen)) as task:
        for done, row in enumerate(chosen):
            task.update(done, row.title)
            if row.title in rows and (not request.has_probes or "later_tokens" in rows[row.title]):
                continue
            packed, num_bytes = artifact, 0
            if row.pack:
                packed, num_bytes = pack_anew(request, row, runtime)
            method, recipe = open_method(packed.recipe, row.method, row.changes)
            variant = replace(packed, recipe=recipe)
            if row.title not in rows:
                figures = measure_row(
                    variant, shard, ScoringRequest(method, runtime, Clock("load"))
                )
                how: dict[str, Any] = {"method": asdict(row.method), "changes": list(row.changes)}
                if row.pack:
                    how |= {"pack": list(row.pack), "bytes": num_bytes}
                rows[row.title] = {"title": row.title, **how, **figures, "made": made}
                record["rows"].append(rows[row.title])
                write_json(path, record)
            if request.has_probes and "later_tokens" not in rows[row.title]:
                rows[row.title] |= probe(variant, shard, ScoringRequest(method, runtime.for_probes))
                write_json(path, record)
    write_atomic(request.out / "scoring.md", to_markdown(record))
    return record


def pack_anew(request: Request, row: Row, runtime: Runtime) -> tuple[Artifact, int]:
    """The artifact of a run with other settings of [quant], and its bytes with code."""
    source = RunFolder(request.artifact.parent)
    part = quant_part(source, row.pack)
    name = "".join(c if c.isalnum() else "-" for c in row.title)
    folder = RunFolder(request.out / f"packed-{name}")
    folder.path.mkdir(parents=True, exist_ok=True)
    for name in NEEDED_TO_PACK:
        link, target = getattr(folder, name), getattr(source, name)
        if target.exists() and not link.exists():
            link.symlink_to(target.resolve())
    budget = pack_run(folder, part=part, runtime=runtime.for_float64)
    return read_artifact(folder.artifact_file)[0], budget.total_bytes


def _made(runtime: Runtime) -> dict[str, str]:
    """Device, versions and start time: only rows of one process can be compared in seconds."""
    return {
        "device": device_name(runtime.device),
        "attention": backend_of(runtime.device, runtime.dtype),
        **versions(),
        "began": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def measure_row(artifact: Artifact, shard: Shard, request: ScoringRequest) -> dict[str, Any]:
    """Score once; bits per byte, seconds, and events in a wrong order."""
    score = run_method(artifact, shard, request)
    seconds = sum(value for phase, value in score.seconds.items() if phase not in APART)
    totals = [entry.num_targets for entry in score.entries]
    return {
        "bpb": score.bpb,
        "ledger": [[round(entry.bits, 3), entry.num_bytes] for entry in score.entries],
        "seconds": seconds,
        "tokens_per_second": score.num_targets / seconds,
        "phases": score.seconds,
        "order": score.order,
        "wrong_events": order.wrong_events(score, totals),
    }


def probe(artifact: Artifact, shard: Shard, request: ScoringRequest) -> dict[str, int]:
    """How many prices depend on later tokens, and how many on the lengths of later documents."""

    def trace(short: Shard) -> list[Commit]:
        commits: list[Commit] = []
        recipe = for_probes(artifact.recipe, short, request.method.stride)
        run_method(
            replace(artifact, recipe=recipe),
            short,
            replace(request, on_commit=lambda *c: commits.append(c)),
        )
        return commits

    rng = np.random.default_rng()
    short = random_beginnings(shard, *probe_size(request.runtime.device), rng)
    alphabet = np.arange(FIRST_TEXT_ID, artifact.recipe.model.vocab_size)
    experiment = Experiment(trace, short, alphabet, rng)
    return {
        "later_tokens": experiment.later_tokens_matter(),
        "later_lengths": experiment.later_lengths_matter(),
    }


def verdict(row: Mapping[str, Any]) -> str:
    """The verdict of the probes on a row, in a few words."""
    if "later_tokens" not in row:
        return "not probed"
    if row["later_tokens"] or row["wrong_events"]:
        return "fails: sees tokens"
    return "fails: knows lengths" if row["later_lengths"] else "passes"


def to_markdown(record: Mapping[str, Any]) -> str:
    """The rows as a table; gains are relative to the first row."""
    lines = [
        "| method | BPB | gain, mBPB | seconds | tokens/s | order | audit |",
        "|---|---:|---:|---:|---:|---|---|",
    ]
    for row in record["rows"]:
        gain = f"{1000 * (record['rows'][0]['bpb'] - row['bpb']):.2f}"
        if interval := gain_interval(record["rows"][0], row):
            gain += f" ({1000 * interval.low:.2f} to {1000 * interval.high:.2f})"
        lines.append(
            f"| {row['title']} | {row['bpb']:.5f} | {gain} | {row['seconds']:.1f} | "
            f"{row['tokens_per_second']:,.0f} | {row['order']} | {verdict(row)} |"
        )
    lines.append("")
    for made, titles in _processes(record["rows"]).items():
        lines.append(f"- {made}: {', '.join(titles)}")
    return "\n".join(lines) + "\n"


def write_page(page: Path, file: Path | None, record: Mapping[str, Any]) -> None:
    """Put the table into a page, between lines that name the command and the file of its rows."""
    command = " ".join(["underpar lab scoring-table", *([file.stem] if file else [])])
    write_atomic(page, into_page(page, to_markdown(record), command))


def gain_interval(first: Mapping[str, Any], row: Mapping[str, Any]) -> Interval | None:
    """Where 95 % of the gains over the first row lie, if the documents are drawn again.

    The gain is a ratio of sums over documents; its spread is that of what each adds to it. None if
    a row has fewer than two documents, or is of a time when prices of documents were not kept.
    """
    if first is row or not all(len(r.get("ledger", ())) > 1 for r in (first, row)):
        return None
    (before, sizes), (after, _) = (np.array(r["ledger"], float).T for r in (first, row))
    saved = before - after
    gain = saved.sum() / sizes.sum()
    parts = gain + (saved - gain * sizes) * len(sizes) / sizes.sum()
    return student_interval(parts)


def _processes(rows: Sequence[Mapping[str, Any]]) -> dict[str, list[str]]:
    """Machine and start of each process -> the titles of the rows that it measured."""
    processes: dict[str, list[str]] = {}
    for row in rows:
        template = "{device}, {attention}, torch {torch}, begun at {began}"
        # Rows of older files do not name their machine.
        where = template.format(**row["made"]) if "made" in row else "not recorded"
        processes.setdefault(where, []).append(row["title"])
    return processes
