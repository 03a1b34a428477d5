"""A run in one sentence, and several runs as Markdown for pasting."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from underpar.audit.finding import VERDICTS, verdict_text
from underpar.core.words import against_xz, bytes_text, count_text, percent_text, seconds_text
from underpar.errors import one_line
from underpar.report.facts import RunReport


def sentence(run: RunReport) -> str:
    """Recipe, date, device, size, result and verdict, as far as the run has come."""
    parts = [_trained(run)]
    if run.failure:
        return f"{parts[0]}; it failed: {run.failure.rstrip('.')}."
    if not run.is_trained:
        return f"{parts[0]}; it is not finished: still training, stopped or killed."
    if run.sizes:
        over = run.sizes.total_bytes > run.sizes.cap_bytes
        cap = bytes_text(run.sizes.cap_bytes)
        size = f"{run.sizes.total_bytes:,} of {cap}"
        parts.append(f"{size}, over the cap" if over else size)
    else:
        parts.append("not packed yet")
    parts.append(_scored(run))
    parts.append(audit_words(run))
    return f"{'; '.join(parts)}."


def _trained(run: RunReport) -> str:
    words = run.title
    if run.steps:
        last = run.steps[-1]
        words += f", {count_text(last.step, 'step')} in {seconds_text(last.seconds)}"
    about = dict(run.about)
    words += f" on {about['device']}" if "device" in about else ""
    return words + (f", {about['date']}" if "date" in about else "")


def _scored(run: RunReport) -> str:
    told = []
    for method, result in run.scores.items():
        c = result.comparison
        name = {"plain": "", "adapt": "adapting "}.get(method, f"with {method} ")
        told.append(f"{name}{against_xz(c.bpb / c.xz_bpb)} ({c.bpb:.4f} bits per byte)")
    words = ", ".join(told) or "not scored yet"
    stale = any(name.startswith("score-") for name in run.stale_files())
    return f"{words}, of another artifact" if stale else words


def audit_words(run: RunReport) -> str:
    """The verdict on a run, in words."""
    if run.audit is None:
        return "not audited yet"
    if "audit.json" in run.stale_files():
        return "its audit is of another artifact"
    if run.audit.verdict not in VERDICTS:
        return f"its audit is {run.audit.verdict}"
    pairs = [(finding.rule, finding.verdict) for finding in run.audit.findings]
    words = verdict_text(pairs, run.audit.verdict)
    return words if words.startswith("all") else f"audit: {words}"


def to_markdown(runs: Sequence[RunReport], version: str) -> str:
    """The page in short, for an issue or a chat."""
    blocks = [line for run in runs for line in _section(run)]
    return "\n".join([*blocks, f"underpar {plain(version)}", ""])


def _section(run: RunReport) -> Iterator[str]:
    yield f"## {plain(run.name)}\n"
    yield f"{plain(sentence(run))}\n"
    rows = list(_rows(run))
    if rows:
        yield "| what | result |\n|---|---|"
        yield from (f"| {plain(name)} | {plain(value)} |" for name, value in rows)
        yield ""
    if run.ancestry and run.ancestry.changes:
        yield f"| changed from `{plain(run.ancestry.base)}` | there | here |\n|---|---|---|"
        for change in run.ancestry.changes:
            cells = (change.name, change.base, change.here)
            yield "| " + " | ".join(plain(str(cell)) for cell in cells) + " |"
        yield ""


def _rows(run: RunReport) -> Iterator[tuple[str, str]]:
    results = list(run.scores.values())
    if results:
        c = results[0].comparison
        documents = count_text(len(results[0].score.entries), "document")
        yield "held-out text", f"{documents}, {bytes_text(c.text_bytes)}"
        yield "xz -9, all in one file", f"{c.xz_bpb:.4f} bits per byte"
    for method, result in run.scores.items():
        c = result.comparison
        yield method, f"{c.bpb:.4f} bits per byte, {against_xz(c.bpb / c.xz_bpb)}"
    if run.sizes:
        share = run.sizes.total_bytes / max(run.sizes.cap_bytes, 1)
        total = bytes_text(run.sizes.total_bytes)
        yield "artifact and code", f"{total}, {percent_text(share)} of the cap"
    if run.audit:
        yield "audit", audit_words(run)
    if run.recipe_hash:
        yield "recipe hash", run.recipe_hash


def plain(text: str) -> str:
    """Text that Markdown shows as it is: names come from files of anybody."""
    line = one_line(text, 2000)
    for character in "\\`*_[]<>|#&~":
        line = line.replace(character, f"\\{character}")
    return line
