"""The loop: budgets, kill and resume with equal losses, signals, ranks, validation."""

import json
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from underpar.build.levers import resolve_levers
from underpar.core.run_folder import RunFolder, write_json
from underpar.core.runtime import Runtime
from underpar.core.tensor_files import read_tensors
from underpar.data.build import BuildOptions, build_data
from underpar.data.folder import load_data
from underpar.errors import RecipeError, RunError
from underpar.model.gpt import GPT
from underpar.model.network import Eager
from underpar.recipe import Recipe, load_recipe, to_toml
from underpar.stages.train import make_trainer, train
from underpar.train.evidence import read_account, read_chain
from underpar.train.feed import Feed
from underpar.train.guard import read_batches
from underpar.train.loop import Trainer
from underpar.train.validate import Validation, Validator

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
    assert train(load_recipe("baseline+cpu", OVERRIDES), tiny_data, folder, runtime)["finished"]
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
    sig: signal.Signals, whole: RunFolder, tiny_data: Path, tmp_path: Path, runtime: Runtime
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
    # Its successor is another process, this one.
    assert train(load_recipe("baseline+cpu", OVERRIDES), tiny_data, folder, runtime)["finished"]
    assert losses(folder) == losses(whole)
    ours, theirs = (read_tensors(f.weights_file)[0] for f in (folder, whole))
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    # The evidence tells of one run, in two starts.
    account = read_account(read_chain(folder.evidence_file))
    assert len(account.seconds) == STEPS and len(account.environments) == 2
    kept = {folder.kept_file(step) for step in account.kept_steps[1:]}
    assert kept == set(folder.kept_files()) != set()


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
    ours, theirs = (json.loads(f.validation_file.read_text()) for f in (folder, whole))
    for key in ("live_bpb", "average_bpb"):
        assert ours[key] == pytest.approx(theirs[key], rel=1e-4)


def test_a_finished_run_is_not_trained_again(
    whole: RunFolder, tiny_data: Path, runtime: Runtime
) -> None:
    before = whole.metrics_file.read_text()
    assert train(load_recipe("baseline+cpu", OVERRIDES), tiny_data, whole, runtime)["finished"]
    assert whole.metrics_file.read_text() == before


def test_a_finished_run_stays_that_of_the_machine_which_made_it(
    whole: RunFolder, tiny_data: Path, runtime: Runtime
) -> None:
    made_elsewhere = {**whole.read_json(whole.about_file), "device": "another"}
    write_json(whole.about_file, made_elsewhere)
    train(load_recipe("baseline+cpu", OVERRIDES), tiny_data, whole, runtime)
    assert whole.read_json(whole.about_file) == made_elsewhere


def test_another_recipe_is_refused_in_the_same_folder(
    whole: RunFolder, tiny_data: Path, runtime: Runtime
) -> None:
    with pytest.raises(RunError, match="choose another --out"):
        train(load_recipe("baseline+cpu"), tiny_data, whole, runtime)


def test_other_data_are_refused_and_leave_the_folder_alone(
    whole: RunFolder, corpus_file: Path, tmp_path: Path, runtime: Runtime
) -> None:
    build_data([corpus_file], tmp_path / "other", BuildOptions(512, 0.3))
    before = {p.name: p.read_bytes() for p in whole.path.iterdir() if p.is_file()}
    with pytest.raises(RunError, match="data_identity"):
        recipe = load_recipe("baseline+cpu", OVERRIDES)
        train(recipe, tmp_path / "other", whole, runtime)
    assert {p.name: p.read_bytes() for p in whole.path.iterdir() if p.is_file()} == before


def test_a_wrong_vocabulary_is_refused(tiny_data: Path, tmp_path: Path, runtime: Runtime) -> None:
    recipe = load_recipe("baseline+cpu", ["model.vocab_size=600"])
    with pytest.raises(RecipeError, match=r"600.*512"):
        train(recipe, tiny_data, RunFolder(tmp_path), runtime)


