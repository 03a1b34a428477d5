"""The table of results: every figure is that of a file, every dash has a missing file."""

from __future__ import annotations

import hashlib
import json
import shutil
from dataclasses import asdict
from pathlib import Path
from statistics import fmean, pstdev, stdev
from typing import Any

import pytest
from typer.testing import CliRunner

from tiny import TinyRun
from underpar.audit.case import DEFAULT_LIMITS, hash_files
from underpar.audit.rules import RULES
from underpar.cli import app
from underpar.core.run_folder import RunFolder
from underpar.errors import RunError
from underpar.lab.results import (
    ADAPTED,
    BEFORE,
    BYTES,
    PUBLIC_RUNS,
    QUANTIZED,
    read_public,
    write_results,
)
from underpar.recipe import load_recipe

ARTIFACT = b"packed model"
SHA256 = hashlib.sha256(ARTIFACT).hexdigest()
TEXT_BYTES = 1000


def score_tree(method: str, bpb: float, order: str = "stream") -> dict[str, Any]:
    entry = {"document": 0, "bits": bpb * TEXT_BYTES, "num_bytes": TEXT_BYTES, "num_targets": 300}
    return {
        "artifact_sha256": SHA256,
        "artifact_bytes": 5000,
        "data_identity": "text",
        "device": "cpu",
        "xz_bytes": 400,
        "method": method,
        "order": order,
        "side_bits": 0.0,
        "seconds": {"load": 1.5, "score": 30.0},
        "ledger": [entry],
    }


def make_run(
    path: Path, seed: int, bpb: float = 2.0, recipe: str = "baseline+cpu", **orders: str
) -> RunFolder:
    """A finished, packed, scored and audited run; `orders` are those of further scores."""
    folder = RunFolder(path)
    path.mkdir(parents=True)
    folder.write_recipe(load_recipe(recipe, [f"train.seed={seed}"]))
    values = {
        folder.about_file: {"recipe_hash": "abc", "data_identity": "text", "device": "H200"},
        folder.validation_file: {
            "step": 400,
            "seconds": 100.0 + seed,
            "num_bytes": TEXT_BYTES,
            "live_bpb": bpb + 0.1,
            "average_bpb": bpb,
        },
        folder.budget_file: {
            "total_bytes": 6000 + seed,
            "cap_bytes": 16_000_000,
            "model_file_bytes": 5000,
            "num_weights": 12,
            "classes": {},
            "tensors": [],
        },
        folder.score_file("plain"): score_tree("plain", bpb + 0.01),
    }
    for place, (method, order) in enumerate(orders.items()):
        values[folder.score_file(method)] = score_tree(method, bpb - 0.02 - place, order)
    folder.artifact_file.write_bytes(ARTIFACT)
    folder.weights_file.write_bytes(b"weights")
    for file, value in values.items():
        file.write_text(json.dumps(value))
    audit(folder, "pass")
    return folder


def audit(folder: RunFolder, verdict: str, profile: str = "strict") -> None:
    rules = [
        {"rule": rule, "verdict": verdict, "summary": "", "evidence": {}, "seconds": 0.0}
        for rule in RULES
    ]
    about = {
        "verdict": verdict,
        "profile": profile,
        "artifact_sha256": SHA256,
        "data_sha256": "text",
        "limits": asdict(DEFAULT_LIMITS),
        "num_documents": 0,
        "files": hash_files(folder),
        "findings": rules,
    }
    folder.audit_file.write_text(json.dumps(about))


def page_of(out: Path, *runs: str, public: Path = PUBLIC_RUNS) -> tuple[list[dict[str, str]], str]:
    """The rows of the table, and the text below it."""
    write_results(out, runs, public)
    lines = out.read_text().splitlines()
    cells = [[c.strip() for c in line.strip("|").split("|")] for line in lines if "|" in line]
    rows = [dict(zip(cells[0], row, strict=True)) for row in cells[2:]]
    return rows, "\n".join(line for line in lines if not line.startswith("|"))


@pytest.fixture
def three(tmp_path: Path) -> list[str]:
    """Three seeds of one recipe, given out of order."""
    bpbs = {42: 2.0, 0: 2.2, 314: 2.1}
    folders = [make_run(tmp_path / f"s{s}", s, b, adapt="stream") for s, b in bpbs.items()]
    return [f"ours={folder.path}" for folder in folders]


