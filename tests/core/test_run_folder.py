"""The run folder: whole files or none, and errors that say what to run."""

import json
import os
from pathlib import Path

import pytest

from underpar.core.run_folder import RunFolder, write_atomic, write_json
from underpar.errors import RunError
from underpar.recipe import load_recipe


def test_a_failed_write_leaves_the_old_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "file"
    write_atomic(path, b"old")

    def fail(*args: object) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(OSError, match="disk full"):
        write_atomic(path, b"new")
    assert path.read_bytes() == b"old"
    assert [p.name for p in tmp_path.iterdir()] == ["file"]


def test_a_folder_is_not_written_over(tmp_path: Path) -> None:
    with pytest.raises(RunError, match="is a folder"):
        write_atomic(tmp_path, b"x")


def test_json_round_trip(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "value.json"
    write_json(path, {"a": [1, 2.5]})
    assert json.loads(path.read_text()) == {"a": [1, 2.5]}


def test_a_line_cut_by_a_kill_is_left_out(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    folder.metrics_file.write_text('{"step": 1}\n{"step": 2}\n{"st')
    assert [m["step"] for m in folder.metrics()] == [1, 2]


def test_a_missing_file_names_its_command(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    for path, verb in (
        (folder.weights_file, "train"),
        (folder.artifact_file, "pack"),
        (folder.score_file("plain"), "score"),
    ):
        with pytest.raises(RunError, match=f"underpar {verb}"):
            folder.need(path)


def test_a_damaged_json_file_is_named(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    folder.budget_file.write_text("{")
    with pytest.raises(RunError, match=r"budget\.json"):
        folder.read_json(folder.budget_file)


def test_the_recipe_comes_back(tmp_path: Path) -> None:
    # Stacked recipes put a '+' into the default folder name.
    folder, recipe = RunFolder(tmp_path / "baseline+cpu"), load_recipe("demo")
    folder.write_recipe(recipe)
    assert folder.read_recipe() == recipe
