"""Seeds: runs of one recipe that differ in their seed -> a section of Markdown and a chart.

Every figure is read from the run folders. A dash stands for a figure that was not measured.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from statistics import fmean, median, stdev

from underpar.core.fields import Fields
from underpar.core.makers import again
from underpar.core.run_folder import RunFolder, write_atomic
from underpar.errors import RunError
from underpar.recipe import Recipe
from underpar.report import charts
from underpar.report.build import MAX_POINTS, horizon_of
from underpar.report.charts import Labels, Line, Point
from underpar.report.drawing import HEIGHT, stack_panels
from underpar.report.facts import RunReport
from underpar.report.gather import gather

MISSING = "-"
# A speed is the median of at least this many logged lines.
FEWEST_LINES = 3
# Curves begin at this share of the run: the high losses before it would set their scale.
FIRST_SHARE = 0.05

# Name of a column -> format of its numbers.
COLUMNS = {
    "live BPB": ",.5f",
    "averaged BPB": ",.5f",
    "quantized BPB": ",.5f",
    "adapted BPB": ",.5f",
    "steps": ",.0f",
    "tokens": ",.0f",
    "seconds": ",.1f",
    "tokens/s": ",.0f",
    "model.upar bytes": ",.0f",
    "bytes with code": ",.0f",
}

# Context (0: the recipe's, throughout) and millions of operations per token.
Kind = tuple[int, float]


@dataclass(frozen=True)
class Result:
    """What one run measured.

    `figures` maps columns to numbers and lacks the missing ones. `speeds` maps kinds of steps to
    tokens per second, in the order of training. `live` and `average` are held-out bits per byte
    over seconds.
    """

    run: RunReport
    recipe: Recipe
    about: Fields
    figures: dict[str, float]
    speeds: dict[Kind, float]
    live: tuple[Point, ...]
    average: tuple[Point, ...]

    @property
    def seed(self) -> int:
        """The seed, in which the runs differ."""
        return self.recipe.train.seed


def write_results(out: Path, folders: Sequence[RunFolder]) -> Path:
    """Write the section to `out`, and its chart beside it as .svg; returns the chart's path."""
    if not folders:
        raise RunError("no run to write about; give at least one run folder")
    if len({folder.path.resolve() for folder in folders}) < len(folders):
        raise RunError("a run is given twice, which would shrink the standard deviation; once each")
    chart = out.with_suffix(".svg")
    if chart == out:
        raise RunError(f"{out} is the name of the chart; give a Markdown file, as in results.md")
    results = sorted((read_result(folder) for folder in folders), key=lambda r: r.seed)
    require_one_recipe(results)
    write_atomic(chart, draw_curves(results))
    write_atomic(out, to_markdown(results, out.stem, chart.name))
    return chart


def read_result(folder: RunFolder) -> Result:
    """The figures of a finished run, whether packed and scored or not yet."""
    run, recipe = gather(folder), folder.read_recipe()
    about, end = map(folder.read_fields, (folder.about_file, folder.validation_file))
    refuse_others(folder, run, about.text("data_identity"))
    lines = [Fields(folder.metrics_file, line) for line in folder.metrics()]
    live, average = (
        (*_points(lines, key), *_points([end], last))
        for key, last in (("val_bpb", "live_bpb"), ("average_val_bpb", "average_bpb"))
    )
    return Result(run, recipe, about, _figures(run, end), _speeds(lines), live, average)


def refuse_others(folder: RunFolder, run: RunReport, data_identity: str) -> None:
    """Refuse result files of another artifact than the folder's, and scores of other data."""
    for name in run.stale_files():
        raise RunError(f"{folder.path / name} is of another artifact; {again(folder.path / name)}")
    for method, result in run.scores.items():
        if result.data_identity != data_identity:
            raise RunError(f"{folder.score_file(method)} is of other text; score on the run's data")


def _points(lines: Iterable[Fields], key: str) -> list[Point]:
    measured = [line for line in lines if line.values.get(key) is not None]
    return [(line.number("seconds"), line.number(key)) for line in measured]


def _figures(run: RunReport, end: Fields) -> dict[str, float]:
    tokens, seconds = end.count("tokens"), end.number("seconds")
    figures = {"live BPB": end.number("live_bpb"), "steps": end.count("step")}
    figures |= {"tokens": tokens, "seconds": seconds, "tokens/s": tokens / max(seconds, 1e-9)}
    if end.values.get("average_bpb") is not None:
        figures["averaged BPB"] = end.number("average_bpb")
    for method, name in (("plain", "quantized BPB"), ("adapt", "adapted BPB")):
        if method in run.scores:
            figures[name] = run.scores[method].score.bpb
    if run.sizes:
        figures["model.upar bytes"] = run.sizes.model_file_bytes
        figures["bytes with code"] = run.sizes.total_bytes
    return figures


def _speeds(lines: Sequence[Fields]) -> dict[Kind, float]:
    """Median tokens per second of each kind of step: context and operations per token."""
    start = Fields(Path(), {"flops": 0.0, "tokens": 0})
    groups: dict[Kind, list[float]] = {}
    for before, line in pairwise([start, *lines]):
        num_tokens = line.count("tokens") - before.count("tokens")
        flops = (line.number("flops") - before.number("flops")) / max(num_tokens, 1)
        context = line.count("context") if "context" in line.values else 0
        kind = (context, float(f"{flops / 1e6:.4g}"))
        groups.setdefault(kind, []).append(line.number("tokens_per_second"))
    # A line that spans a change of kind forms a kind of its own, with too few lines.
    return {kind: median(speeds) for kind, speeds in groups.items() if len(speeds) >= FEWEST_LINES}