def test_ranks_must_share_the_batch(tiny_data: Path, tmp_path: Path) -> None:
    recipe = load_recipe("baseline+cpu", OVERRIDES)
    trainer = make_trainer(
        recipe,
        load_data(tiny_data),
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
    assert train(recipe, tiny_data, folder, runtime)["finished"]
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
    trainer = make_trainer(recipe, load_data(tiny_data), folder, runtime)

    class Broken(Eager):
        """Loses its loss in the sixth step."""

        def end(self, *args: Any) -> Any:
            return super().end(*args) * (float("nan") if trainer.position.step == 5 else 1.0)

    trainer.runner = Broken()
    with pytest.raises(RunError, match="step 6: the loss is nan"):
        trainer.run()
    batches, about = read_batches(tmp_path / "broken.safetensors")
    assert about["step"] == 6 and {step for step, _ in batches} == {4, 5}
    assert read_tensors(folder.checkpoint_file)[1]["step"] == 5


def test_a_high_loss_is_kept_out_of_checkpoints_until_it_falls_again(
    tiny_data: Path, tmp_path: Path, runtime: Runtime
) -> None:
    sets = ["train.budget_steps=12", "model.num_layers=1", "train.checkpoint_seconds=0"]
    folder = RunFolder(tmp_path)
    recipe = load_recipe("baseline+cpu", sets)
    trainer = make_trainer(recipe, load_data(tiny_data), folder, runtime)
    seen: list[int] = []

    class Unusual(Eager):
        """Reads unusual text in steps 6 to 8."""

        def end(self, *args: Any) -> Any:
            return super().end(*args) * (4.0 if 5 <= trainer.position.step < 8 else 1.0)

    trainer.runner = Unusual()
    about: dict[int, int] = {}

    def on_step(line: dict[str, Any]) -> None:
        seen.append(line["step"])
        if folder.checkpoint_file.exists():
            about[line["step"]] = int(read_tensors(folder.checkpoint_file)[1]["step"])

    assert trainer.run(on_step)
    assert seen == list(range(1, 13))
    assert [about[step] for step in (6, 7, 8, 9, 10)] == [5, 5, 5, 5, 9]


def test_a_budget_of_operations_ends_a_run(
    tiny_data: Path, tmp_path: Path, runtime: Runtime
) -> None:
    sets = ["model.num_layers=1", "train.budget_steps=0", "train.budget_flops=2e9"]
    recipe = load_recipe("baseline+cpu", sets)
    folder = RunFolder(tmp_path)
    assert train(recipe, tiny_data, folder, runtime)["finished"]
    flops = [m["flops"] for m in folder.metrics()]
    assert flops[-1] >= 2e9 > flops[-2]
    assert flops[1] == pytest.approx(2 * flops[0])


def trainer_of(recipe: Recipe, data: Path, path: Path, runtime: Runtime) -> Trainer:
    path.mkdir(exist_ok=True)
    return make_trainer(recipe, load_data(data), RunFolder(path), runtime)


def test_the_end_is_priced_before_and_after_averaging(
    whole: RunFolder, tiny_data: Path, runtime: Runtime
) -> None:
    validation = json.loads(whole.validation_file.read_text())
    last = list(whole.metrics())[-1]
    assert {key: validation[key] for key in ("step", "tokens", "seconds")} == {
        key: last[key] for key in ("step", "tokens", "seconds")
    }
    data = load_data(tiny_data)
    trainer = make_trainer(whole.read_recipe(), data, whole, runtime)
    trainer._resume()
    again = trainer.validator.run(trainer.model, read_tensors(whole.weights_file)[0])
    expected = again.as_dict() | {"validation_seconds": validation["validation_seconds"]}
    assert {key: validation[key] for key in expected} == expected
    assert validation["num_bytes"] == data.val.num_bytes
    assert validation["live_bpb"] != validation["average_bpb"]
    # The middle of a run is not priced unless asked for.
    assert not any("val_bpb" in line for line in whole.metrics())


def test_a_summary_says_what_the_weights_are_worth(
    tiny_data: Path, tmp_path: Path, runtime: Runtime
) -> None:
    sets = ["train.budget_steps=3", "model.num_layers=1"]
    recipe, folder = resolve_levers(load_recipe("baseline+cpu", sets)), RunFolder(tmp_path)
    summary = train(recipe, tiny_data, folder, runtime)
    validation = json.loads(folder.validation_file.read_text())
    assert summary["live_bpb"] == validation["live_bpb"] > 0
    # Nothing is averaged here.
    assert validation["average_bpb"] is None and "average_bpb" not in summary


class SlowValidator(Validator):
    """Takes 100 seconds of a clock that nothing else moves, but for the steps."""

    def __init__(self, whole: Validator, now: list[float]) -> None:
        self.whole, self.now = whole, now

    def run(self, model: GPT, average: Mapping[str, torch.Tensor] | None) -> Validation:
        """Wait, and price."""
        self.now[0] += 100.0
        return self.whole.run(model, average)


def test_17_the_training_clock_stands_still_while_the_held_out_text_is_priced(
    tiny_data: Path, tmp_path: Path, runtime: Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    sets = ["train.budget_steps=0", "train.budget_seconds=7", "train.validate_every_seconds=2"]
    recipe = load_recipe("baseline+cpu", [*sets, "model.num_layers=1", "levers.ema=true"])
    now = [5.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    trainer = trainer_of(recipe, tiny_data, tmp_path, runtime)
    trainer.validator = SlowValidator(trainer.validator, now)

    class Slow(Eager):
        """Takes half a second per micro-batch; a step has two of them."""

        def end(self, *args: Any) -> Any:
            now[0] += 0.5
            return super().end(*args)

    trainer.runner = Slow()
    assert trainer.run()
    lines = list(trainer.folder.metrics())
    assert [line["seconds"] for line in lines] == [1, 2, 3, 4, 5, 6, 7]
    assert trainer.position.seconds == 7
    priced = [line["step"] for line in lines if {"val_bpb", "average_val_bpb"} <= line.keys()]
    assert priced == [2, 4, 6]
    assert [line.get("validate_seconds", 0) for line in lines] == [0, 100, 100, 200, 200, 300, 300]
    speeds = {line["tokens_per_second"] for line in lines}
    assert speeds == {trainer.loader.step_tokens}
    assert json.loads(trainer.folder.validation_file.read_text())["seconds"] == 7


def test_validation_changes_no_bit_of_a_run_stopped_or_not(
    tiny_data: Path, tmp_path: Path, runtime: Runtime
) -> None:
    # Every logged step is due, and not every step is logged.
    sets = ["train.budget_steps=8", "train.log_every=2", "train.rewarm_steps=2"]
    sets += ["model.num_layers=2", "train.micro_batch_tokens=256", "levers.ema=true"]
    sets += ["levers.smear.init=0.3"]
    sets += ["levers.loop={first=1, last=1, start=0.5}", 'train.stages=["32@0.5", "64@1"]']
    plain = load_recipe("baseline+cpu", sets)
    often = load_recipe("baseline+cpu", [*sets, "train.validate_every_seconds=1e-9"])
    unseen = trainer_of(plain, tiny_data, tmp_path / "unseen", runtime)
    seen = trainer_of(often, tiny_data, tmp_path / "seen", runtime)
    stopped = trainer_of(often, tiny_data, tmp_path / "stopped", runtime)
    assert unseen.run() and seen.run()
    assert not stopped.run(lambda line: line["step"] == 4)
    assert not stopped.folder.validation_file.exists()
    again = trainer_of(often, tiny_data, tmp_path / "stopped", runtime)
    assert again.run()
    keys = ("step", "loss", "lr_scale", "norm", "tokens", "flops", "context", "epochs")
    curves = [
        [[line[key] for key in keys] for line in trainer.folder.metrics()]
        for trainer in (unseen, seen, again)
    ]
    assert curves[0] == curves[1] == curves[2]
    values = [[line["val_bpb"] for line in trainer.folder.metrics()] for trainer in (seen, again)]
    assert len(values[0]) == 4 and values[0] == values[1]
    for trainer in (seen, again):
        ours, theirs = (t.optimizer.state() for t in (trainer, unseen))
        assert ours.keys() == theirs.keys()
        assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
        ours, theirs = (read_tensors(t.folder.weights_file)[0] for t in (trainer, unseen))
        assert ours.keys() == theirs.keys()
        assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


def test_the_forecast_is_logged_in_bits_per_byte_and_survives_a_stop(
    whole: RunFolder, tiny_data: Path, tmp_path: Path, runtime: Runtime
) -> None:
    lines = list(whole.metrics())
    # Steps begin at 0, 1/30...: the tenth is the first at 0.3.
    assert [line["step"] for line in lines if "forecast_train_bpb" in line] == list(range(10, 31))
    train = load_data(tiny_data).train
    late = lines[-1]["forecast_train_bpb"]
    bits_per_byte = lines[-1]["loss"] / math.log(2) * train.num_tokens / train.num_bytes
    assert late == pytest.approx(bits_per_byte, rel=0.2)
    sets = ["train.budget_steps=12", "model.num_layers=1", "train.micro_batch_tokens=128"]
    sets += ["train.validate_every_seconds=1e-9"]
    recipe = load_recipe("baseline+cpu", sets)
    unbroken = trainer_of(recipe, tiny_data, tmp_path / "unbroken", runtime)
    stopped = trainer_of(recipe, tiny_data, tmp_path / "stopped", runtime)
    assert unbroken.run() and not stopped.run(lambda line: line["step"] == 8)
    again = trainer_of(recipe, tiny_data, tmp_path / "stopped", runtime)
    assert again.run()
    for name in ("forecast_bpb", "forecast_train_bpb"):
        ours, theirs = ([m.get(name) for m in t.folder.metrics()] for t in (again, unbroken))
        assert ours == theirs and ours[-1] is not None
