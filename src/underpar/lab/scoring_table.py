"""What each way to score gains and costs: one artifact, one text, one machine, a table.

    plain, sliding windows of several strides, per-document adapters in the published order and in
    the decodable one, then with the global phase, the n-gram tilt, and strengths that are learnt

Every row is `underpar score` with the options it names, run in one process after a warm-up, with
the verdict of the audit's probes for its order: whether tokens or lengths to come change a price.
Seconds are those of pricing and learning, without loading; each row says on what machine it was
made and when its process began. OUT gets scoring.json, with every row as
soon as it is measured, and scoring.md; a stopped run continues. With --no-probes verdicts are left
to another run with the same OUT, on any machine: it measures no row again.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from underpar.artifact.unpack import Artifact
from underpar.audit import order
from underpar.audit.probes import first_documents
from underpar.audit.rules import probe_size
from underpar.build.artifact import read_artifact
from underpar.build.scoring import ScoringRequest, open_method, run_method
from underpar.core.console import progress_bar
from underpar.core.run_folder import RunFolder, write_atomic, write_json
from underpar.core.runtime import Clock, Runtime, open_runtime
from underpar.core.versions import device_name, versions
from underpar.data.folder import load_data
from underpar.data.shards import Shard
from underpar.errors import UnderparError
from underpar.kernels.attention import backend_of
from underpar.score.method import PUBLISHED, Method

WARM_UP_DOCUMENTS = 4
# Phases that are not pricing: reading files, compiling.
APART = ("load", "warm-up")


@dataclass(frozen=True)
class Row:
    """A way to score and the settings of its levers."""

    title: str
    method: Method
    changes: tuple[str, ...] = ()


# Tokens of a forward pass.
PASS = ("score.batch_tokens=65536",)
# Groups of 24 documents, every chunk's window read again, ended documents decaying (PR 2014).
AS_PUBLISHED = (
    "levers.lora_ttt.lanes=24",
    "levers.lora_ttt.keys=fresh",
    "levers.lora_ttt.decay_all=true",
)
LORA = ("lora_ttt",)
GLOBAL = (*LORA, "phased_sgd")
LANES = ("levers.lora_ttt.lanes=256",)
# Said in each row, as an artifact's recipe may say otherwise.
FIXED, HEDGE = ("levers.tilt.strength=fixed",), ("levers.tilt.strength=hedge",)

ROWS = (
    Row("plain", Method(), PASS),
    *(Row(f"sliding, stride {n}", Method(stride=n), PASS) for n in (64, 512, 1024, 1536, 2048)),
    *(Row(f"flat, stride {n}", Method(stride=n, flat=True), PASS) for n in (64, 512, 1024)),
    Row("LoRA, published order", Method(LORA, order=PUBLISHED), AS_PUBLISHED),
    Row("LoRA, published order + global", Method(GLOBAL, order=PUBLISHED), AS_PUBLISHED),
    Row("LoRA, stream, fresh keys", Method(LORA, name="lora_ttt-fresh"), AS_PUBLISHED),
    Row("LoRA, stream", Method(LORA), LANES),
    Row("+ global", Method(GLOBAL), LANES),
    Row("+ tilt", Method((*GLOBAL, "tilt")), (*LANES, *FIXED)),
    Row("+ hedge", Method((*GLOBAL, "tilt"), name="hedge"), (*LANES, *HEDGE)),
    Row(
        "+ match and counts",
        Method((*GLOBAL, "tilt", "match", "counts"), name="experts"),
        (*LANES, *HEDGE),
    ),
)


@dataclass(frozen=True)
class Request:
    """What is scored, on what, which rows, and where results go."""

    artifact: Path
    data: Path
    out: Path
    rows: tuple[int, ...] = ()
    num_documents: int = 0
    device: str = "auto"
    has_probes: bool = True


def measure(request: Request) -> dict[str, Any]:
    """Measure the rows that OUT lacks; returns all that OUT/scoring.json then holds."""
    if unknown := [i for i in request.rows if not 0 <= i < len(ROWS)]:
        raise UnderparError(f"--rows {unknown[0]}: expected 0 to {len(ROWS) - 1}")
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
        if (record["artifact_sha256"], record["documents"]) != (identity, shard.num_documents):
            raise UnderparError(f"{path} is of another artifact or text; choose another --out")
    rows = {row["title"]: row for row in record["rows"]}
    chosen = [ROWS[i] for i in request.rows] if request.rows else list(ROWS)
    made = _made(runtime)
    # Libraries and kernels set themselves up.
    run_method(
        artifact, first_documents(shard, WARM_UP_DOCUMENTS), ScoringRequest(Method(), runtime)
    )
    with progress_bar("scoring", len(chosen)) as bar:
        for done, row in enumerate(chosen):
            bar.update(done, row.title)
            method, recipe = open_method(artifact.recipe, row.method, row.changes)
            own = replace(artifact, recipe=recipe)
            if row.title not in rows:
                found = measure_row(own, shard, ScoringRequest(method, runtime, Clock("load")))
                changes = {"method": asdict(row.method), "changes": list(row.changes)}
                rows[row.title] = {"title": row.title, **changes, **found, "made": made}
                record["rows"].append(rows[row.title])
                write_json(path, record)
            if request.has_probes and "later_tokens" not in rows[row.title]:
                rows[row.title] |= probe(own, shard, ScoringRequest(method, runtime.for_probes))
                write_json(path, record)
    return record


def _made(runtime: Runtime) -> dict[str, str]:
    """Where and when: rows of one process can be compared in time, others hardly."""
    return {
        "device": device_name(runtime.device),
        "attention": backend_of(runtime.device, runtime.dtype),
        **versions(),
        "began": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def measure_row(artifact: Artifact, shard: Shard, way: ScoringRequest) -> dict[str, Any]:
    """Score once."""
    score = run_method(artifact, shard, way)
    seconds = sum(value for phase, value in score.seconds.items() if phase not in APART)
    totals = [entry.num_targets for entry in score.entries]
    return {
        "bpb": score.bpb,
        "seconds": seconds,
        "tokens_per_second": score.num_targets / seconds,
        "phases": score.seconds,
        "order": score.order,
        "wrong_events": order.wrong_events(score, totals),
    }


def probe(artifact: Artifact, shard: Shard, way: ScoringRequest) -> dict[str, int]:
    """Prices that depend on what comes later."""

    def trace(short: Shard) -> list[order.Commit]:
        commits: list[order.Commit] = []
        own = replace(artifact, recipe=order.for_probes(artifact.recipe, short))
        run_method(own, short, replace(way, on_commit=lambda *c: commits.append(c)))
        return commits

    short = order.short_stream(shard, *probe_size(way.runtime.device))
    return {
        "later_tokens": order.later_tokens_matter(trace, short, artifact.recipe.model.vocab_size),
        "later_lengths": order.later_lengths_matter(trace, short),
    }


def verdict(row: Mapping[str, Any]) -> str:
    """In a word or two."""
    if "later_tokens" not in row:
        return "not probed"
    if row["later_tokens"] or row["wrong_events"]:
        return "fails: sees tokens"
    return "fails: knows lengths" if row["later_lengths"] else "passes"


def to_markdown(record: Mapping[str, Any]) -> str:
    """The rows as a table; gains are over the first."""
    lines = [
        "| method | BPB | gain, mBPB | seconds | tokens/s | order | audit |",
        "|---|---:|---:|---:|---:|---|---|",
    ]
    for row in record["rows"]:
        gain = 1000 * (record["rows"][0]["bpb"] - row["bpb"])
        lines.append(
            f"| {row['title']} | {row['bpb']:.5f} | {gain:.2f} | {row['seconds']:.1f} | "
            f"{row['tokens_per_second']:,.0f} | {row['order']} | {verdict(row)} |"
        )
    lines.append("")
    for made, titles in _processes(record["rows"]).items():
        lines.append(f"- {made}: {', '.join(titles)}")
    return "\n".join(lines) + "\n"


def _processes(rows: Sequence[Mapping[str, Any]]) -> dict[str, list[str]]:
    """On what, and the rows that one process measured there."""
    found: dict[str, list[str]] = {}
    for row in rows:
        said = "{device}, {attention}, torch {torch}, begun at {began}"
        # Files of before have rows that do not say.
        where = said.format(**row["made"]) if "made" in row else "not recorded"
        found.setdefault(where, []).append(row["title"])
    return found


def read_request(words: Sequence[str] | None = None) -> Request:
    """The command line, or `words`, as a request."""
    parser = argparse.ArgumentParser(
        prog="python -m underpar.lab.scoring_table",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("artifact", type=Path, help="a model.upar")
    parser.add_argument("--data", type=Path, required=True, help="a data folder")
    parser.add_argument("--out", type=Path, required=True, help="a folder for the results")
    listed = ", ".join(f"{i} {row.title}" for i, row in enumerate(ROWS))
    parser.add_argument("--rows", type=int, nargs="*", default=[], help=f"default: all of {listed}")
    documents = "held-out documents that are scored, the first ones; 0: all of them"
    parser.add_argument("--documents", type=int, default=0, help=documents)
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda or mps")
    parser.add_argument("--no-probes", action="store_true", help="leave verdicts to another run")
    found = parser.parse_args(words)
    paths, rows = (found.artifact, found.data, found.out), tuple(found.rows)
    return Request(*paths, rows, found.documents, found.device, not found.no_probes)


def main(words: Sequence[str] | None = None) -> int:
    """Measure, write and print; returns the exit code."""
    try:
        request = read_request(words)
        request.out.mkdir(parents=True, exist_ok=True)
        table = to_markdown(measure(request))
        write_atomic(request.out / "scoring.md", table)
        print(table)
    except (UnderparError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