def require_one_recipe(results: Sequence[Result]) -> None:
    """Refuse runs that differ in more than their seed: their mean would have no meaning."""
    first = results[0]
    for other in results[1:]:
        same = replace(other.recipe, train=replace(other.recipe.train, seed=first.seed))
        if same != first.recipe:
            raise RunError(
                f"{other.run.path} and {first.run.path} differ in more than train.seed; give runs "
                "of one recipe"
            )
        data = [r.about.text("data_identity") for r in (first, other)]
        if data[0] != data[1]:
            raise RunError(
                f"{other.run.path} was trained on data {data[1]}, {first.run.path} on {data[0]}; "
                "their bits per byte do not compare"
            )


def to_markdown(results: Sequence[Result], title: str, chart: str) -> str:
    """The section: a row per seed, mean and standard deviation, the chart, speeds."""
    first = results[0]
    devices = "; ".join(sorted({r.about.text("device") for r in results}))
    names = [name for name in COLUMNS if any(name in r.figures for r in results)]
    rows = [[str(r.seed), r.run.recipe_hash or MISSING, *_cells(names, r.figures)] for r in results]
    rows.append(["mean", "", *_cells(names, _over_seeds(results, fmean, 1))])
    rows.append(["standard deviation", "", *_cells(names, _over_seeds(results, stdev, 2))])
    parts = [
        f"## {title}",
        f"{len(results)} {'run' if len(results) == 1 else 'runs'} on {devices}; data "
        f"`{first.about.text('data_identity')}`.",
        table(["seed", "recipe", *names], rows),
        "BPB are bits per byte of all held-out documents, each alone and cut at "
        f"{first.recipe.model.context:,} tokens: live and averaged weights in the precision of "
        "training, the quantized ones as `underpar score` has them. Seconds are of the training "
        "clock, which stands still for compiling and validation.",
        f"![Training loss and held-out bits per byte over seconds of training]({chart})",
        "Above, smoothed training loss; below, held-out text, live weights faint where averaged "
        f"ones are bold. Both begin at {FIRST_SHARE:.0%} of the run.",
    ]
    speeds = _speed_rows(results)
    if speeds:
        seeds = [f"tokens/s, seed {r.seed}" for r in results]
        parts.append(table(["context", "M operations a token", *seeds], speeds))
    return "\n\n".join(parts) + "\n"


def _cells(names: Sequence[str], figures: dict[str, float]) -> list[str]:
    return [f"{figures[n]:{COLUMNS[n]}}" if n in figures else MISSING for n in names]


def _over_seeds(
    results: Sequence[Result], statistic: Callable[[list[float]], float], fewest: int
) -> dict[str, float]:
    """A statistic over the runs, of each figure that all runs have."""
    if len(results) < fewest:
        return {}
    shared = [name for name in COLUMNS if all(name in r.figures for r in results)]
    return {name: statistic([r.figures[name] for r in results]) for name in shared}


def _speed_rows(results: Sequence[Result]) -> list[list[str]]:
    kinds = dict.fromkeys(kind for r in results for kind in r.speeds)
    part = results[0].recipe.train
    usual = ", ".join(f"{context:,}" for context in part.contexts or (part.context,))
    return [
        [f"{context:,}" if context else usual, f"{flops:,.4g}"]
        + [f"{r.speeds[kind]:,.0f}" if kind in r.speeds else MISSING for r in results]
        for kind in kinds
        for context, flops in [kind]
    ]


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table of numbers."""
    lines = [head, ["---:"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def draw_curves(results: Sequence[Result]) -> str:
    """An SVG file: training loss above, held-out bits per byte below, a color per seed.

    The lower chart is left out if the runs were validated only at their end.
    """
    losses, prices = [], []
    for color, result in enumerate(results):
        steps = result.run.steps
        means = charts.smooth([s.loss for s in steps], horizon_of(steps))
        curve = [(s.seconds, mean) for s, mean in zip(steps, means, strict=True)]
        losses.append(Line(charts.thin(_late(curve), MAX_POINTS), color))
        prices.append(Line(_late(result.live), color, faint=bool(result.average)))
        prices.append(Line(_late(result.average), color))
    across = "seconds of training"
    labels = [Labels(across, "training loss, nats per token")]
    labels += [Labels(across, "held-out bits per byte")] if _is_curve(prices) else []
    panels = [
        charts.line_chart(lines, label, height=HEIGHT)
        for lines, label in zip((losses, prices), labels, strict=False)
    ]
    return stack_panels(panels, [f"seed {result.seed}" for result in results])


def _is_curve(lines: Sequence[Line]) -> bool:
    return any(len(line.points) > 1 for line in lines)


def _late(points: Sequence[Point]) -> list[Point]:
    end = max((x for x, _ in points), default=0.0)
    return [(x, y) for x, y in points if x >= FIRST_SHARE * end]
