"""A run in a sentence, the nearest shipped recipe, and Markdown that shows what files say."""

import re
from pathlib import Path
from typing import Any

import pytest

from underpar.audit.rules import RULES
from underpar.build.levers import resolve_levers
from underpar.core.run_folder import RunFolder, write_json
from underpar.errors import RunError
from underpar.levers import LEVERS
from underpar.recipe import load_recipe, to_tree
from underpar.report.ancestry import Difference, ancestry_of
from underpar.report.build import build_report
from underpar.report.facts import lever_title
from underpar.report.gather import gather
from underpar.report.summary import plain, sentence

HOSTILE = "a|b <script>`x`</script> [l](http://h)\n# heading"


def stored(*overrides: str, name: str = "demo") -> dict[str, Any]:
    """A recipe as a run folder stores it."""
    return to_tree(resolve_levers(load_recipe(name, overrides)))


def test_an_unchanged_recipe_is_named() -> None:
    for name in ("demo", "baseline", "pr2014"):
        ancestry = ancestry_of(stored(name=name))
        assert ancestry and (ancestry.base, ancestry.changes, ancestry.title) == (name, (), name)


def test_changes_are_told_by_value_and_by_lever() -> None:
    tree = stored("train.seed=7", "levers.bigram.width=32", "levers.smear=true")
    del tree["levers"]["leaky_square"]
    ancestry = ancestry_of(tree)
    assert ancestry and ancestry.title == "demo with 4 changes"
    assert ancestry.changes == (
        Difference("levers.bigram.width", 64, 32),
        Difference("levers.leaky_square", "on", "off"),
        Difference("levers.smear", "off", "on"),
        Difference("train.seed", 1337, 7),
    )


@pytest.mark.parametrize("tree", [{"model": {"dim": -1}}, {"levers": {"nothing": {}}}, {"x": 1}])
def test_what_is_no_recipe_of_this_version_has_no_ancestor(tree: dict[str, Any]) -> None:
    assert ancestry_of(tree) is None


def test_a_run_in_a_sentence(make_run: Any, trees: Any) -> None:
    about = {**trees["about"](), "date": "2026-11-19"}
    run = gather(make_run(about=about, recipe="[train]\nseed = 3\n"))
    assert sentence(run) == (
        "baseline with 2 changes, 10 steps in 5.0 s on cpu, 2 threads, 2026-11-19; "
        "6,789 of 16,000,000 bytes; 25.0 % smaller than xz (3.0000 bits per byte), adapting "
        f"28.7 % smaller than xz (2.8500 bits per byte); all {len(RULES)} checks pass."
    )


def test_a_sentence_says_what_is_missing_or_stale(make_run: Any, trees: Any) -> None:
    bare = sentence(gather(make_run("a", budget=None, plain=None, adapt=None, audit=None)))
    assert bare.endswith("; not packed yet; not scored yet; not audited yet.")
    over = {**trees["budget"](), "cap_bytes": 6000}
    assert "6,789 of 6,000 bytes, over the cap;" in sentence(gather(make_run("b", budget=over)))
    changed = sentence(gather(make_run("c", artifact="packed again")))
    assert "of another artifact; its audit is of another artifact." in changed
    assert "checks pass" not in changed
    failed = sentence(gather(make_run("d", audit=trees["audit"]("fail"))))
    assert "audit: fail, of " in failed


def test_a_failed_run_says_why(make_run: Any, tmp_path: Path) -> None:
    folder = make_run(artifact=None, plain=None, adapt=None, audit=None, budget=None)
    assert "not finished: still training, stopped or killed" in sentence(gather(folder))
    write_json(folder.failure_file, {"reason": "the loss is <nan>."})
    build_report([folder], tmp_path / "report.html")
    page = (tmp_path / "report.html").read_text()
    assert re.search(r'<p class="sentence fail">.*it failed: the loss is &lt;nan&gt;\.', page)
    assert "it failed: the loss is \\<nan\\>." in (tmp_path / "report.md").read_text()


def test_verdicts_on_other_files_are_greyed(make_run: Any, tmp_path: Path) -> None:
    def greyed(folder: RunFolder) -> int:
        page = build_report([folder], tmp_path / "report.html").read_text()
        return len(re.findall(r'class="figure[^"]* stale"', page))

    assert greyed(make_run("a")) == 0
    # Both scores and the audit are of another artifact.
    assert greyed(make_run("b", artifact="packed again")) == 3


def test_the_contents_lead_to_every_section(make_run: Any, tmp_path: Path) -> None:
    folders = [make_run("a"), make_run("b")]
    page = build_report(folders, tmp_path / "report.html").read_text()
    links = re.findall(r'<a href="#([^"]+)">', page)
    ids = re.findall(r' id="([^"]+)"', page)
    assert sorted(links) == sorted(ids) and len(set(ids)) == len(ids)
    assert sum(link.startswith("run-1-") for link in links) == page.count("<h2>") / 2


def test_the_recipe_is_shown_as_changes(make_run: Any, tmp_path: Path) -> None:
    page = build_report([make_run()], tmp_path / "report.html").read_text()
    table = page.partition('<table class="changes">')[2].partition("</table>")[0]
    assert ">model.dim<" in table and "<td>128</td>" in table
    assert ">train.seed<" not in table


def test_markdown_beside_the_page(make_run: Any, tmp_path: Path) -> None:
    out = tmp_path / "page.html"
    build_report([make_run("first"), make_run("second", plain=None)], out)
    text = (tmp_path / "page.md").read_text()
    assert text.count("\n## ") == 1 and text.startswith("## first\n")
    assert "| plain | 3.0000 bits per byte, 25.0 % smaller than xz |" in text
    assert "| xz -9, all in one file | 4.0000 bits per byte |" in text
    with pytest.raises(RunError, match="written beside it"):
        build_report([make_run("third")], tmp_path / "page.md")


def test_markdown_shows_hostile_text_as_text(make_run: Any, tmp_path: Path, trees: Any) -> None:
    about = {**trees["about"](), "recipe_hash": HOSTILE, "device": HOSTILE, "date": HOSTILE}
    build_report([make_run(about=about)], tmp_path / "report.html")
    text = (tmp_path / "report.md").read_text()
    assert "<script>" not in text.replace("\\<script\\>", "")
    assert "\n# heading" not in text and not re.search(r"(?<!\\)\]\(http", text)
    assert plain("a|b`<#") == "a\\|b\\`\\<\\#"


def test_every_lever_has_a_title() -> None:
    titles = {name: lever_title(name) for name in LEVERS}
    assert all(title.endswith(f" ({name})") for name, title in titles.items())
    assert max(len(title) for title in titles.values()) <= 90
