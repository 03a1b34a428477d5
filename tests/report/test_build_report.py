"""The page: complete, self-contained, and unmoved by what a run folder holds."""

from __future__ import annotations

import math
import re
import sys
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from xml.etree import ElementTree as ET

import pytest

from underpar.audit.rules import RULES
from underpar.core.run_folder import RunFolder, write_json
from underpar.core.words import change_text, number_text, seconds_text, speed_text
from underpar.errors import RunError
from underpar.recipe import load_recipe
from underpar.report.build import GREY, build_report, clock_of
from underpar.report.gather import gather

VOID = {"meta", "br"}


class Balance(HTMLParser):
    """Collects tags and attributes, and fails on one that closes another."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: list[str] = []
        self.attributes: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append(tag)
        self.attributes += [name for name, _ in attrs]
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append(tag)
        self.attributes += [name for name, _ in attrs]

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def page_of(tmp_path: Path, *folders: RunFolder) -> str:
    """The page of these runs, checked for balance and for anything it would load."""
    out = tmp_path / "report.html"
    assert build_report(folders, out) == out
    page = out.read_text()
    parser = Balance()
    parser.feed(page)
    assert parser.open == []
    assert not {"script", "link", "img", "iframe", "object", "image", "use"} & set(parser.seen)
    loading = {"src", "srcset", "xlink:href", "action", "style"}
    assert not loading & set(parser.attributes)
    assert not [name for name in parser.attributes if name.startswith("on")]
    assert all(target.startswith("#run-") for target in re.findall(r'href="([^"]*)"', page))
    assert all(ET.fromstring(svg).tag == "svg" for svg in charts_of(page))
    return page


def charts_of(page: str) -> list[str]:
    """The charts of a page, each up to the element that holds it."""
    return re.findall(r'<svg class="chart.*?(?=</figure>|</div>)', page, flags=re.DOTALL)


def text_of(page: str) -> str:
    """Words of the page, markup aside."""
    return re.sub(r"\s+", " ", re.sub(r"<[^>]*>", " ", page))


def test_a_full_run_on_one_page(make_run: Any, tmp_path: Path) -> None:
    page = page_of(tmp_path, make_run())
    text = text_of(page)
    for expected in (
        "Plain 3.0000 bits per byte",
        "Adapted 2.8500 bits per byte",
        "6,789 of 16,000,000 bytes",
        f"Audit pass {len(RULES)} pass, 0 fail, 0 not shown",
        "xz -9 1,000 4.0000",
        "plain, text alone 750 3.0000 25.0 % smaller",
        "plain, with the artifact 5,750 23.0000 475.0 % larger 40,001 bytes",
        "10 steps over 20,480 tokens in 5.0 s",
        "blocks.0.mlp.up.weight int6:12 384 \u00d7 128 4,321.5 3.457",
        "document 1, plain 1,000 bytes, 4,000.0 bits 4.0000 bits per byte",
        "coverage pass 610 targets, each priced once",
        "targets 61,000",
        "score, plain load 1.0 s 25.0 %",
        "rules *.attn.* int6:13 * fp16",
        "versions.torch 2.13.0",
    ):
        assert expected in text
    assert "not run yet" not in text
    assert "http://" not in page and "https://" not in page and "url(" not in page
    assert "@import" not in page


def test_every_chart_is_there(make_run: Any, tmp_path: Path) -> None:
    # Cap, results, loss, rate, bytes, documents, clock; page_of reads each as XML.
    assert len(charts_of(page_of(tmp_path, make_run()))) == 7


@pytest.mark.parametrize(
    ("left_out", "command"),
    [
        ("audit", "underpar audit"),
        ("adapt", "underpar score --adapt"),
        ("plain", "underpar score"),
        ("budget", "underpar pack"),
        ("metrics", "underpar train RECIPE --data DATA --out"),
    ],
)
def test_a_missing_stage_names_its_command(
    make_run: Any, tmp_path: Path, left_out: str, command: str
) -> None:
    folder = make_run(**{left_out: None})
    assert f"not run yet: {command} {folder.path}" in text_of(page_of(tmp_path, folder))


def test_a_run_that_has_only_begun_has_a_page(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "begun")
    folder.write_recipe(load_recipe("demo"))
    assert text_of(page_of(tmp_path, folder)).count("not run yet") == 11


def test_several_runs_begin_with_a_comparison(make_run: Any, tmp_path: Path, trees: Any) -> None:
    first, second = make_run("first"), make_run("second", audit=None, adapt=None)
    page = page_of(tmp_path, first, second)
    head, one, two = page.split('<article class="run"')
    row = "0123456789 3.0000 2.8500 6,789 pass 5.0 s 10"
    assert f"first {row}" in text_of(head)
    assert "second 0123456789 3.0000 not run yet 6,789 not run yet 5.0 s 10" in text_of(head)
    assert head.count("<polyline") == 2
    assert "<h1>first</h1>" in one and "<h1>second</h1>" in two
    assert "do not compare" not in head
    other = {**trees["score"]("plain"), "data_identity": "other"}
    mixed = page_of(tmp_path, first, make_run("third", plain=other, adapt=None))
    assert "do not compare" in mixed.split("<article")[0]


def test_one_run_has_no_comparison_of_runs(make_run: Any, tmp_path: Path) -> None:
    assert '<header class="runs">' not in page_of(tmp_path, make_run())


HOSTILE = '"><script>alert(1)</script><img src=x onerror=alert(1)>{{ 7 * 7 }}'


def test_text_from_the_folder_stays_text(make_run: Any, tmp_path: Path, trees: Any) -> None:
    budget, audit = trees["budget"](), trees["audit"]()
    budget["tensors"][0] |= {"name": HOSTILE, "scheme": HOSTILE, "shape": HOSTILE}
    budget["classes"][HOSTILE] = 10
    audit["findings"][0] |= {"rule": HOSTILE, "summary": HOSTILE, "evidence": {HOSTILE: [HOSTILE]}}
    about = {**trees["about"](), "recipe_hash": HOSTILE, "device": HOSTILE, HOSTILE: HOSTILE}
    score = {**trees["score"]("plain"), "device": HOSTILE, "seconds": {HOSTILE: 1.0}}
    recipe = f"['{HOSTILE}']\n'{HOSTILE}' = '{HOSTILE}'\n"
    changes = {"budget": budget, "audit": audit, "about": about, "plain": score, "recipe": recipe}
    folders = [
        make_run("<script>alert(2)<", **changes),
        make_run("b", **changes),
    ]
    # page_of fails on any script, image or handler that came through.
    page = page_of(tmp_path, *folders)
    assert "<script" not in page and "<img" not in page
    assert "{{ 7 * 7 }}" in page


def test_lone_surrogates_and_controls_do_not_stop_the_page(
    make_run: Any, tmp_path: Path, trees: Any
) -> None:
    budget = trees["budget"]()
    budget["classes"]["\ud800\x00\x1b"] = 10
    budget["tensors"][0]["name"] = "\udfff"
    assert "6,789" in page_of(tmp_path, make_run(budget=budget))


def test_numbers_that_are_none_do_not_stop_the_page(
    make_run: Any, tmp_path: Path, trees: Any
) -> None:
    losses = [7.0, math.nan, 6.0, math.inf, -math.inf, 1e300]
    lines = [trees["step"](i, loss) for i, loss in enumerate(losses, start=1)]
    lines.append({**trees["step"](7), "seconds": math.nan, "lr_scale": math.nan})
    score = {**trees["score"]("plain", math.nan), "seconds": {"load": math.inf, "x": -math.inf}}
    budget = {**trees["budget"](), "cap_bytes": 0, "num_weights": 0}
    budget["classes"]["mlp"] = math.nan
    folder = make_run(metrics=lines, plain=score, budget=budget)
    text = text_of(page_of(tmp_path, folder, folder))
    assert "4 logged steps have no finite loss" in text
    assert "Plain nan bits per byte" in text


def test_all_losses_none(make_run: Any, tmp_path: Path, trees: Any) -> None:
    lines = [trees["step"](i, math.nan) for i in (1, 2)]
    text = text_of(page_of(tmp_path, make_run(metrics=lines)))
    assert "2 logged steps have no finite loss" in text


def test_stale_results_are_named(make_run: Any, tmp_path: Path) -> None:
    text = text_of(page_of(tmp_path, make_run(artifact="packed again")))
    assert "audit.json was made from another artifact" in text


def test_over_the_cap_is_said(make_run: Any, tmp_path: Path, trees: Any) -> None:
    budget = {**trees["budget"](), "cap_bytes": 6000}
    assert "789 bytes over" in text_of(page_of(tmp_path, make_run(budget=budget)))


def test_damage_leaves_the_old_page(make_run: Any, tmp_path: Path) -> None:
    out = tmp_path / "report.html"
    out.write_text("old")
    with pytest.raises(RunError, match=r"audit\.json"):
        build_report([make_run(audit="{")], out)
    assert out.read_text() == "old"


def test_nothing_to_report_on_and_a_folder_as_file(make_run: Any, tmp_path: Path) -> None:
    with pytest.raises(RunError, match="at least one run folder"):
        build_report([], tmp_path / "report.html")
    with pytest.raises(RunError, match="is a folder"):
        build_report([make_run()], tmp_path)


def test_a_missing_package_is_named(
    make_run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "jinja2", None)
    with pytest.raises(RunError, match="pip install jinja2"):
        build_report([make_run()], tmp_path / "report.html")


@pytest.mark.parametrize(
    ("seconds", "expected"),
    [
        (0.0, "0.0 s"),
        (0.0123, "12.3 ms"),
        (40.06, "40.1 s"),
        (600.0, "10 min 00 s"),
        (7505.0, "2 h 05 min"),
        (math.nan, "nan s"),
    ],
)
def test_seconds_text(seconds: float, expected: str) -> None:
    assert seconds_text(seconds) == expected


def test_numbers_in_words() -> None:
    assert (number_text(1234.5), number_text(1e30)) == ("1,234.5000", "1e+30")
    assert (change_text(0.75), change_text(1.5)) == ("25.0 % smaller", "50.0 % larger")
    assert [speed_text(x) for x in (12, 42_100, 1.2e6)] == ["12 bytes/s", "42.1 kB/s", "1.2 MB/s"]


def test_curves_are_in_bits_per_byte_with_held_out_points_and_results(
    make_run: Any, tmp_path: Path, trees: Any
) -> None:
    lines = [trees["step"](step, 5.0) for step in range(1, 5)]
    lines[1] |= {"val_bpb": 3.5, "average_val_bpb": 3.4}
    about = {**trees["about"](), "train_tokens": 1000, "train_bytes": 2000}
    folder = make_run(metrics=lines, about=about)
    write_json(folder.validation_file, {"live_bpb": 3.2, "average_bpb": 3.1})
    page = page_of(tmp_path, folder)
    curve = charts_of(page)[2]
    text = text_of(curve)
    # 5 nats per token of 2 bytes.
    assert f"{5 / math.log(2) / 2:.4f} bits per byte, smoothed" in text
    assert "training text, bits per byte" in text
    assert "after step 2 3.4000 bits" in text and "after step 4 3.1000 bits" in text
    marks = ["packed, plain 3.0000", "packed, adapt 2.8500", "xz 4.0000"]
    assert all(mark in text for mark in marks)
    # Without a known number of bytes the curve stays in nats.
    bare = make_run("bare", metrics=lines, plain=None, adapt=None)
    assert "training text, nats per token" in text_of(page_of(tmp_path, bare))


def test_results_are_bars_beside_xz(make_run: Any, tmp_path: Path) -> None:
    bars = text_of(charts_of(page_of(tmp_path, make_run()))[1])
    assert "xz -9 4.0000 bits per byte" in bars
    assert "plain 3.0000 bits per byte, 25.0 % smaller" in bars
    assert "adapt 2.8500 bits per byte, 28.7 % smaller" in bars


def test_no_color_of_the_clock_stands_for_two_phases_but_grey(
    make_run: Any, tmp_path: Path, trees: Any
) -> None:
    audit = trees["audit"]()
    for seconds, finding in enumerate(audit["findings"]):
        finding["seconds"] = float(seconds)
    run = gather(make_run(audit=audit))
    phases = {phase.name: phase.color for stage in clock_of(run) for phase in stage.phases}
    colored = {name: color for name, color in phases.items() if color != GREY}
    assert len(phases) > len(colored) == len(set(colored.values())) == GREY
    # The longest ones.
    assert audit["findings"][-1]["rule"] in colored


def test_paper_has_the_wide_layout_without_what_only_a_screen_needs(
    make_run: Any, tmp_path: Path
) -> None:
    page = page_of(tmp_path, make_run())
    # A sheet is narrower than the limit of the narrow layout.
    assert re.findall(r"@media ([^{]*max-width[^{]*) {", page) == ["screen and (max-width: 48rem)"]
    paper = page.partition("@media print {")[2].partition("</style>")[0]
    assert "nav, summary { display: none; }" in paper
    # Nor are the colors of a dark screen printed.
    dark = re.findall(r"@media ([^{]*dark[^{]*) {", page)
    assert dark == ["screen and (prefers-color-scheme: dark)"]
    assert ":root { color-scheme: light; --paper: #fff;" in paper
    assert re.search(r"figure, tr, [^{]*{ break-inside: avoid; }", paper)