def test_every_figure_is_that_of_a_file(three: list[str], tmp_path: Path) -> None:
    rows, below = page_of(tmp_path / "out.md", *three)
    assert [row["seed"] for row in rows[:3]] == ["0", "42", "314"]
    assert {row["recipe"] for row in rows} == {"ours"}
    first = rows[1]
    assert first[BEFORE] == "2.00000" and first[QUANTIZED] == "2.01000"
    assert (first[ADAPTED], first["scored as"], first["order"]) == ("1.98000", "adapt", "decodable")
    assert (first["steps"], first["training ms"], first["ms per step"]) == (
        "400",
        "142,000",
        "355.0",
    )
    assert (first["adapting s"], first[BYTES], first["audit"]) == ("31.5", "6,042", "pass")
    assert "3 runs on H200" in below and "Not in the folder" not in below


def test_a_real_run_has_every_figure(tiny_run: TinyRun, tmp_path: Path) -> None:
    folder = tiny_run.folder
    (row,), below = page_of(tmp_path / "out.md", f"tiny={folder.path}")
    end, budget = (json.loads(f.read_text()) for f in (folder.validation_file, folder.budget_file))
    scores = {m: json.loads(folder.score_file(m).read_text()) for m in ("plain", "adapt")}
    assert row["steps"] == f"{end['step']:,}" and row[BEFORE] == f"{end['average_bpb']:.5f}"
    assert row[QUANTIZED] == f"{scores['plain']['bpb']:.5f}"
    assert row[ADAPTED] == f"{scores['adapt']['bpb']:.5f}"
    assert row["adapting s"] == f"{sum(scores['adapt']['seconds'].values()):,.1f}"
    assert row[BYTES] == f"{budget['total_bytes']:,}"
    assert row["audit"] == "-" and "seed 1337: audit.json" in below


def test_mean_and_both_deviations_are_over_seeds(three: list[str], tmp_path: Path) -> None:
    rows, _ = page_of(tmp_path / "out.md", *three)
    assert [row["seed"] for row in rows[3:]] == [
        "mean",
        "deviation, sample",
        "deviation, population",
    ]
    values = [2.2, 2.0, 2.1]
    for row, statistic in zip(rows[3:], (fmean, stdev, pstdev), strict=True):
        assert row[BEFORE] == f"{statistic(values):.5f}"
    assert rows[4][BEFORE] != rows[5][BEFORE]
    # One run has neither a mean nor a deviation of its own.
    rows, _ = page_of(tmp_path / "one.md", three[0])
    assert len(rows) == 1


def test_a_figure_that_one_seed_lacks_has_no_mean(three: list[str], tmp_path: Path) -> None:
    (tmp_path / "s0" / "budget.json").unlink()
    rows, below = page_of(tmp_path / "out.md", *three)
    assert [row[BYTES] for row in rows] == ["-", "6,042", "6,314", "-", "-", "-"]
    assert rows[3][BEFORE] != "-"
    assert "Not in the folder of ours, seed 0: budget.json" in below


def test_each_way_of_scoring_is_a_row_with_its_order(tmp_path: Path) -> None:
    orders = {"adapt": "stream", "lora_ttt+published": "published"}
    folder = make_run(tmp_path / "a", 1, **orders)
    rows, _ = page_of(tmp_path / "out.md", f"x={folder.path}")
    assert {row["scored as"]: row["order"] for row in rows} == {
        "adapt": "decodable",
        "lora_ttt+published": "published order",
    }
    assert [row[ADAPTED] for row in rows] == ["1.98000", "0.98000"]


def test_recipes_stand_in_one_table(three: list[str], tmp_path: Path) -> None:
    other = make_run(tmp_path / "other", 0, recipe="demo")
    rows, below = page_of(tmp_path / "out.md", *three, f"demo={other.path}")
    assert [row["recipe"] for row in rows] == ["ours"] * 6 + ["demo"]
    assert rows[-1][ADAPTED] == "-" and "a score other than the plain one" in below


def test_a_copy_without_weights_keeps_its_verdict(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "a", 1, adapt="stream")
    for file in (folder.weights_file, folder.artifact_file):
        file.unlink()
    (row,), below = page_of(tmp_path / "out.md", str(folder.path))
    assert row["audit"] == "pass" and row[BYTES] == "6,001"
    assert "weights.safetensors, which the audit judged" in below
    # A judged file that is here and differs is another matter.
    folder.budget_file.write_text(folder.budget_file.read_text().replace("6001", "5001"))
    (row,), _ = page_of(tmp_path / "out.md", str(folder.path))
    assert row["audit"] == "of other files"


def test_an_audit_says_its_verdict_and_its_profile(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "a", 1)
    audit(folder, "deviation", "precedent")
    (row,), _ = page_of(tmp_path / "out.md", str(folder.path))
    assert row["audit"] == "deviation (precedent)"
    folder.audit_file.unlink()
    (row,), below = page_of(tmp_path / "out.md", str(folder.path))
    assert row["audit"] == "-" and "audit.json" in below


