"""What a benchmark found: a sentence, a table in words and units, a plot of its quads."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from statistics import median
from typing import Any

from underpar.core.run_folder import write_atomic, write_json
from underpar.core.words import number_text, percent_text, seconds_text
from underpar.lab.bench import BenchResult
from underpar.report import charts
from underpar.report.charts import Dot, Labels, Mark
from underpar.report.drawing import stack_panels

KEYS = {"measured": "B against A", "control": "control: A against A"}


def sentence_of(result: BenchResult) -> str:
    """The verdict, with its interval."""
    if result.verdict == "refused":
        return f"No result. {result.reason[:1].upper()}{result.reason[1:]}."
    interval = result.mean_ratio_interval
    change, low, high = (
        f"{100 * (ratio - 1):+.2f}" for ratio in (result.mean_ratio, interval.low, interval.high)
    )
    told = f"{change} % time, 95 % interval {low} to {high} %"
    if result.verdict == "no difference shown":
        return f"No difference between A and B was shown: {told}."
    return f"B is {result.verdict} than A: {told}."


def rows_of(result: BenchResult, details: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Names and values in words; `details` are those of `StepResult`, or empty."""
    rows = [("work", result.what), ("A", result.label_a), ("B", result.label_b)]
    for letter, side in details.get("sides", {}).items():
        told = f"{side['step_ms']:,.2f} ms, {side['tokens_per_second']:,.0f} tokens/s"
        told += f", MFU {percent_text(side['mfu'])}" if side.get("mfu") else ""
        told += f"; attention {side['attention']}, compile {side['compiled']}"
        rows.append((f"step of {letter}", told))
    if not details:
        rows += [
            (f"one call of {letter}", seconds_text(result.median_seconds(letter)))
            for letter in "AB"
        ]
    if result.measured is not None and result.control is not None:
        rows += [
            ("smallest effect that shows", _percent(result.measured.mde)),
            ("control, A against A", _percent(result.control.mean)),
        ]
    kept = f"{len(result.effects)} and {len(result.control_effects)} of the control"
    rows += [("quads kept", kept), ("calls per block", number_text(result.calls_per_block, 0))]
    rows += [(f"dropped quad {d.quad} ({d.series})", d.why) for d in result.dropped]
    rows += _clock_rows(result)
    for letter, errors in details.get("check", {}).get("errors", {}).items():
        told = ", ".join(f"{name} {error:.1e}" for name, error in errors.items())
        rows.append((f"relative errors of {letter}", told))
    if details:
        same = details["check"]["same_function"]
        rows.append(("same function", "yes, recipes and gradients agree" if same else "no"))
        rows.append(("processes on the device", str(details["processes"])))
    if details.get("memory_bytes"):
        rows.append(("peak memory", f"{details['memory_bytes'] / 1e9:.1f} GB"))
    return rows


def _percent(effect: float) -> str:
    return f"{100 * math.expm1(effect):+.2f} %"


def _clock_rows(result: BenchResult) -> list[tuple[str, str]]:
    """Clocks, power and temperature over all blocks, if they were read."""
    samples = [block.clocks for block in result.blocks if block.clocks]
    units = {
        "SM clock": ("sm_mhz", "MHz"),
        "memory clock": ("memory_mhz", "MHz"),
        "power": ("power_watts", "W"),
        "temperature": ("temperature_celsius", "degrees Celsius"),
    }
    rows = []
    for name, (field, unit) in units.items():
        values = [value for s in samples if (value := getattr(s, field)) is not None]
        if values:
            told = f"{min(values):,.0f} to {max(values):,.0f} {unit}, median {median(values):,.0f}"
            rows.append((name, told))
    return rows


def write_bench(out: Path, result: BenchResult, details: Mapping[str, Any]) -> None:
    """Write bench.json, bench.md and bench.svg into a folder."""
    out.mkdir(parents=True, exist_ok=True)
    write_json(out / "bench.json", result.as_dict() | dict(details))
    lines = [sentence_of(result), "", "| | |", "|---|---|"]
    lines += [f"| {name} | {value} |" for name, value in rows_of(result, details)]
    lines += ["", "![Effect of each quad](bench.svg)", ""]
    write_atomic(out / "bench.md", "\n".join(lines))
    write_atomic(out / "bench.svg", draw(result))


def draw(result: BenchResult) -> str:
    """An SVG file: the effect of every quad, measured and control, in percent of time."""
    dots = [
        Dot(number, 100 * math.expm1(effect), f"quad {number}: {_percent(effect)}", color)
        for color, effects in enumerate((result.effects, result.control_effects))
        for number, effect in enumerate(effects)
    ]
    labels = Labels("quad", "time of B over that of A, percent")
    panel = charts.dot_plot(dots, labels, [Mark(0.0, "no difference")])
    return stack_panels([panel], list(KEYS.values()))
