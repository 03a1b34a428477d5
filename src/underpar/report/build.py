"""Run folders -> one HTML file, which opens from disk and needs no other file."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from underpar import __version__
from underpar.core.locks import lock_folder
from underpar.core.run_folder import RunFolder, write_atomic
from underpar.core.words import (
    bytes_text,
    change_text,
    count_text,
    number_text,
    percent_text,
    seconds_text,
)
from underpar.errors import RunError
from underpar.report import charts
from underpar.report.charts import Bar, Dot, Labels, Line, Mark, Segment
from underpar.report.excerpt import Texts, read_texts
from underpar.report.facts import RunReport, ScoreResult, Step
from underpar.report.gather import gather, show
from underpar.report.summary import sentence, to_markdown
from underpar.report.surprise import legend
from underpar.report.templates import fill
from underpar.score.ledger import Entry

# Most points of a curve, places with a tooltip, dots: more would only make the file larger.
MAX_POINTS, MAX_HOVERS, MAX_DOTS = 3000, 240, 1500
# Documents that are listed from either end.
NUM_EXTREMES = 3
# The last color of the page.
GREY = charts.NUM_COLORS - 1


@dataclass(frozen=True)
class Phase:
    """Seconds under a name. A name has one color in every stage; short phases are grey."""

    name: str
    seconds: float
    color: int


@dataclass(frozen=True)
class Stage:
    """The seconds of one stage, by phase."""

    name: str
    phases: tuple[Phase, ...]

    @property
    def seconds(self) -> float:
        """Seconds of all phases."""
        return sum(phase.seconds for phase in self.phases)


def build_report(folders: Sequence[RunFolder], out: Path, with_text: bool = True) -> Path:
    """Write the page of one run, or of several with a comparison first, to the file `out`.

    A file beside it, with the ending .md, has the same in short. For the excerpt `with_text`, the
    model computes for some seconds.
    """
    if not folders:
        raise RunError("no run to report on; give at least one run folder")
    if out.suffix == ".md":
        raise RunError(f"{out}: the page is HTML; the Markdown file is written beside it")
    if out.is_dir():
        raise RunError(f"{out} is a folder; give the name of a file, as in {out / 'report.html'}")
    with ExitStack() as locks:
        # A page outside of the runs only reads them, so a run that is training can have one.
        for folder in folders:
            if folder.path.resolve() == out.parent.resolve():
                locks.enter_context(lock_folder(folder.path))
        runs = [gather(folder) for folder in folders]
        # Strings of JSON may contain lone surrogates, which UTF-8 cannot encode.
        texts = [
            read_texts(folder, run) if with_text else Texts()
            for folder, run in zip(folders, runs, strict=True)
        ]
        write_atomic(out, render(runs, texts).encode(errors="replace"))
        short = to_markdown(runs, __version__)
        write_atomic(out.with_suffix(".md"), short.encode(errors="replace"))
    return out


def render(runs: Sequence[RunReport], texts: Sequence[Texts]) -> str:
    """The page as text."""
    return fill(
        "page.html.j2",
        FILTERS,
        {"plottable": charts.can_plot},
        runs=runs,
        texts=texts,
        legend=legend(),
        extremes=[extremes_of(run) for run in runs],
        figures=[draw(run, text.names) for run, text in zip(runs, texts, strict=True)],
        sentences=[sentence(run) for run in runs],
        clocks=[clock_of(run) for run in runs],
        overlay=overlay_chart(runs),
        same_data=len({s.data_identity for run in runs for s in run.scores.values()}) <= 1,
        horizon=horizon_of,
        unit=unit_of(runs)[0],
        units=[unit_of([run])[0] for run in runs],
        color=charts.color_of,
        grey=GREY,
        max_dots=MAX_DOTS,
        version=__version__,
    )


def draw(run: RunReport, names: Mapping[int, str]) -> dict[str, str]:
    """The charts of one run, by name; a chart without data is left out. `names`: of documents."""
    drawn: dict[str, str] = {}
    if run.steps:
        drawn |= {"loss": loss_chart(run), "rate": rate_chart(run.steps)}
    if run.sizes:
        total, cap = run.sizes.total_bytes, run.sizes.cap_bytes
        drawn["bytes"] = charts.bar_chart([byte_bar(*part, total) for part in run.sizes.parts])
        used = Segment(total, f"{total:,} bytes of {cap:,}", 0 if total <= cap else 1)
        label = f"{percent_text(total / cap)} of the cap" if cap else "no cap"
        room = f"{abs(cap - total):,} bytes {'left' if total <= cap else 'over'}"
        drawn["cap"] = charts.bar_chart([Bar(label, room, [used])], cap)
    if run.scores:
        drawn |= {"results": result_bars(run), "documents": document_chart(run.scores, names)}
    stages = clock_of(run)
    if stages:
        drawn["clock"] = charts.bar_chart([stage_bar(stage) for stage in stages])
    return drawn


def horizon_of(steps: Sequence[Step]) -> int:
    """How many logged steps the smoothed curve averages over."""
    return max(5, len(steps) // 100)


def unit_of(runs: Sequence[RunReport]) -> tuple[str, list[float]]:
    """The unit of training curves, and how many of it a nat per token is, run by run."""
    sizes = [run.bytes_per_token for run in runs if run.steps]
    if None in sizes:
        return "nats per token", [1.0] * len(runs)
    return "bits per byte", [
        1 / (math.log(2) * run.bytes_per_token) if run.bytes_per_token else 1.0 for run in runs
    ]


def loss_chart(run: RunReport) -> str:
    """The loss over steps, raw and smoothed, with held-out points and the final scores."""
    unit, [per_nat] = unit_of([run])
    steps = run.steps
    losses = [s.loss * per_nat for s in steps]
    means = charts.smooth(losses, horizon_of(steps))
    raw = [(float(s.step), loss) for s, loss in zip(steps, losses, strict=True)]
    smoothed = [(x, mean) for (x, _), mean in zip(raw, means, strict=True)]
    hovers = [
        (
            float(s.step),
            f"step {s.step:,}, {count_text(s.tokens, 'token')}, {seconds_text(s.seconds)}\n"
            f"{number_text(loss)} {unit}, smoothed {number_text(mean)}\n"
            f"loss {number_text(s.loss)} nats per token\n"
            f"learning rate \u00d7 {number_text(s.lr_scale)}",
        )
        for s, loss, mean in charts.thin(list(zip(steps, losses, means, strict=True)), MAX_HOVERS)
    ]
    lines = [
        Line(charts.thin(raw, MAX_POINTS), faint=True),
        Line(charts.thin(smoothed, MAX_POINTS)),
    ]
    labels = Labels("step", f"training text, {unit}")
    if unit != "bits per byte":
        return charts.line_chart(lines, labels, hovers)
    priced = [(s.step, s.held_out) for s in steps if s.held_out is not None]
    if run.final_bpb is not None and (not priced or priced[-1][0] < steps[-1].step):
        priced.append((steps[-1].step, run.final_bpb))
    dots = [
        Dot(step, bpb, f"held-out text after step {step:,}\n{number_text(bpb)} bits per byte", 1)
        for step, bpb in priced
    ]
    return charts.line_chart(lines, labels, hovers, dots=dots, marks=result_marks(run))


def result_marks(run: RunReport) -> list[Mark]:
    """The final scores of the packed model, and xz, as horizontal lines."""
    marks = [
        Mark(result.comparison.bpb, f"packed, {method} {number_text(result.comparison.bpb)}")
        for method, result in run.scores.items()
    ]
    rates = {result.comparison.xz_bpb for result in run.scores.values()}
    return marks + [Mark(rate, f"xz {number_text(rate)}") for rate in sorted(rates)]


def result_bars(run: RunReport) -> str:
    """Bits per byte of xz and of each score, as bars."""
    bars, seen = [], set()
    for color, (method, result) in enumerate(run.scores.items()):
        c = result.comparison
        if (c.text_bytes, c.xz_bytes) not in seen:
            seen.add((c.text_bytes, c.xz_bytes))
            text = f"{number_text(c.xz_bpb)} bits per byte"
            bars.append(Bar("xz -9", text, [Segment(c.xz_bpb, f"xz {text}", GREY)]))
        text = f"{number_text(c.bpb)} bits per byte, {change_text(c.bpb / c.xz_bpb)}"
        bars.append(Bar(method, text, [Segment(c.bpb, f"{method} {text}", color)]))
    return charts.bar_chart(bars)


def rate_chart(steps: Sequence[Step]) -> str:
    """The factor of the learning rates over steps."""
    points = [(float(s.step), s.lr_scale) for s in charts.thin(steps, MAX_POINTS)]
    # The axis begins at 0, because the area below the curve is read.
    floor = Line([(points[0][0], 0.0)], color=GREY, faint=True)
    labels = Labels("step", "learning rate, share of its peak")
    return charts.line_chart([floor, Line(points, color=GREY)], labels, height=72)


def overlay_chart(runs: Sequence[RunReport]) -> str:
    """Smoothed loss of every run over training tokens; empty without any training."""
    lines = []
    unit, per_nat = unit_of(runs)
    for color, (run, factor) in enumerate(zip(runs, per_nat, strict=True)):
        means = charts.smooth([s.loss * factor for s in run.steps], horizon_of(run.steps))
        points = [(float(s.tokens), mean) for s, mean in zip(run.steps, means, strict=True)]
        lines.append(Line(charts.thin(points, MAX_POINTS), color))
    labels = Labels("training tokens", f"training text, smoothed, {unit}")
    return charts.line_chart(lines, labels) if any(line.points for line in lines) else ""


def byte_bar(kind: str, num_bytes: float, total_bytes: int) -> Bar:
    """A class of bytes, with its share of the total."""
    text = f"{bytes_text(num_bytes)}, {percent_text(num_bytes / max(total_bytes, 1))}"
    return Bar(kind, text, [Segment(num_bytes, f"{kind}: {text}")])


def stage_bar(stage: Stage) -> Bar:
    """A stage as a bar, its phases one after the other, those without a color last."""
    segments = [
        Segment(p.seconds, f"{stage.name}, {p.name}: {seconds_text(p.seconds)}", p.color)
        for p in sorted(stage.phases, key=lambda p: p.color == GREY)
    ]
    return Bar(stage.name, seconds_text(stage.seconds), segments)


def extremes_of(run: RunReport) -> list[Entry]:
    """The cheapest and the dearest documents of the first score."""
    if not run.scores:
        return []
    result = next(iter(run.scores.values()))
    entries = [e for e in result.score.entries if e.num_bytes and charts.can_plot(e.bits)]
    entries.sort(key=lambda e: e.bits / e.num_bytes)
    return (
        entries
        if len(entries) <= 2 * NUM_EXTREMES
        else (entries[:NUM_EXTREMES] + entries[-NUM_EXTREMES:])
    )


def document_chart(scores: dict[str, ScoreResult], names: Mapping[int, str]) -> str:
    """Bits per byte of each document, sorted by the first method."""
    first = next(iter(scores.values()))
    entries = [e for e in first.score.entries if e.num_bytes and charts.can_plot(e.bits)]
    entries.sort(key=lambda e: e.bits / e.num_bytes)
    places = {e.document: place for place, e in enumerate(entries, start=1)}
    plotted = {e.document for e in charts.thin(entries, MAX_DOTS)}
    dots = []
    for color, (method, result) in enumerate(scores.items()):
        for e in result.score.entries:
            if e.document in plotted and e.num_bytes:
                bpb = e.bits / e.num_bytes
                dots.append(Dot(places[e.document], bpb, document_text(e, method, names), color))
    bpb, xz_bpb = first.comparison.bpb, first.comparison.xz_bpb
    marks = [
        Mark(bpb, f"{first.score.method}, all documents {number_text(bpb)}"),
        Mark(xz_bpb, f"xz {number_text(xz_bpb)}"),
    ]
    labels = Labels("documents, cheapest first", "bits per byte")
    return charts.dot_plot(dots, labels, marks, height=300)


def document_text(entry: Entry, method: str, names: Mapping[int, str]) -> str:
    """The tooltip of a document."""
    name = names.get(entry.document)
    return (
        f"document {entry.document:,}, {method}\n"
        + (f"{name}\n" if name else "")
        + f"{entry.num_bytes:,} bytes, {entry.bits:,.1f} bits\n"
        f"{entry.bits / entry.num_bytes:.4f} bits per byte"
    )


def clock_of(run: RunReport) -> list[Stage]:
    """The stages that have run, with their seconds."""
    times = {"train": [("train", run.steps[-1].seconds)]} if run.steps else {}
    for method, result in run.scores.items():
        times[f"score, {method}"] = list(result.score.seconds.items())
    if run.audit:
        times["audit"] = [(f.rule, f.seconds) for f in run.audit.findings]
    totals: dict[str, float] = {}
    for phases in times.values():
        for name, seconds in phases:
            totals[name] = totals.get(name, 0.0) + (seconds if charts.can_plot(seconds) else 0)
    # The longest phases have a color of their own, the others share the grey.
    longest = sorted(totals, key=lambda name: -totals[name])[:GREY]
    colors = {name: color for color, name in enumerate(longest)}
    return [
        Stage(stage, tuple(Phase(n, seconds, colors.get(n, GREY)) for n, seconds in phases))
        for stage, phases in times.items()
    ]


FILTERS: dict[str, Callable[..., Any]] = {
    "bpb": number_text,
    "fixed": number_text,
    "bytes": bytes_text,
    "show": show,
    "percent": percent_text,
    "change": change_text,
    "seconds": seconds_text,
}