def test_a_run_that_was_only_trained_has_its_row(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "a", 1)
    names = ("budget.json", "score-plain.json", "audit.json", "model.upar", "run.json")
    for name in names:
        (folder.path / name).unlink()
    (row,), below = page_of(tmp_path / "out.md", str(folder.path))
    assert row["steps"] == "400" and row[QUANTIZED] == "-"
    assert all(name in below for name in names if name != "model.upar")


def test_public_runs_stand_beside_runs_on_their_text(tmp_path: Path) -> None:
    public = tmp_path / "public.toml"
    entry = '[[run]]\nname = "theirs"\ntext_bytes = {}\nadapted = 1.5\norder = "published"\n'
    public.write_text(entry.format(TEXT_BYTES) + 'note = "one H200"\n')
    folder = make_run(tmp_path / "a", 1)
    rows, below = page_of(tmp_path / "out.md", str(folder.path), public=public)
    assert rows[-1]["recipe"] == "theirs" and rows[-1]["order"] == "published order"
    assert (rows[-1][ADAPTED], rows[-1][QUANTIZED]) == ("1.50000", "-")
    assert "- theirs: one H200" in below
    public.write_text(entry.format(TEXT_BYTES + 1) + 'note = "one H200"\n')
    rows, _ = page_of(tmp_path / "out.md", str(folder.path), public=public)
    assert [row["recipe"] for row in rows] == ["a"]


def test_the_shipped_public_runs_are_read() -> None:
    (run,) = read_public(PUBLIC_RUNS)
    assert (run.before, run.quantized, run.adapted) == (1.15824, 1.16336, 1.15742)
    assert run.row().figures["ms per step"] == pytest.approx(199.73, abs=0.01)


def test_a_page_keeps_what_stands_around_the_table(tmp_path: Path) -> None:
    folder, out = make_run(tmp_path / "a", 1), tmp_path / "page.md"
    write_results(out, [str(folder.path)])
    once = out.read_text()
    out.write_text(f"# Mine\n\n{once}\nMore words.\n")
    write_results(out, [f"named={folder.path}"])
    page = out.read_text()
    assert page.startswith("# Mine\n") and page.endswith("\nMore words.\n")
    assert "| named | 1 |" in page and "| a | 1 |" not in page
    for text in ("# Mine\n", once.replace("<!-- end", "<!-- no end")):
        out.write_text(text)
        with pytest.raises(RunError, match="exists without the lines"):
            write_results(out, [str(folder.path)])
        assert out.read_text() == text


def test_mistakes_are_named(tmp_path: Path) -> None:
    folder, out = make_run(tmp_path / "a", 1), tmp_path / "out.md"
    longer = make_run(tmp_path / "longer", 2)
    values = json.loads(longer.validation_file.read_text()) | {"num_bytes": 2000}
    longer.validation_file.write_text(json.dumps(values))
    stale = RunFolder(Path(shutil.copytree(folder.path, tmp_path / "stale")))
    stale.artifact_file.write_bytes(b"another")
    public = tmp_path / "public.toml"
    public.write_text('[[run]]\nname = "x"\ntext_bytes = 1\nnote = ""\nbpb = 1.0\n')
    wrong = tmp_path / "wrong.toml"
    wrong.write_text('[[run]]\nname = "x"\ntext_bytes = 1\nnote = ""\norder = "any"\n')
    run = str(folder.path)
    for runs, beside, message in (
        ([], PUBLIC_RUNS, "no run"),
        ([run, f"b={folder.path}/."], PUBLIC_RUNS, "given twice"),
        ([run, str(longer.path)], PUBLIC_RUNS, "1,000 and 2,000 bytes"),
        ([str(stale.path)], PUBLIC_RUNS, "is of another artifact"),
        ([str(tmp_path / "nowhere")], PUBLIC_RUNS, "not a run folder"),
        ([run], public, "unknown key 'bpb'"),
        ([run], wrong, "order 'any'"),
        ([run], tmp_path / "none.toml", "is no list of public runs"),
    ):
        with pytest.raises(RunError, match=message):
            write_results(out, runs, beside)
    assert not out.exists()


def test_the_command_names_its_page(three: list[str], tmp_path: Path) -> None:
    out = tmp_path / "out.md"
    ran = CliRunner().invoke(app, ["lab", "results", str(out), *three])
    assert ran.stdout.split() == [str(out)] and "deviation, population" in out.read_text()
    bad = CliRunner().invoke(app, ["lab", "results", str(out), str(tmp_path / "nowhere")])
    assert isinstance(bad.exception, RunError)
