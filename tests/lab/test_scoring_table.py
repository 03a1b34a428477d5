"""The table of ways to score: rows and files, what is measured once, verdicts, refusals."""

import inspect
import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from tiny import TinyRun
from underpar.build.levers import resolve_levers
from underpar.build.model import weight_shapes
from underpar.build.scoring import open_method
from underpar.cli import app
from underpar.cli.lab import lab_scoring_table
from underpar.errors import UnderparError
from underpar.lab.scoring_table import (
    ROWS,
    Request,
    gain_interval,
    measure,
    read_rows,
    to_markdown,
    verdict,
)
from underpar.quant.rules import check_rules
from underpar.recipe import from_tree, load_recipe, merge, parse_override, to_tree

# By title, so that rows may be added between them.
PLAIN, SLIDING, PUBLISHED, STREAM = (
    next(i for i, row in enumerate(ROWS) if row.title == title)
    for title in ("plain", "sliding, stride 64", "LoRA, published order", "LoRA, stream")
)


def request_of(tiny_run: TinyRun, out: Path, *rows: int) -> Request:
    artifact = tiny_run.folder.artifact_file
    return Request(artifact, tiny_run.data, out, rows, num_documents=3, device="cpu")


@pytest.fixture(scope="module")
def measured(tiny_run: TinyRun, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with four rows."""
    out = tmp_path_factory.mktemp("table") / "new"
    measure(request_of(tiny_run, out, PLAIN, SLIDING, PUBLISHED, STREAM))
    return out


def rows_of(out: Path) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = json.loads((out / "scoring.json").read_text())["rows"]
    return rows


def test_every_row_has_a_price_a_time_and_a_verdict(measured: Path) -> None:
    rows = rows_of(measured)
    assert [row["title"] for row in rows] == [
        ROWS[i].title for i in (PLAIN, SLIDING, PUBLISHED, STREAM)
    ]
    assert all(row["seconds"] > 0 and row["tokens_per_second"] > 0 for row in rows)
    plain, _, published, stream = (row["bpb"] for row in rows)
    assert max(published, stream) < plain
    # Nothing of another request to score is left from row to row.
    assert len({row["bpb"] for row in rows}) == len(rows)
    assert [row["order"] for row in rows] == ["stream", "stream", "published", "stream"]
    assert [verdict(row) for row in rows] == ["passes", "passes", "fails: knows lengths", "passes"]


def test_the_table_has_gains_over_the_first_row(measured: Path) -> None:
    rows = rows_of(measured)
    lines = (measured / "scoring.md").read_text().splitlines()[2 : 2 + len(rows)]
    for line, row in zip(lines, rows, strict=True):
        gain = 1000 * (rows[0]["bpb"] - row["bpb"])
        assert line.startswith(f"| {row['title']} | {row['bpb']:.5f} | {gain:.2f} ")
        assert (row is rows[0]) == (f" | {gain:.2f} | " in line)
        assert line.endswith(f"| {row['order']} | {verdict(row)} |")


def test_the_interval_is_that_of_documents_drawn_again() -> None:
    rng = np.random.default_rng(0)
    num_inside = 0
    for _ in range(200):
        sizes = rng.integers(200, 9000, 400)
        before = 2.0 * sizes + rng.normal(0, 40, 400)
        after = before - 0.01 * sizes + rng.normal(0, 30, 400)
        rows = [{"ledger": np.stack((bits, sizes), 1).tolist()} for bits in (before, after)]
        found = gain_interval(*rows)
        assert found
        num_inside += found.low < 0.01 < found.high
    # 95 % of 200, within three standard deviations.
    assert 181 <= num_inside <= 199
    drawn = rng.integers(0, 400, (4000, 400))
    gains = (before - after)[drawn].sum(1) / sizes[drawn].sum(1)
    low, high = np.quantile(gains, (0.025, 0.975))
    assert found.low == pytest.approx(low, abs=0.1 * (high - low))
    assert found.high == pytest.approx(high, abs=0.1 * (high - low))
    assert gain_interval(rows[0], rows[0]) is None and gain_interval(rows[0], {}) is None


FILE = """
["as packed"]
["a smaller file"]
pack = ["quant.rules=['*.weight int4', '* fp16']"]
["adapting"]
levers = ["adapt_scales"]
set = ["levers.adapt_scales.lr=0.01"]
"""


def test_rows_of_a_file_may_pack_the_run_anew(tiny_run: TinyRun, tmp_path: Path) -> None:
    file, out = tmp_path / "rows.toml", tmp_path / "table"
    file.write_text(FILE)
    request = replace(request_of(tiny_run, out), file=file, has_probes=False)
    before = {path.name for path in tiny_run.folder.path.iterdir()}
    measure(request)
    plain, small, adapting = rows_of(out)
    assert {path.name for path in tiny_run.folder.path.iterdir()} == before
    assert plain["bpb"] < small["bpb"] and adapting["bpb"] != plain["bpb"]
    budget = tiny_run.folder.read_json(tiny_run.folder.budget_file)
    assert small["bytes"] < budget["total_bytes"]
    assert sum(size for _, size in small["ledger"]) == sum(size for _, size in plain["ledger"])
    # What is there is not packed again.
    (out / "packed-a-smaller-file" / "model.upar").unlink()
    measure(request)
    assert rows_of(out)[1] == small
    assert not (out / "packed-a-smaller-file" / "model.upar").exists()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[x]\nlever = ['lora_ttt']", "no list of ways to score .*'lever'"),
        ("[x]\nset = 'levers.lora_ttt.rank=8'", "settings are text, in a list"),
        ("[x]\nlevers = ['lora_tt']", "no such lever"),
        ("[x]\npack = ['train.seed=1']", r"only quant\.\* can change"),
    ],
)
def test_mistakes_in_a_file_are_named_before_anything_is_scored(
    tiny_run: TinyRun, tmp_path: Path, text: str, message: str
) -> None:
    file = tmp_path / "rows.toml"
    file.write_text("[first]\n" + text)
    with pytest.raises(UnderparError, match=message):
        measure(replace(request_of(tiny_run, tmp_path / "out"), file=file))
    assert not (tmp_path / "out").exists()


def test_the_shipped_files_fit_the_recipe_they_are_for() -> None:
    recipe = resolve_levers(load_recipe("h200-300s"))
    lab = Path(inspect.getfile(read_rows)).parent
    adaptation, packing = (read_rows(lab / f"{name}.toml") for name in ("adaptation", "packing"))
    for row in (*adaptation, *packing):
        open_method(recipe, row.method, row.changes)
        assert (not row.pack) == (row in adaptation or row.title == "as packed")
    for row in packing:
        tree = to_tree(recipe)
        for override in row.pack:
            tree = merge(tree, parse_override(override))
        check_rules(weight_shapes(recipe), from_tree(tree).quant.rules)
    assert len({(row.method, row.changes) for row in adaptation}) == len(adaptation)


def test_rows_of_two_processes_are_told_apart(
    tiny_run: TinyRun, measured: Path, tmp_path: Path
) -> None:
    record = json.loads((measured / "scoring.json").read_text())
    record["rows"] = record["rows"][:1]
    record["rows"][0]["made"] |= {"device": "elsewhere", "began": "earlier"}
    (tmp_path / "scoring.json").write_text(json.dumps(record))
    measure(request_of(tiny_run, tmp_path, PLAIN, SLIDING))
    first, second = (tmp_path / "scoring.md").read_text().splitlines()[-2:]
    assert first.startswith("- elsewhere, ")
    assert first.endswith(f" at earlier: {ROWS[PLAIN].title}")
    assert second.startswith("- cpu")
    assert second.endswith(f": {ROWS[SLIDING].title}")
    # A file of before, in which rows do not say.
    del record["rows"][0]["made"]
    assert f"- not recorded: {ROWS[PLAIN].title}" in to_markdown(record)


def test_what_is_there_is_not_measured_again(
    tiny_run: TinyRun, measured: Path, tmp_path: Path
) -> None:
    (tmp_path / "scoring.json").write_text((measured / "scoring.json").read_text())
    measure(request_of(tiny_run, tmp_path, PLAIN, SLIDING, PUBLISHED, STREAM))
    # Its seconds would differ.
    for name in ("scoring.json", "scoring.md"):
        assert (tmp_path / name).read_bytes() == (measured / name).read_bytes()
    # A run that was stopped goes on.
    record = json.loads((tmp_path / "scoring.json").read_text())
    record["rows"] = record["rows"][:1]
    (tmp_path / "scoring.json").write_text(json.dumps(record))
    measure(request_of(tiny_run, tmp_path, PLAIN, SLIDING))
    plain, sliding = rows_of(tmp_path)
    assert plain == rows_of(measured)[0]
    assert sliding["bpb"] == rows_of(measured)[1]["bpb"]
    assert sliding["seconds"] != rows_of(measured)[1]["seconds"]


def test_verdicts_may_be_left_to_another_run(tiny_run: TinyRun, tmp_path: Path) -> None:
    words = ["lab", "scoring-table", str(tiny_run.folder.artifact_file), "--documents", "3"]
    words += ["--data", str(tiny_run.data), "--out", str(tmp_path), "--device", "cpu"]
    words += ["--rows", str(PLAIN), str(PUBLISHED)]
    page = tmp_path / "page.md"
    invoked = CliRunner().invoke(
        app, [*words, "--no-probes", "--page", str(page)], catch_exceptions=False
    )
    assert invoked.stdout.strip() in page.read_text()
    assert invoked.stdout.strip() == (tmp_path / "scoring.md").read_text().strip()
    left = rows_of(tmp_path)
    assert [row["title"] for row in left] == [ROWS[i].title for i in (PLAIN, PUBLISHED)]
    assert [verdict(row) for row in left] == ["not probed"] * 2
    assert "not probed" in invoked.stdout
    # The other run only probes.
    invoked = CliRunner().invoke(app, [*words, "--json"], catch_exceptions=False)
    probed = json.loads(invoked.stdout)["rows"]
    assert probed == rows_of(tmp_path)
    assert [verdict(row) for row in probed] == ["passes", "fails: knows lengths"]
    assert [row["seconds"] for row in probed] == [row["seconds"] for row in left]


def test_help_lists_the_rows() -> None:
    text = inspect.getdoc(lab_scoring_table) or ""
    listed = re.findall(r"^ *(\d+)  (.+)$", text, re.MULTILINE)
    assert listed == [(str(i), row.title) for i, row in enumerate(ROWS)]


@pytest.mark.parametrize("other", [{"artifact_sha256": "0" * 64}, {"documents": 4}])
def test_the_table_of_another_artifact_or_text_is_left_alone(
    tiny_run: TinyRun,
    measured: Path,
    tmp_path: Path,
    other: dict[str, Any],
) -> None:
    record = json.loads((measured / "scoring.json").read_text())
    text = json.dumps(record | other)
    (tmp_path / "scoring.json").write_text(text)
    with pytest.raises(UnderparError, match="another artifact or text; choose another --out"):
        measure(request_of(tiny_run, tmp_path, PLAIN))
    assert (tmp_path / "scoring.json").read_text() == text
    assert not (tmp_path / "scoring.md").exists()


def test_an_unknown_row_is_refused(tiny_run: TinyRun, tmp_path: Path) -> None:
    with pytest.raises(UnderparError, match=rf"--rows {len(ROWS)}: expected 0 to {len(ROWS) - 1}"):
        measure(request_of(tiny_run, tmp_path, len(ROWS)))


@pytest.mark.parametrize(
    ("counts", "words"),
    [
        ({}, "passes"),
        ({"later_lengths": 1}, "fails: knows lengths"),
        ({"later_tokens": 1, "later_lengths": 1}, "fails: sees tokens"),
        ({"wrong_events": 1}, "fails: sees tokens"),
    ],
)
def test_the_worst_finding_is_the_verdict(counts: dict[str, int], words: str) -> None:
    assert verdict({"later_tokens": 0, "later_lengths": 0, "wrong_events": 0} | counts) == words
