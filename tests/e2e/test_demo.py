"""The demo: small in the suite, whole (and better than xz) under the mark slow."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from killing import killed_before
from underpar.core.run_folder import RunFolder, write_json
from underpar.data.build import BuildOptions, build_data
from underpar.data.sources.corpus import demo_corpus
from underpar.errors import UnderparError
from underpar.recipe import load_recipe
from underpar.stages.demo import SAMPLE, fresh_run, is_demo_data, run_demo

SMALL = ["train.budget_seconds=0", "train.budget_steps=5", "model.num_layers=1", "model.dim=64"]
SMALL += ["model.num_heads=2", "model.num_kv_heads=1", "model.mlp_dim=64"]
SMALL += ["model.vocab_size=512", "levers.bigram.buckets=512"]


def test_a_small_demo_runs_every_stage(
    corpus_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Some of the embedded corpus, and fewer tokens to code: the demo itself has a test below.
    monkeypatch.setattr("underpar.stages.demo.demo_corpus", lambda: corpus_file)
    monkeypatch.setattr("underpar.stages.demo.SAMPLE", replace(SAMPLE, code_tokens=1000))
    result = run_demo(load_recipe("demo", SMALL), tmp_path)
    assert result["audit"] == "pass"
    assert (tmp_path / "document.back").read_bytes() == (tmp_path / "document.txt").read_bytes()
    assert Path(result["report"]).read_text().startswith("<!doctype html>")
    assert result["text"]


def test_a_finished_demo_makes_way_and_an_interrupted_one_stays(tmp_path: Path) -> None:
    recipe = load_recipe("demo", SMALL)
    folder = RunFolder(tmp_path / "run")
    about = {"data": str(tmp_path / "data"), "recipe_hash": recipe.hash}
    write_json(folder.about_file, about)
    folder.checkpoint_file.write_bytes(b"state")
    fresh_run(folder.path, recipe)
    assert folder.checkpoint_file.exists()
    fresh_run(folder.path, load_recipe("demo"))
    assert not folder.path.exists()


@pytest.mark.parametrize("about", [None, {"data": "elsewhere/data"}])
def test_what_is_no_demo_is_never_removed(tmp_path: Path, about: dict[str, str] | None) -> None:
    folder = RunFolder(tmp_path / "run")
    write_json(folder.weights_file, "precious")
    if about:
        write_json(folder.about_file, about)
    with pytest.raises(UnderparError, match="not a demo's run"):
        fresh_run(folder.path, load_recipe("demo"))
    assert folder.weights_file.exists()


def test_a_kill_while_a_finished_demo_makes_way_does_not_block_the_next(tmp_path: Path) -> None:
    recipe, folder = load_recipe("demo", SMALL), RunFolder(tmp_path / "run")

    def make_way() -> None:
        fresh_run(folder.path, recipe)

    for number in range(20):
        write_json(folder.about_file, {"data": str(tmp_path / "data")})
        folder.weights_file.write_bytes(b"finished")
        is_killed = killed_before(number, make_way)
        make_way()
        assert not folder.path.exists() and list(tmp_path.iterdir()) == []
        if not is_killed:
            break
    assert 3 <= number < 20


def test_a_demo_replaces_its_own_data_and_no_other(corpus_file: Path, tmp_path: Path) -> None:
    assert not is_demo_data(tmp_path / "none")
    options = BuildOptions(None, 0.1, kind="bytes")
    build_data([demo_corpus()], tmp_path / "demo", options)
    assert is_demo_data(tmp_path / "demo")
    build_data([corpus_file], tmp_path / "mine", options)
    with pytest.raises(UnderparError, match="mine is not a demo's data; choose another --out"):
        is_demo_data(tmp_path / "mine")


@pytest.mark.slow
def test_the_demo_needs_15_percent_fewer_bits_than_xz(tmp_path: Path) -> None:
    # In a process of its own: the suite's single thread is not what a user has.
    words = [sys.executable, "-m", "underpar", "demo", "--out", str(tmp_path), "--json"]
    # About as many steps as its seconds hold on two cores, whatever else runs beside it here.
    words += ["--set", "train.budget_seconds=0", "--set", "train.budget_steps=550"]
    process = subprocess.run(words, capture_output=True, text=True)
    assert process.returncode == 0, process.stderr
    result = json.loads(process.stdout)
    assert result["audit"] == "pass"
    assert result["plain"]["percent_of_xz"] <= 85
    assert result["adapted"]["bpb"] < result["plain"]["bpb"]
