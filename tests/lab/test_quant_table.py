"""Size against loss: interpolation, one curve against another, the table, the plot."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from underpar.lab.quant_table import (
    Point,
    compare,
    draw_plot,
    group_points,
    interpolate,
    read_point,
    write_table,
)

TITLES = {"a": "one", "b": "two"}


def make_curve(name: str, sizes: list[int], halving: float, at_million: float) -> list[Point]:
    """Points whose gap halves every `halving` bytes."""
    return [
        Point(
            curve=name,
            factor=1.0 + i,
            parts={"symbols": size - 1000, "framing": 1000},
            num_weights=2_000_000,
            bpb=1.1,
            gap_bpb=at_million * 2 ** ((1e6 - size) / halving),
        )
        for i, size in enumerate(sizes)
    ]


BASE = make_curve("b", [900_000, 1_000_000, 1_100_000], 2e5, 0.008)


@settings(deadline=None, max_examples=50)
@given(st.floats(0.5, 0.98), st.floats(0.5, 2.0))
def test_curves_of_one_slope(bytes_ratio: float, gap_ratio: float) -> None:
    # A curve that is the base moved to the left, or down, says so at every point it reaches.
    wide = list(range(400_000, 1_200_001, 100_000))
    shifted = make_curve("a", wide, 2e5, 0.008 * gap_ratio)
    rows = compare(shifted, BASE)
    assert [c.factor for c in rows] == [1.0, 2.0, 3.0]
    assert [c.gap_ratio for c in rows] == pytest.approx([gap_ratio] * 3)
    moved = [replace(p, parts={"symbols": round(p.total_bytes * bytes_ratio)}) for p in BASE]
    assert [c.bytes_ratio for c in compare(moved, BASE)] == pytest.approx([bytes_ratio] * 3, 1e-5)


def test_a_curve_against_itself() -> None:
    for row in compare(BASE, BASE):
        assert (row.bytes_ratio, row.gap_ratio) == pytest.approx((1.0, 1.0))


def test_between_points_the_logarithm_is_straight() -> None:
    ends = [BASE[0], BASE[2]]
    middle = compare(ends, BASE)[1]
    assert (middle.bytes_ratio, middle.gap_ratio) == pytest.approx((1.0, 1.0))


def test_nothing_is_extrapolated() -> None:
    small = make_curve("a", [700_000, 800_000], 2e5, 0.004)
    rows = compare(small, BASE)
    # At 800 kB its gap is that of the base at 1 MB; nothing of the base is as small.
    assert [c.bytes_ratio for c in rows] == [pytest.approx(700 / 900), pytest.approx(0.8), None]
    assert [c.gap_ratio for c in rows] == [None, None, None]
    assert interpolate(1.0, [], []) is None


def test_points_without_a_gap_are_left_out() -> None:
    lucky = replace(BASE[1], gap_bpb=-0.001)
    assert [c.factor for c in compare(BASE, [BASE[0], lucky])] == [1.0]
    assert compare([lucky], BASE)[0].bytes_ratio is None


@given(
    st.lists(st.tuples(st.floats(-9, 9), st.floats(-9, 9)), min_size=1, unique_by=lambda p: p[0])
)
def test_interpolation_meets_its_points(points: list[tuple[float, float]]) -> None:
    xs, ys = zip(*points, strict=True)
    for x, y in points:
        assert interpolate(x, xs, ys) == pytest.approx(y)


def test_points_survive_json() -> None:
    point = replace(BASE[0], remark="why", round_seconds=1.5)
    row = point.as_dict()
    assert (row["total_bytes"], row["bits_per_weight"]) == (900_000, pytest.approx(3.6))
    assert read_point(row) == point


def test_points_by_curve_and_size() -> None:
    other = make_curve("a", [5000], 2e5, 0.008)
    groups = group_points([*BASE[::-1], *other])
    assert list(groups) == ["a", "b"]
    assert groups["b"] == BASE


def test_the_table() -> None:
    other = make_curve("a", [800_000, 1_000_000], 2e5, 0.004)
    base = [replace(p, remark="unsorted") for p in BASE]
    text = write_table([*base, *other], TITLES, "b", 1.09)
    assert "Before rounding: 1.09000 BPB" in text
    assert "| b | two | 2 | 1,000,000 | 4.000 | 1.10000 | 8.00 | 999,000 | 1,000 |" in text
    # Half the gap at 1 MB; 800 kB for the loss of 1 MB.
    assert "| a | one | 0.500 | 0.500 | - |" in text
    assert f"| a | one | - | 0.800 | {900 / 1100:.3f} |" in text
    assert "(b) x 1: unsorted" in text


def test_the_plot() -> None:
    page = draw_plot([*BASE, replace(BASE[0], curve="a", gap_bpb=-1.0)], TITLES)
    assert "<svg" in page
    assert "(b) two" in page
