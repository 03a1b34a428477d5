"""`train --resume` and `--stop-behind` as a user meets them."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from underpar.cli import app
from underpar.core.run_folder import RunFolder
from underpar.core.runtime import Runtime
from underpar.errors import UnderparError
from underpar.recipe import load_recipe
from underpar.stages.train import train

# A tenth of them is enough for a comparison.
STEPS = 60
SETS = [f"train.budget_steps={STEPS}", "model.num_layers=1"]


def start(data: Path, folder: RunFolder, *more: str) -> list[str]:
    sets = [word for value in (*SETS, *more) for word in ("--set", value)]
    out = ["--data", str(data), "--out", str(folder.path)]
    return ["train", "baseline+cpu", *out, *sets, "--device", "cpu", "--json"]


def resume(folder: RunFolder) -> list[str]:
    return ["train", "--resume", str(folder.path), "--device", "cpu", "--json"]


def run(words: list[str]) -> dict[str, Any]:
    """The summary of a command that must succeed."""
    result = CliRunner().invoke(app, words, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    summary: dict[str, Any] = json.loads(result.stdout)
    return summary


def refusal(*words: object) -> str:
    """The one line of a command that must be refused."""
    with pytest.raises(UnderparError) as caught:
        CliRunner().invoke(app, ["train", *map(str, words)], catch_exceptions=False)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def losses(folder: RunFolder) -> list[float]:
    return [m["loss"] for m in folder.metrics()]


def change_about(whole: RunFolder, path: Path, **values: str) -> RunFolder:
    """A copy of a run with other values in its run.json."""
    shutil.copytree(whole.path, path)
    folder = RunFolder(path)
    about = json.loads(folder.about_file.read_text())
    folder.about_file.write_text(json.dumps(about | values))
    return folder


@pytest.fixture(scope="module")
def whole(tiny_data: Path, tmp_path_factory: pytest.TempPathFactory, runtime: Runtime) -> RunFolder:
    """An uninterrupted run."""
    folder = RunFolder(tmp_path_factory.mktemp("resume") / "whole")
    assert train(load_recipe("baseline+cpu", SETS), tiny_data, folder, runtime)["finished"]
    return folder


def test_a_killed_run_continues_by_its_name_alone(
    whole: RunFolder, tiny_data: Path, tmp_path: Path
) -> None:
    folder = RunFolder(tmp_path / "run")
    words = start(tiny_data, folder, "train.checkpoint_seconds=0")
    # Bit for bit needs the same number of threads on both sides.
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(
        [sys.executable, "-m", "underpar", *words], env=environment, stdout=subprocess.DEVNULL
    )
    deadline = time.monotonic() + 60
    while len(list(folder.metrics())) < 5 and time.monotonic() < deadline:
        time.sleep(0.005)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert folder.checkpoint_file.exists() and not folder.weights_file.exists()
    summary = run(resume(folder))
    assert (summary["finished"], summary["step"]) == (True, STEPS)
    assert losses(folder) == losses(whole)


def test_mistakes_are_one_line(whole: RunFolder, tiny_data: Path, tmp_path: Path) -> None:
    before = {p.name: p.read_bytes() for p in whole.path.iterdir()}
    assert "--resume RUN" in refusal()
    assert "--data" in refusal("baseline+cpu")
    message = refusal("demo", "--data", tiny_data, "--set", "train.seed=1", "--resume", whole.path)
    assert "RECIPE, --data, --set" in message
    assert "underpar train" in refusal("--resume", tmp_path / "nowhere")
    assert {p.name: p.read_bytes() for p in whole.path.iterdir()} == before


def test_data_that_moved_are_named_with_a_way_out(whole: RunFolder, tmp_path: Path) -> None:
    moved = change_about(whole, tmp_path / "moved", data="gone")
    text = refusal("--resume", moved.path)
    assert "gone" in text and f"--out {moved.path}" in text


def test_a_hopeless_run_stops_and_can_go_on(
    whole: RunFolder, tiny_data: Path, tmp_path: Path
) -> None:
    folder = RunFolder(tmp_path / "slow")
    words = start(tiny_data, folder, "train.matrix_lr=0.0001", "train.embed_lr=0.0001")
    summary = run([*words, "--stop-behind", str(whole.path)])
    assert not summary["finished"] and "behind" in summary["stopped"]
    # Step 19 is the first at 0.3 of 60 steps.
    assert summary["step"] == 19
    assert not folder.weights_file.exists()
    assert run(resume(folder))["finished"]


def test_a_run_near_its_reference_is_left_alone(
    whole: RunFolder, tiny_data: Path, tmp_path: Path
) -> None:
    words = start(tiny_data, RunFolder(tmp_path / "same"))
    summary = run([*words, "--stop-behind", str(whole.path)])
    assert summary["finished"] and "stopped" not in summary


def test_a_run_on_other_data_is_no_reference(
    whole: RunFolder, tiny_data: Path, tmp_path: Path
) -> None:
    other = change_about(whole, tmp_path / "other", data_identity="else")
    folder = RunFolder(tmp_path / "run")
    text = refusal(*start(tiny_data, folder)[1:], "--stop-behind", other.path)
    assert "other data" in text and not folder.path.exists()
