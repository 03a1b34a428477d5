"""Charts: ticks, scales, and SVG that any XML reader takes."""

from __future__ import annotations

import math
from xml.etree import ElementTree as ET

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from underpar.report import charts
from underpar.report.charts import Bar, Dot, Labels, Line, Mark, Scale, Segment

LABELS = Labels("step", "loss")
ANY_FLOAT = st.floats(allow_nan=True, allow_infinity=True)


def find(svg: str, tag: str, kind: str = "") -> list[ET.Element]:
    """Elements of a chart by tag and first class."""
    elements = ET.fromstring(svg).iter(tag)
    return [e for e in elements if not kind or e.get("class", "").split()[:1] == [kind]]


def tips(svg: str) -> list[str]:
    """The numbers that points show when they are pointed at or tapped."""
    return [" ".join(e.itertext()) for e in find(svg, "text", "tip")]


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [
        (0, 10, [0, 2, 4, 6, 8, 10]),
        (4.6, 6.9, [5.0, 5.5, 6.0, 6.5]),
        (-1, 1, [-1, -0.5, 0, 0.5, 1]),
        (0, 323_584, [0, 100_000, 200_000, 300_000]),
    ],
)
def test_ticks_are_round(low: float, high: float, expected: list[float]) -> None:
    assert charts.nice_ticks(Scale(low, high)) == pytest.approx(expected)


@settings(deadline=None, max_examples=200)
@given(st.lists(ANY_FLOAT, max_size=6))
def test_any_values_have_a_scale_with_few_ticks(values: list[float]) -> None:
    scale = charts.scale_of(values)
    assert scale.low < scale.high
    ticks = charts.nice_ticks(scale)
    assert len(ticks) <= 7
    assert all(scale.low <= v <= scale.high for v in values if charts.can_plot(v))
    slack = 1e-6 * (scale.high - scale.low)
    assert all(scale.low - slack <= tick <= scale.high + slack for tick in ticks)


@pytest.mark.parametrize(
    ("value", "step", "expected"),
    [
        (0.0, 1e6, "0"),
        (0.5, 0.1, "0.5"),
        (5.25, 0.05, "5.25"),
        (4000, 1000, "4,000"),
        (200_000, 100_000, "0.2M"),
        (3e9, 1e9, "3G"),
    ],
)
def test_tick_text(value: float, step: float, expected: str) -> None:
    assert charts.tick_text(value, step) == expected


def test_thin_keeps_both_ends_and_the_limit() -> None:
    assert charts.thin(range(5), 10) == [0, 1, 2, 3, 4]
    thinned = charts.thin(range(1000), 11)
    assert (len(thinned), thinned[0], thinned[-1]) == (11, 0, 999)


def test_smooth_has_no_start_up_bias_and_keeps_gaps() -> None:
    means = charts.smooth([3.0, 3.0, math.nan, 3.0], horizon=10)
    assert [means[0], means[1], means[3]] == pytest.approx([3, 3, 3])
    assert math.isnan(means[2])
    assert charts.smooth([1.0, 5.0], horizon=1) == [1.0, 5.0]


def test_a_gap_breaks_the_line_and_a_lone_point_is_a_dot() -> None:
    points = [(1.0, 2.0), (2.0, 3.0), (3.0, math.nan), (4.0, 2.5), (5.0, math.inf)]
    lines = find(charts.line_chart([Line(points)], LABELS), "polyline")
    assert [len(line.get("points", "").split()) for line in lines] == [2, 2]
    assert len(set(lines[1].get("points", "").split())) == 1


def test_outliers_of_a_faint_line_do_not_set_the_scale() -> None:
    bold = Line([(float(i), 2.0 + i / 100) for i in range(100)])
    spiked = Line([(float(i), 1e6 if i == 50 else 2.5) for i in range(1000)], faint=True)
    texts = [t.text for t in find(charts.line_chart([bold, spiked], LABELS), "text", "y-tick")]
    assert texts[0] == "2.0" and float(str(texts[-1])) <= 3.2


def test_hover_strips_cover_the_width_once() -> None:
    hovers = [(1.0, "one"), (2.0, "two"), (4.0, "four")]
    svg = charts.line_chart([Line([(1.0, 1.0), (4.0, 2.0)])], LABELS, hovers)
    strips = find(svg, "rect", "strip")
    widths = [float(str(s.get("width")).rstrip("%")) for s in strips]
    assert sum(widths) == pytest.approx(100, abs=0.01)
    assert tips(svg) == ["one", "two", "four"]


