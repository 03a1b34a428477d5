"""Curves of size against loss: a table, a plot, and how far one curve is from another.

If rounding errors are small, each additional byte per weight divides the gap to the unrounded
weights by a constant. So between two points, log2 of the gap is interpolated linearly in bytes.
"""

from __future__ import annotations

import io
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from underpar.errors import BenchError


@dataclass(frozen=True)
class Point:
    """One rounded model: its curve, its bytes, its loss."""

    curve: str
    factor: float
    """Factor on the published step widths."""
    parts: dict[str, int]
    """Bytes by part."""
    num_weights: int
    bpb: float
    gap_bpb: float
    """Bits per byte above the unrounded weights."""
    remark: str = ""
    round_seconds: float = 0.0
    count_seconds: float = 0.0

    @property
    def total_bytes(self) -> int:
        """Bytes of all parts."""
        return sum(self.parts.values())

    @property
    def bits_per_weight(self) -> float:
        """Bits of all parts divided by the number of weights."""
        return 8 * self.total_bytes / self.num_weights

    def as_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        more = {"total_bytes": self.total_bytes, "bits_per_weight": self.bits_per_weight}
        return {**asdict(self), **more}


def read_point(row: Mapping[str, Any]) -> Point:
    """The point that `Point.as_dict` wrote."""
    return Point(**{name: row[name] for name in Point.__dataclass_fields__})


@dataclass(frozen=True)
class Comparison:
    """A curve compared with one point of another; None if the curve does not reach it."""

    factor: float
    """The factor of the point."""
    bytes_ratio: float | None
    """The curve's bytes at the point's loss, divided by the point's bytes."""
    gap_ratio: float | None
    """The curve's gap at the point's bytes, divided by the point's gap."""


def compare(curve: Sequence[Point], base: Sequence[Point]) -> list[Comparison]:
    """A curve compared with every point of `base`, by size; points without a gap are left out."""
    usable = [p for p in curve if p.gap_bpb > 0]
    sizes = [float(p.total_bytes) for p in usable]
    gaps = [math.log2(p.gap_bpb) for p in usable]
    comparisons = []
    for point in sorted(base, key=lambda p: p.total_bytes):
        if point.gap_bpb <= 0:
            continue
        gap = math.log2(point.gap_bpb)
        size_there = interpolate(gap, gaps, sizes)
        gap_there = interpolate(point.total_bytes, sizes, gaps)
        comparisons.append(
            Comparison(
                point.factor,
                None if size_there is None else size_there / point.total_bytes,
                None if gap_there is None else 2 ** (gap_there - gap),
            )
        )
    return comparisons


def interpolate(x: float, xs: Sequence[float], ys: Sequence[float]) -> float | None:
    """y at x, linear between points in any order; None outside of the points."""
    if not xs or not min(xs) <= x <= max(xs):
        return None
    order = np.argsort(xs)
    return float(np.interp(x, np.asarray(xs)[order], np.asarray(ys)[order]))


def group_points(points: Sequence[Point]) -> dict[str, list[Point]]:
    """Curve -> its points from small to large; curves sorted by name."""
    names = sorted({p.curve for p in points})
    by_size = sorted(points, key=lambda p: p.total_bytes)
    return {name: [p for p in by_size if p.curve == name] for name in names}


def write_table(points: Sequence[Point], titles: Mapping[str, str], base: str, bpb: float) -> str:
    """All points, and all curves compared with `base`, in Markdown.

    `bpb` is that of the unrounded weights.
    """
    curves = group_points(points)
    lines = [
        f"Before rounding: {bpb:.5f} BPB. Gaps are above it, in thousandths of a bit per byte.",
        "",
        "| curve | what | steps x | bytes | bits a weight | BPB | gap | symbols | the rest |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for name, curve in curves.items():
        for p in curve:
            symbols = p.parts["symbols"]
            lines.append(
                f"| {name} | {titles[name]} | {p.factor:g} | {p.total_bytes:,} | "
                f"{p.bits_per_weight:.3f} | {p.bpb:.5f} | {1000 * p.gap_bpb:.2f} | {symbols:,} | "
                f"{p.total_bytes - symbols:,} |"
            )
    if base in curves:
        lines += ["", *_write_comparisons(curves, titles, base)]
    remarks = sorted({f"({p.curve}) x {p.factor:g}: {p.remark}" for p in points if p.curve == base})
    return "\n".join([*lines, "", *remarks]) + "\n"


def _write_comparisons(
    curves: Mapping[str, Sequence[Point]], titles: Mapping[str, str], base: str
) -> list[str]:
    factors = [f"x {p.factor:g}" for p in curves[base]]
    rules = "|---" * (2 + len(factors)) + "|"
    lines = []
    for title, key in (
        (f"Bytes at the loss of ({base}), relative to it", "bytes_ratio"),
        (f"Gap at the bytes of ({base}), relative to it", "gap_ratio"),
    ):
        lines += [f"{title}:", "", f"| curve | what | {' | '.join(factors)} |", rules]
        for name, curve in curves.items():
            ratios = {c.factor: getattr(c, key) for c in compare(curve, curves[base])}
            cells = [ratios.get(p.factor) for p in curves[base]]
            texts = " | ".join("-" if c is None else f"{c:.3f}" for c in cells)
            lines.append(f"| {name} | {titles[name]} | {texts} |")
        lines.append("")
    return lines[:-1]


def draw_plot(points: Sequence[Point], titles: Mapping[str, str]) -> str:
    """The gap over bytes as an SVG, a line per curve."""
    try:
        from matplotlib.backends.backend_svg import FigureCanvasSVG
        from matplotlib.figure import Figure
    except ImportError as error:
        raise BenchError("a plot needs the package matplotlib (pip install matplotlib)") from error
    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.add_subplot()
    for name, curve in group_points(points).items():
        drawn = [p for p in curve if p.gap_bpb > 0]
        sizes = [p.total_bytes / 1e6 for p in drawn]
        gaps = [1000 * p.gap_bpb for p in drawn]
        axes.plot(sizes, gaps, marker="o", label=f"({name}) {titles[name]}")
    axes.set_yscale("log", base=2)
    axes.set_xlabel("bytes, millions")
    axes.set_ylabel("gap to unrounded weights, mBPB")
    axes.grid(alpha=0.3)
    axes.legend(fontsize="small")
    page = io.StringIO()
    FigureCanvasSVG(figure).print_svg(page, metadata={"Date": None})
    return page.getvalue()
