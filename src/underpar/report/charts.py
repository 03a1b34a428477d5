"""Small SVG charts as text. They need no script and take their colors from the page.

Numbers at a point are a text inside the chart, which the page shows while the point is pointed at
or, on a touch screen, after it was tapped.

Horizontal positions are shares of the width, vertical ones are pixels: a chart fits any screen
width, and its letters keep their size. Labels lie outside the frame, so the page needs a margin.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TypeVar
from xml.etree import ElementTree as ET

import numpy as np

from underpar.core.words import LARGEST_VALUE

Point = tuple[float, float]
# A position along x, and the tooltip there.
Hover = tuple[float, str]
T = TypeVar("T")

NUM_COLORS = 6
# With more dots than this, dots are drawn small.
CROWD = 250
# Characters of 13 pixels that fit beside each other on a screen of 390 pixels.
PHONE_CHARACTERS = 44
# Characters that XML does not allow, including lone surrogates.
FORBIDDEN = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


@dataclass(frozen=True)
class Line:
    """A curve. A faint curve is drawn first, and its outliers do not change the scale."""

    points: Sequence[Point]
    color: int = 0
    faint: bool = False


@dataclass(frozen=True)
class Dot:
    """A point with a tooltip."""

    x: float
    y: float
    title: str
    color: int = 0


@dataclass(frozen=True)
class Mark:
    """A horizontal line with a label."""

    y: float
    label: str


@dataclass(frozen=True)
class Segment:
    """A part of a bar, with a tooltip."""

    value: float
    title: str
    color: int = 0


@dataclass(frozen=True)
class Bar:
    """A bar: its label, its value in words, and its segments from left to right."""

    label: str
    value_text: str
    segments: Sequence[Segment]


@dataclass(frozen=True)
class Labels:
    """The labels of the axes."""

    x: str
    y: str


@dataclass(frozen=True)
class Scale:
    """The interval of values that an axis covers."""

    low: float
    high: float

    def share(self, value: float) -> float:
        """The position of `value`: 0 at the low end, 1 at the high end."""
        return (value - self.low) / (self.high - self.low)


def can_plot(value: float) -> bool:
    """Whether a value is finite and not too large for an axis."""
    return math.isfinite(value) and abs(value) <= LARGEST_VALUE


def scale_of(values: Sequence[float]) -> Scale:
    """The interval of all values that can be plotted; its width is never 0."""
    kept = [v for v in values if can_plot(v)] or [0.0, 1.0]
    low, high = min(kept), max(kept)
    least = 1e-9 * max(1.0, abs(low), abs(high))
    return Scale(low, high) if high - low > least else Scale(low - 0.5 * least, high + 0.5 * least)


def widen(scale: Scale, height: int) -> Scale:
    """The scale, extended to whole ticks of a chart of this height."""
    step = tick_step(scale, num_rows(height))
    low, high = math.floor(scale.low / step) * step, math.ceil(scale.high / step) * step
    return Scale(min(low, scale.low), max(high, scale.high))


def tick_step(scale: Scale, num_ticks: int = 6) -> float:
    """The smallest step of 1, 2 or 5 times a power of ten with at most `num_ticks` intervals."""
    rough = (scale.high - scale.low) / num_ticks
    power = 10.0 ** math.floor(math.log10(rough))
    return next(m * power for m in (1, 2, 5, 10) if m * power >= rough * (1 - 1e-9))


def nice_ticks(scale: Scale, num_ticks: int = 6) -> list[float]:
    """Round values within the scale, at most `num_ticks` + 1 of them."""
    step = tick_step(scale, num_ticks)
    first, last = math.ceil(scale.low / step - 1e-6), math.floor(scale.high / step + 1e-6)
    return [i * step for i in range(first, last + 1)]


def num_rows(height: int) -> int:
    """How many intervals between grid lines fit into a chart of this height."""
    return max(2, height // 50)


def tick_text(value: float, step: float) -> str:
    """The text of a tick, with the digits that its step needs; M and G for large numbers."""
    for unit, suffix in ((1e9, "G"), (1e6, "M")):
        if value and step >= unit / 10:
            return f"{value / unit:,.{_decimals(step / unit)}f}{suffix}"
    return f"{value:,.{_decimals(step)}f}" if value else "0"


def _decimals(step: float) -> int:
    return min(12, max(0, -math.floor(math.log10(step) + 1e-9)))


def thin(items: Sequence[T], limit: int) -> list[T]:
    """At most `limit` items, evenly spaced, with the first and the last one."""
    if len(items) <= limit:
        return list(items)
    return [items[i] for i in np.linspace(0, len(items) - 1, limit).astype(int)]


def smooth(values: Sequence[float], horizon: float) -> list[float]:
    """Exponential mean over about `horizon` values, without bias at the start.

    Values that cannot be plotted give NaN and do not change the mean.
    """
    keep = 1 - 1 / max(horizon, 1.0)
    total = weight = 0.0
    means = []
    for value in values:
        if can_plot(value):
            total, weight = keep * total + value, keep * weight + 1
            means.append(total / weight)
        else:
            means.append(math.nan)
    return means


def line_chart(
    lines: Sequence[Line],
    labels: Labels,
    hovers: Sequence[Hover] = (),
    height: int = 260,
    dots: Sequence[Dot] = (),
    marks: Sequence[Mark] = (),
) -> str:
    """Curves over a common x, with tooltips along x, points on top, and horizontal marks."""
    dots = [dot for dot in dots if can_plot(dot.x) and can_plot(dot.y)]
    marks = [mark for mark in marks if can_plot(mark.y)]
    x_scale = scale_of([x for line in lines for x, _ in line.points] + [dot.x for dot in dots])
    levels = [y for line in lines for y in _levels(line)]
    levels += [dot.y for dot in dots] + [mark.y for mark in marks]
    y_scale = widen(scale_of(levels), height)
    chart = _frame(x_scale, y_scale, labels, height)
    # An inner view, stretched to the width of the chart. It clips outliers at its edge.
    view = _add(chart, "svg", viewBox=f"0 0 1000 {height}", preserveAspectRatio="none")
    view.attrib |= {"width": "100%", "height": str(height)}
    for line in sorted(lines, key=lambda line: not line.faint):
        for run in _unbroken(line.points):
            places = [(1000 * x_scale.share(x), height * (1 - y_scale.share(y))) for x, y in run]
            _add(
                view,
                "polyline",
                points=" ".join(f"{x:.1f},{y:.1f}" for x, y in places),
                class_=f"{'faint' if line.faint else 'bold'} {color_of(line.color)}",
            )
    _add_marks(chart, marks, y_scale, height)
    _add_hovers(chart, x_scale, hovers, height)
    for dot in dots:
        _add_dot(chart, dot, x_scale, y_scale, height, False, TIP_RIGHT)
    return _text(chart)


def color_of(number: int) -> str:
    """The class of a color; numbers beyond the last color have them again, dashed."""
    dashed = " again" if number >= NUM_COLORS else ""
    return f"c{number % NUM_COLORS}{dashed}"


def _levels(line: Line) -> list[float]:
    kept = [y for _, y in line.points if can_plot(y)]
    return np.quantile(kept, [0.01, 0.99]).tolist() if line.faint and kept else kept


def _unbroken(points: Sequence[Point]) -> Iterator[list[Point]]:
    run: list[Point] = []
    for x, y in [*points, (math.nan, math.nan)]:
        if can_plot(x) and can_plot(y):
            run.append((x, y))
        elif run:
            # A line of a single point is not drawn, a line from a point to itself is a dot.
            yield run if len(run) > 1 else run * 2
            run = []


def _add_hovers(chart: ET.Element, scale: Scale, hovers: Sequence[Hover], height: int) -> None:
    places = [scale.share(x) for x, _ in hovers]
    edges = [0.0, *((a + b) / 2 for a, b in pairwise(places)), 1.0]
    for (_, title), (left, right) in zip(hovers, pairwise(edges), strict=False):
        spot = _add_spot(chart)
        strip = _add(spot, "rect", class_="strip", y="0", height=str(height))
        strip.attrib |= {"x": _percent(left), "width": _percent(max(right - left, 0))}
        _add_tip(spot, title, TIP_RIGHT)


# Where the numbers of a point stand: in the corner that such charts leave empty.
TIP_LEFT, TIP_RIGHT = ("8", "start"), ("100%", "end")


def _add_spot(chart: ET.Element) -> ET.Element:
    """A group that can be pointed at, or tapped: the tap gives it the focus."""
    return _add(chart, "g", class_="spot", tabindex="-1")


def _add_tip(spot: ET.Element, text: str, corner: tuple[str, str]) -> None:
    x, anchor = corner
    tip = _add(spot, "text", class_="tip", x=x, y="12")
    tip.set("text-anchor", anchor)
    for row, line in enumerate(text.split("\n")):
        _add(tip, "tspan", line, x=x, dy="0" if row == 0 else "1.35em")


def dot_plot(
    dots: Sequence[Dot], labels: Labels, marks: Sequence[Mark] = (), height: int = 260
) -> str:
    """Dots with tooltips, and horizontal marks."""
    kept = [dot for dot in dots if can_plot(dot.x) and can_plot(dot.y)]
    levels = [mark for mark in marks if can_plot(mark.y)]
    crowded = len(kept) > CROWD
    x_scale = scale_of([dot.x for dot in kept])
    y_scale = widen(scale_of([dot.y for dot in kept] + [mark.y for mark in levels]), height)
    chart = _frame(x_scale, y_scale, labels, height)
    _add_marks(chart, levels, y_scale, height)
    for dot in kept:
        _add_dot(chart, dot, x_scale, y_scale, height, crowded, TIP_LEFT)
    return _text(chart)


def _add_dot(
    chart: ET.Element,
    dot: Dot,
    x_scale: Scale,
    y_scale: Scale,
    height: int,
    crowded: bool,
    corner: tuple[str, str],
) -> None:
    # Later series are rings, so that both stay visible if they agree.
    kind = "ring" if dot.color and not crowded else "dot"
    radius = "1.5" if crowded else "4.5" if kind == "ring" else "2.5"
    spot = _add_spot(chart)
    place = {"cx": _percent(x_scale.share(dot.x)), "cy": _pixels(dot.y, y_scale, height)}
    circle = _add(spot, "circle", class_=f"{kind} {color_of(dot.color)}", r=radius)
    circle.attrib |= place
    if kind == "dot" and not crowded:
        # A finger needs more room than a pointer.
        _add(spot, "circle", class_="strip", r="9").attrib |= place
    _add_tip(spot, dot.title, corner)


def _add_marks(chart: ET.Element, marks: Sequence[Mark], scale: Scale, height: int) -> None:
    free = float(height)
    for mark in sorted(marks, key=lambda mark: mark.y):
        y = _pixels(mark.y, scale, height)
        _add(chart, "line", class_="mark", x1="0", x2="100%", y1=y, y2=y)
        # The labels of close marks move upwards, so that they do not overlap.
        free = min(float(y) - 6, free - 15)
        _add(chart, "text", mark.label, class_="mark-label", x="6", y=f"{free:.1f}")


def bar_chart(bars: Sequence[Bar], maximum: float = 0.0) -> str:
    """Bars below each other on one scale, from 0 to the longest bar or to `maximum`."""
    totals = [sum(max(s.value, 0) for s in bar.segments if can_plot(s.value)) for bar in bars]
    longest = max([*totals, maximum]) or 1.0
    chart = ET.Element("svg", {"class": "chart"})
    top = 0
    for bar in bars:
        _add(chart, "text", bar.label, class_="label", x="0", y=str(top + 13))
        # Label and value share a line if a phone has room for both.
        if len(bar.label) + len(bar.value_text) > PHONE_CHARACTERS:
            top += 17
        _add(chart, "text", bar.value_text, class_="value", x="100%", y=str(top + 13))
        _add(chart, "rect", class_="track", y=str(top + 20), width="100%", height="8")
        left = 0.0
        for segment in bar.segments:
            width = max(segment.value, 0) / longest if can_plot(segment.value) else 0.0
            rect = _add(chart, "rect", class_=f"bar {color_of(segment.color)}", height="8")
            rect.attrib |= {"x": _percent(left), "y": str(top + 20), "width": _percent(width)}
            _add(rect, "title", segment.title)
            left += width
        top += 40
    chart.set("height", str(top))
    return _text(chart)


def _frame(x_scale: Scale, y_scale: Scale, labels: Labels, height: int) -> ET.Element:
    chart = ET.Element("svg", {"class": "chart framed", "height": str(height)})
    for value in nice_ticks(y_scale, num_rows(height)):
        y = _pixels(value, y_scale, height)
        _add(chart, "line", class_="grid", x1="0", x2="100%", y1=y, y2=y)
        text = tick_text(value, tick_step(y_scale, num_rows(height)))
        _add(chart, "text", text, class_="y-tick", x="-8", y=y, dy="0.32em")
    for value in nice_ticks(x_scale):
        text = tick_text(value, tick_step(x_scale))
        place = _percent(x_scale.share(value))
        _add(chart, "text", text, class_="x-tick", x=place, y=str(height + 18))
    _add(chart, "text", labels.y, class_="y-label", x="0", y="-12")
    _add(chart, "text", labels.x, class_="x-label", x="100%", y=str(height + 36))
    return chart


def _add(parent: ET.Element, tag: str, text: str = "", **attributes: str) -> ET.Element:
    # `class` is a keyword of Python, so callers write `class_`.
    child = ET.SubElement(parent, tag, {k.rstrip("_"): v for k, v in attributes.items()})
    if text:
        child.text = FORBIDDEN.sub("\ufffd", text)
    return child


def _percent(share: float) -> str:
    return f"{100 * share:.3f}%"


def _pixels(value: float, scale: Scale, height: int) -> str:
    return f"{height * (1 - scale.share(value)):.1f}"


def _text(chart: ET.Element) -> str:
    return ET.tostring(chart, encoding="unicode")