def test_dots_without_a_place_are_left_out() -> None:
    dots = [Dot(1, 2.0, "a"), Dot(2, math.nan, "b"), Dot(3, 1e300, "c"), Dot(4, 2.5, "d", color=1)]
    svg = charts.dot_plot(dots, LABELS, [Mark(2.2, "mean"), Mark(math.nan, "none")])
    assert tips(svg) == ["a", "d"]
    assert [e.text for e in find(svg, "text", "mark-label")] == ["mean"]


def test_labels_of_close_marks_do_not_overlap() -> None:
    svg = charts.dot_plot(
        [Dot(1, 0.0, ""), Dot(2, 10.0, "")], LABELS, [Mark(5, "a"), Mark(5.01, "b")]
    )
    places = [float(str(e.get("y"))) for e in find(svg, "text", "mark-label")]
    assert places[0] - places[1] >= 15


def test_bars_share_one_scale_and_stack() -> None:
    bars = [
        Bar("long", "8 s", [Segment(6, "six"), Segment(2, "two", color=1)]),
        Bar("odd", "none", [Segment(-1, "negative"), Segment(math.nan, "nan")]),
    ]
    rects = find(charts.bar_chart(bars, maximum=16), "rect", "bar")
    assert [r.get("x") for r in rects] == ["0.000%", "37.500%", "0.000%", "0.000%"]
    assert [r.get("width") for r in rects] == ["37.500%", "12.500%", "0.000%", "0.000%"]
    assert charts.bar_chart([]) and charts.bar_chart([Bar("zero", "0", [Segment(0, "")])])


@settings(deadline=None, max_examples=60)
@given(st.text(), st.lists(st.tuples(ANY_FLOAT, ANY_FLOAT), max_size=5))
def test_any_text_and_numbers_make_well_formed_svg(
    text: str, points: list[tuple[float, float]]
) -> None:
    labels = Labels(text, text)
    hovers = [(x, text) for x, _ in points if charts.can_plot(x)]
    drawn = [
        charts.line_chart([Line(points), Line(points, 7, faint=True)], labels, hovers),
        charts.line_chart(
            [Line(points)],
            labels,
            dots=[Dot(x, y, text) for x, y in points],
            marks=[Mark(y, text) for _, y in points],
        ),
        charts.dot_plot([Dot(x, y, text) for x, y in points], labels, [Mark(1.0, text)]),
        charts.bar_chart([Bar(text, text, [Segment(x, text) for x, _ in points])]),
    ]
    for svg in drawn:
        values = [v for element in ET.fromstring(svg).iter() for v in element.attrib.values()]
        assert not [v for v in values if "nan" in v or "inf" in v]


def test_markup_in_text_stays_text() -> None:
    hostile = "</title><script>alert(1)</script>\x00\ud800"
    svg = charts.bar_chart([Bar(hostile, "1", [Segment(1, hostile)])])
    assert "<script" not in svg
    assert find(svg, "text", "label")[0].text == "</title><script>alert(1)</script>\ufffd\ufffd"


def test_a_point_can_be_tapped_and_shows_its_lines() -> None:
    svg = charts.line_chart(
        [Line([(1.0, 1.0), (4.0, 2.0)])],
        LABELS,
        [(1.0, "step 1\nloss 1")],
        dots=[Dot(4, 3.0, "held-out", 1), Dot(5, math.nan, "none")],
        marks=[Mark(2.5, "xz"), Mark(math.inf, "none")],
    )
    assert tips(svg) == ["step 1 loss 1", "held-out"]
    # A tap gives the focus, so each has a place for it; the tabulator key passes them by.
    assert [spot.get("tabindex") for spot in find(svg, "g", "spot")] == ["-1", "-1"]
    assert [e.text for e in find(svg, "text", "mark-label")] == ["xz"]
    # The scale holds the points and the marks too.
    assert float(str(find(svg, "text", "y-tick")[-1].text)) >= 3


def test_more_lines_than_colors_are_dashed() -> None:
    names = [charts.color_of(number) for number in range(2 * charts.NUM_COLORS)]
    assert len(set(names)) == len(names)
    lines = [Line([(0.0, float(i)), (1.0, float(i))], i) for i in range(8)]
    assert len(find(charts.line_chart(lines, LABELS), "polyline")) == 8


def test_a_long_label_has_a_line_of_its_own() -> None:
    short, long = Bar("a", "1 byte", []), Bar("a" * 30, "468,346 bytes, 55 %", [])
    labels, values = (find(charts.bar_chart([long, short]), "text", k) for k in ("label", "value"))
    places = [
        (float(str(a.get("y"))), float(str(b.get("y"))))
        for a, b in zip(labels, values, strict=True)
    ]
    assert places[0][1] - places[0][0] > 15 and places[1][0] == places[1][1]
    assert places[1][0] - places[0][1] == 40
