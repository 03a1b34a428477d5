"""The loop: budgets, kill and resume with equal losses, signals, ranks."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from underpar import pipeline
from underpar.build import resolve_levers
from underpar.data.build import BuildOptions, build_data
from underpar.errors import RecipeError, RunError
from underpar.recipe import load_recipe, to_toml
from underpar.run import RunFolder
from underpar.runtime import Runtime
from underpar.train.checkpoint import read_tensors
from underpar.train.feed import Feed
from underpar.train.guard import read_batches

STEPS = 30
OVERRIDES = [f"train.budget_steps={STEPS}", "train.checkpoint_seconds=0"]
OVERRIDES += ["model.num_layers=2", "levers.ema=true", "levers.loop={first=1, last=1}"]


def losses(folder: RunFolder) -> list[float]:
    lines = list(folder.metrics())
    assert [m["step"] for m in lines] == list(range(1, len(lines) + 1))
    return [m["loss"] for m in lines]


@pytest.fixture(scope="module")
def whole(tiny_data: Path, tmp_path_factory: pytest.TempPathFactory, runtime: Runtime) -> RunFolder:
    """An uninterrupted run."""
    folder = RunFolder(tmp_path_factory.mktemp("whole"))
    assert pipeline.train_run(load_recipe("baseline+cpu", OVERRIDES), tiny_data, folder, runtime)
    return folder


def command(folder: RunFolder, data: Path, *options: str) -> list[str]:
    sets = [word for override in OVERRIDES for word in ("--set", override)]
    out = ["--data", str(data), "--out", str(folder.path), "--device", "cpu", "--json"]
    return ["-m", "underpar", "train", "baseline+cpu", *out, *sets, *options]


def environment() -> dict[str, str]:
    # Bit for bit needs the same number of threads on both sides.
    return os.environ | {"OMP_NUM_THREADS": "1"}


def test_a_step_budget_is_met_exactly_and_learns(whole: RunFolder) -> None:
    curve = losses(whole)
    assert len(curve) == STEPS
    assert curve[-1] < curve[0] - 0.5
    assert whole.weights_file.exists()


@pytest.mark.parametrize("sig", [signal.SIGKILL, signal.SIGTERM])
def test_a_killed_run_resumes_with_the_same_losses(
    sig: signal.Signals, whole: RunFolder, tiny_data: Path, tmp_path: Path
) -> None:
    folder = RunFolder(tmp_path)
    words = [sys.executable, *command(folder, tiny_data)]
    process = subprocess.Popen(words, env=environment(), stdout=subprocess.PIPE)
    deadline = time.monotonic() + 60
    while len(list(folder.metrics())) < 4 and time.monotonic() < deadline:
        time.sleep(0.005)
    process.send_signal(sig)
    process.communicate()
    assert not folder.weights_file.exists()
    if sig == signal.SIGTERM:
        assert process.returncode == 0
    subprocess.run(words, env=environment(), check=True, stdout=subprocess.DEVNULL)
    assert losses(folder) == losses(whole)
    ours, theirs = (read_tensors(f.weights_file)[0] for f in (folder, whole))
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


def test_two_ranks_train_like_one(whole: RunFolder, tiny_data: Path, tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    subprocess.run(
        [*launcher, *command(folder, tiny_data)],
        env=environment(),
        check=True,
        capture_output=True,
    )
    assert losses(folder) == pytest.approx(losses(whole), abs=1e-4)


def test_a_finished_run_is_not_trained_again(
    whole: RunFolder, tiny_data: Path, runtime: Runtime
) -> None:
    before = whole.metrics_file.read_text()
    assert pipeline.train_run(load_recipe("baseline+cpu", OVERRIDES), tiny_data, whole, runtime)
    assert whole.metrics_file.read_text() == before


def test_another_recipe_is_refused_in_the_same_folder(
    whole: RunFolder, tiny_data: Path, runtime: Runtime
) -> None:
    with pytest.raises(RunError, match="choose another --out"):
        pipeline.train_run(load_recipe("baseline+cpu"), tiny_data, whole, runtime)


def test_other_data_are_refused_and_leave_the_folder_alone(
    whole: RunFolder, corpus_file: Path, tmp_path: Path, runtime: Runtime
) -> None:
    build_data([corpus_file], tmp_path / "other", BuildOptions(512, 0.3))
    before = {p.name: p.read_bytes() for p in whole.path.iterdir()}
    with pytest.raises(RunError, match="data_identity"):
        recipe = load_recipe("baseline+cpu", OVERRIDES)
        pipeline.train_run(recipe, tmp_path / "other", whole, runtime)
    assert {p.name: p.read_bytes() for p in whole.path.iterdir()} == before


def test_a_wrong_vocabulary_is_refused(tiny_data: Path, tmp_path: Path, runtime: Runtime) -> None:
    recipe = load_recipe("baseline+cpu", ["model.vocab_size=600"])
    with pytest.raises(RecipeError, match=r"600.*512"):
        pipeline.train_run(recipe, tiny_data, RunFolder(tmp_path), runtime)


def test_ranks_must_share_the_batch(tiny_data: Path, tmp_path: Path) -> None:
    recipe = load_recipe("baseline+cpu", OVERRIDES)
    trainer = pipeline.make_trainer(
        recipe,
        pipeline.load_data(tiny_data),
        RunFolder(tmp_path),
        Runtime(torch.device("cpu"), 0, 3),
    )
    with pytest.raises(RecipeError, match="3 ranks"):
        Feed(trainer.loader, trainer.runtime)


def test_the_stored_recipe_is_the_resolved_one(whole: RunFolder) -> None:
    resolved = resolve_levers(load_recipe("baseline+cpu", OVERRIDES))
    assert resolved.levers["ema"] == {"horizon": 0.06}
    assert whole.recipe_file.read_text() == to_toml(resolved)
    assert json.loads(whole.about_file.read_text())["recipe_hash"] == resolved.hash


def test_a_time_budget_ends_within_a_step(
    tiny_data: Path, tmp_path: Path, runtime: Runtime
) -> None:
    seconds = ["train.budget_steps=0", "train.budget_seconds=0.5", "model.num_layers=2"]
    recipe = load_recipe("baseline+cpu", seconds)
    folder = RunFolder(tmp_path)
    assert pipeline.train_run(recipe, tiny_data, folder, runtime)
    lines = list(folder.metrics())
    assert lines[-1]["seconds"] >= 0.5
    assert all(m["seconds"] < 0.5 for m in lines[:-1])


@pytest.mark.parametrize("log_every", [1, 4])
def test_a_broken_loss_stops_with_its_batches_and_spares_the_checkpoint(
    log_every: int, tiny_data: Path, tmp_path: Path, runtime: Runtime
) -> None:
    sets = ["train.budget_steps=12", "model.num_layers=1", "train.checkpoint_seconds=0"]
    recipe = load_recipe("baseline+cpu", [*sets, f"train.log_every={log_every}"])
    folder = RunFolder(tmp_path)
    trainer = pipeline.make_trainer(recipe, pipeline.load_data(tiny_data), folder, runtime)
    whole_loss = trainer._loss_of
    trainer._loss_of = lambda model, batch: (
        whole_loss(model, batch) * (float("nan") if trainer.position.step == 5 else 1.0)
    )
    with pytest.raises(RunError, match="step 6: the loss is nan"):
        trainer.run()
    batches, about = read_batches(tmp_path / "broken.safetensors")
    assert about["step"] == 6 and {step for step, _ in batches} == {4, 5}
    assert read_tensors(folder.checkpoint_file)[1]["step"] == 5


def test_a_budget_of_operations_ends_a_run(
    tiny_data: Path, tmp_path: Path, runtime: Runtime
) -> None:
    sets = ["model.num_layers=1", "train.budget_steps=0", "train.budget_flops=2e9"]
    recipe = load_recipe("baseline+cpu", sets)
    folder = RunFolder(tmp_path)
    assert pipeline.train_run(recipe, tiny_data, folder, runtime)
    flops = [m["flops"] for m in folder.metrics()]
    assert flops[-1] >= 2e9 > flops[-2]
    assert flops[1] == pytest.approx(2 * flops[0])
