"""Results over seeds: the figures of the run folders, their mean and spread, and nothing else."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from statistics import fmean, stdev
from xml.etree import ElementTree as ET

import pytest
from typer.testing import CliRunner

from underpar.cli import app
from underpar.core.run_folder import RunFolder
from underpar.core.runtime import Runtime
from underpar.errors import RunError
from underpar.lab.seeds import COLUMNS, read_result, write_results
from underpar.recipe import load_recipe
from underpar.stages.pack import pack_run
from underpar.stages.score import score_artifact
from underpar.stages.train import train

SETS = ["model.num_layers=2", "levers.ema=true", "levers.loop={first=1, last=1, start=0.5}"]
SETS += ["train.budget_steps=10", "train.micro_batch_tokens=128", "model.context=64"]
SETS += ["train.validate_every_seconds=1e-9", 'train.stages=["32@0.5", "64@1"]']
SETS += ["model.dim=32", "model.num_heads=2", "model.num_kv_heads=1", "model.mlp_dim=32"]
SVG = "{http://www.w3.org/2000/svg}"


@pytest.fixture(scope="module")
def seeds(
    tiny_data: Path, tmp_path_factory: pytest.TempPathFactory, runtime: Runtime
) -> list[RunFolder]:
    """Two runs, the first of them packed and scored."""
    folders = [RunFolder(tmp_path_factory.mktemp("seeds") / f"s{seed}") for seed in (7, 1)]
    for folder, seed in zip(folders, (7, 1), strict=True):
        recipe = load_recipe("baseline+cpu", [*SETS, f"train.seed={seed}"])
        assert train(recipe, tiny_data, folder, runtime)["finished"]
    pack_run(folders[0])
    score_artifact(folders[0].artifact_file, tiny_data, runtime)
    return folders


def copy_run(folder: RunFolder, path: Path) -> RunFolder:
    shutil.copytree(folder.path, path)
    return RunFolder(path)


def change(path: Path, **values: object) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def table_of(page: str, first: str) -> list[dict[str, str]]:
    """The rows of the table whose first column is named so."""
    lines = page.splitlines()
    begin = next(i for i, line in enumerate(lines) if line.startswith(f"| {first} |"))
    head = [cell.strip() for cell in lines[begin].strip("|").split("|")]
    rows = []
    for line in lines[begin + 2 :]:
        if not line:
            break
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        rows.append(dict(zip(head, cells, strict=True)))
    return rows


def test_every_figure_is_that_of_its_run(seeds: list[RunFolder], tmp_path: Path) -> None:
    out = tmp_path / "tiny.md"
    assert write_results(out, seeds) == tmp_path / "tiny.svg"
    page = out.read_text()
    assert page.startswith("## tiny\n\n2 runs on cpu") and "(tiny.svg)" in page
    rows = {row["seed"]: row for row in table_of(page, "seed")}
    # Sorted by seed, whatever the order given.
    assert list(rows) == ["1", "7", "mean", "standard deviation"]
    for folder, seed in zip(seeds, ("7", "1"), strict=True):
        end = json.loads(folder.validation_file.read_text())
        row = rows[seed]
        assert row["recipe"] == json.loads(folder.about_file.read_text())["recipe_hash"]
        assert row["live BPB"] == f"{end['live_bpb']:.5f}"
        assert row["averaged BPB"] == f"{end['average_bpb']:.5f}"
        assert (row["steps"], row["tokens"]) == ("10", "2,560")
        assert row["tokens/s"] == f"{2560 / end['seconds']:,.0f}"
    score = json.loads(seeds[0].score_file("plain").read_text())
    assert rows["7"]["quantized BPB"] == f"{score['bpb']:.5f}"
    assert rows["7"]["model.upar bytes"] == f"{seeds[0].artifact_file.stat().st_size:,}"


def test_what_was_not_measured_is_a_dash(seeds: list[RunFolder], tmp_path: Path) -> None:
    write_results(tmp_path / "out.md", seeds)
    rows = {row["seed"]: row for row in table_of((tmp_path / "out.md").read_text(), "seed")}
    # Scored with one seed only: no mean of it either. Nobody adapted: no column.
    for name in ("quantized BPB", "model.upar bytes", "bytes with code"):
        assert {rows[s][name] for s in ("1", "mean", "standard deviation")} == {"-"}
    assert "adapted BPB" not in rows["1"]
    write_results(tmp_path / "one.md", seeds[:1])
    rows = {row["seed"]: row for row in table_of((tmp_path / "one.md").read_text(), "seed")}
    assert rows["mean"]["live BPB"] == rows["7"]["live BPB"]
    assert set(rows["standard deviation"].values()) == {"standard deviation", "", "-"}


def test_mean_and_standard_deviation_are_over_seeds(seeds: list[RunFolder], tmp_path: Path) -> None:
    write_results(tmp_path / "out.md", seeds)
    rows = {row["seed"]: row for row in table_of((tmp_path / "out.md").read_text(), "seed")}
    for name in ("live BPB", "averaged BPB", "seconds"):
        values = [read_result(folder).figures[name] for folder in seeds]
        assert rows["mean"][name] == f"{fmean(values):{COLUMNS[name]}}"
        assert rows["standard deviation"][name] == f"{stdev(values):{COLUMNS[name]}}"
    assert float(rows["standard deviation"]["live BPB"]) > 0


def test_speeds_are_told_apart_by_context_and_loop(seeds: list[RunFolder], tmp_path: Path) -> None:
    write_results(tmp_path / "out.md", seeds)
    rows = table_of((tmp_path / "out.md").read_text(), "context")
    # A step is in the first stage up to 0.5, and loops from 0.5 on: one step is in both, too few.
    assert [row["context"] for row in rows] == ["32", "64"]
    assert float(rows[0]["M operations a token"]) < float(rows[1]["M operations a token"])
    lines = list(seeds[0].metrics())
    fast = sorted(line["tokens_per_second"] for line in lines[:5])
    assert rows[0]["tokens/s, seed 7"] == f"{fast[2]:,.0f}"


def test_the_chart_holds_every_curve(seeds: list[RunFolder], tmp_path: Path) -> None:
    root = ET.fromstring(write_results(tmp_path / "out.md", seeds).read_text())
    texts = [text.text for text in root.iter(f"{SVG}text")]
    assert texts[:2] == ["seed 1", "seed 7"]
    loss, prices = root.findall(f"{SVG}svg")
    kinds = [[line.get("class") for line in p.iter(f"{SVG}polyline")] for p in (loss, prices)]
    assert kinds == [["bold c0", "bold c1"], ["faint c0", "faint c1", "bold c0", "bold c1"]]
    # Each validation of a run and its end, but for the first moments.
    live = read_result(seeds[1]).live
    assert len(live) == 11
    late = [x for x, _ in live if x >= 0.05 * live[-1][0]]
    points = next(prices.iter(f"{SVG}polyline")).get("points") or ""
    assert len(points.split()) == len(late)


def test_runs_that_do_not_compare_are_refused(
    seeds: list[RunFolder], tiny_data: Path, tmp_path: Path, runtime: Runtime
) -> None:
    out = tmp_path / "out.md"
    other = RunFolder(tmp_path / "other")
    sets = [*SETS, "train.seed=3", "train.matrix_lr=0.01", "train.budget_steps=2"]
    assert train(load_recipe("baseline+cpu", sets), tiny_data, other, runtime)["finished"]
    with pytest.raises(RunError, match=r"differ in more than train\.seed"):
        write_results(out, [*seeds, other])
    elsewhere = copy_run(seeds[1], tmp_path / "elsewhere")
    change(elsewhere.about_file, data_identity="else")
    with pytest.raises(RunError, match="was trained on data"):
        write_results(out, [seeds[1], elsewhere])
    moved = copy_run(seeds[0], tmp_path / "moved")
    change(moved.score_file("plain"), data_identity="else")
    with pytest.raises(RunError, match="is of other text"):
        write_results(out, [moved])
    stale = copy_run(seeds[0], tmp_path / "stale")
    change(stale.score_file("plain"), artifact_sha256="else")
    with pytest.raises(RunError, match="is of another artifact"):
        write_results(out, [stale])
    assert not out.exists()


def test_mistakes_are_named(seeds: list[RunFolder], tmp_path: Path) -> None:
    half = copy_run(seeds[0], tmp_path / "half")
    half.validation_file.unlink()
    run, out = seeds[0], tmp_path / "out.md"
    for path, folders, message in (
        (out, [half], r"validation\.json does not exist; run 'underpar train "),
        (tmp_path / "out.svg", [run], "give a Markdown file"),
        (out, [RunFolder(tmp_path / "nowhere")], "not a run folder"),
        (out, [], "at least one"),
        (out, [*seeds, RunFolder(run.path / "." / ".." / "s7")], "given twice"),
    ):
        with pytest.raises(RunError, match=message):
            write_results(path, folders)
    assert not out.exists()


def test_the_command_names_its_files(seeds: list[RunFolder], tmp_path: Path) -> None:
    out = tmp_path / "out.md"
    words = ["lab", "seeds", str(out), str(seeds[0].path)]
    assert CliRunner().invoke(app, words).stdout.split() == [str(out), str(tmp_path / "out.svg")]
    page = json.loads(CliRunner().invoke(app, [*words, "--json"]).stdout)
    assert page == {"section": str(out), "chart": str(tmp_path / "out.svg")}
