"""Parity: three runs that differ in speed alone, their verdict, stopping, continuing, refusing."""

import json
import math
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from underpar.build.levers import resolve_levers
from underpar.cli import app
from underpar.core.run_folder import RunFolder
from underpar.errors import BenchError, RunError, UnderparError
from underpar.lab.parity import VARIANTS, Request, judge, make_job, mean_last_loss, run_parity
from underpar.lab.runs import Job, train_words
from underpar.recipe import Recipe, load_recipe
from watcher import Watcher

STEPS = 8
TOKENS = 1024
SMALL = ("model.num_layers=1", "train.contexts=[32, 64]", "train.validate_every_seconds=0")


@pytest.mark.parametrize(
    ("ours", "rounding", "verdict"),
    [
        (0.004, 0.0045, "pass"),
        (-0.004, 0.0045, "pass"),
        (0.004, -0.0045, "pass"),
        # More than rounding does.
        (0.004, 0.003, "fail"),
        (-0.004, 0.003, "fail"),
        # More than anything may do, were rounding as bad.
        (0.006, 0.007, "fail"),
        # Next to nothing, both.
        (0.0009, 0.0002, "pass"),
        (-0.0009, 0.0, "pass"),
        (0.0, 0.0, "pass"),
        # Nothing on one side alone.
        (0.0011, 0.0002, "fail"),
        (0.0002, 0.0011, "pass"),
        (0.0002, 0.02, "pass"),
        (math.nan, 0.0, "fail"),
        (0.0, math.nan, "fail"),
    ],
)
def test_the_verdict(ours: float, rounding: float, verdict: str) -> None:
    verdicts = judge(3.0 + ours, 3.0, 3.0 - rounding)
    assert verdicts["verdict"] == verdict
    expected = pytest.approx((ours, rounding), abs=1e-12, nan_ok=True)
    assert (verdicts["fast_minus_plain_nats"], verdicts["plain_minus_split_nats"]) == expected


def test_losses_on_the_edge_pass() -> None:
    assert judge(0.005, 0.0, 0.005)["verdict"] == "pass"
    assert judge(0.001, 0.0, 0.0)["verdict"] == "fail"


def write_losses(folder: RunFolder, losses: dict[int, float]) -> None:
    folder.path.mkdir(parents=True, exist_ok=True)
    lines = [json.dumps({"step": step, "loss": loss}) for step, loss in losses.items()]
    folder.metrics_file.write_text("".join(f"{line}\n" for line in lines))


def test_the_last_quarter_is_averaged(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    losses = {step: 1.0 / step for step in range(1, 201)}
    write_losses(folder, losses)
    assert mean_last_loss(folder, 200) == pytest.approx(fmean(1 / s for s in range(151, 201)))
    del losses[170]
    write_losses(folder, losses)
    with pytest.raises(RunError, match="steps 151 to 200"):
        mean_last_loss(folder, 200)


def request_of(data: Path, out: Path, *overrides: str) -> Request:
    return Request("baseline+cpu", data, out, (*SMALL, *overrides), STEPS, TOKENS, "cpu")


def words_of(data: Path, out: Path, *more: str) -> list[str]:
    """The command line of `request_of`."""
    sets = [word for override in SMALL for word in ("--set", override)]
    words = ["lab", "parity", "baseline+cpu", "--data", str(data), "--out", str(out)]
    words += ["--device", "cpu", "--steps", str(STEPS), "--batch-tokens", str(TOKENS)]
    return [*words, *sets, *more, "--json"]


def test_requests_that_measure_nothing_are_refused(tmp_path: Path) -> None:
    with pytest.raises(BenchError, match="3 steps"):
        replace(request_of(tmp_path, tmp_path), num_steps=3)
    refused = CliRunner().invoke(app, [*words_of(tmp_path, tmp_path), "--batch-tokens", "1022"])
    assert str(refused.exception) == "1022 tokens per step: expected a multiple of 4"
    assert list(tmp_path.iterdir()) == []


def test_a_device_that_is_not_there_is_refused_first(tmp_path: Path) -> None:
    missing = "mps" if torch.cuda.is_available() else "cuda"
    out = tmp_path / "out"
    with pytest.raises(UnderparError, match=f"device '{missing}' is not available here"):
        run_parity(replace(request_of(tmp_path, out), device=missing))
    assert not out.exists()


def test_runs_differ_in_speed_alone(tmp_path: Path) -> None:
    request = request_of(tmp_path, tmp_path, "train.budget_seconds=9")
    recipes: list[Recipe] = []
    for name, variant in VARIANTS.items():
        job = make_job(request, name)
        recipe = resolve_levers(load_recipe("baseline+cpu", job.overrides))
        assert recipe.hash == job.recipe_hash
        assert job.options == variant.options
        part = recipe.train
        assert part.num_micro_batches * part.micro_batch_tokens == TOKENS
        assert part.num_micro_batches == variant.num_micro_batches
        recipes.append(recipe)
    assert [recipe.train.num_micro_batches for recipe in recipes] == [1, 1, 4]
    part = recipes[0].train
    assert (part.budget_steps, part.budget_seconds, part.log_every) == (STEPS, 0, 1)
    assert part.contexts == part.micro_sizes == ()
    assert len({(r.train.seed, r.train.context, r.model, r.train.warmdown) for r in recipes}) == 1


class Device:
    """Starts runs that have ended at once; those of `done` leave weights."""

    def __init__(self, out: Path, code: int = 1, done: tuple[str, ...] = ()) -> None:
        self.out, self.code, self.done = out, code, done
        self.started: list[str] = []

    def __call__(self, job: Job) -> Any:
        self.started.append(job.name)
        (self.out / job.name / "train.log").write_text("one line\n")
        if job.name in self.done:
            RunFolder(self.out / job.name).validation_file.touch()
        return self

    def poll(self) -> int:
        """How it ended."""
        return self.code


@pytest.mark.parametrize(("code", "reason"), [(3, "exit code 3"), (0, "stopped before its end")])
def test_a_run_that_fails_is_shown_and_the_others_are_kept(
    code: int, reason: str, tmp_path: Path
) -> None:
    request = request_of(tmp_path, tmp_path)
    for expected in (["fast", "plain"], ["plain"]):
        device = Device(tmp_path, code, done=("fast",))
        with pytest.raises(RunError, match=rf"plain failed, {reason}: one line"):
            run_parity(request, launch=device)
        # Nothing is begun after a failure, and what is finished is not repeated.
        assert device.started == expected


def test_what_belongs_to_another_request_is_refused(tmp_path: Path) -> None:
    first = request_of(tmp_path, tmp_path)
    with pytest.raises(RunError, match="exit code 1"):
        run_parity(first, launch=Device(tmp_path))
    changes: list[dict[str, Any]] = [
        {"num_steps": STEPS + 1},
        {"overrides": (*SMALL, "train.seed=7")},
        {"data": tmp_path / "other"},
        {"device": "cuda"},
    ]
    for change in changes:
        device = Device(tmp_path)
        with pytest.raises(RunError, match="choose another --out"):
            run_parity(replace(first, **change), launch=device)
        assert device.started == []


class InProcess:
    """Trains inside the test's process; `launcher`, which starts processes, is tested elsewhere."""

    def __init__(self, request: Request) -> None:
        self.request = request

    def __call__(self, job: Job) -> Any:
        """Train a job to its end."""
        request = self.request
        words = train_words(job, request.recipe, request.data, request.out, request.device)
        self.code = CliRunner().invoke(app, words, catch_exceptions=False).exit_code
        return self

    def poll(self) -> int:
        """How it ended."""
        return self.code


def test_three_runs_are_made_compared_and_not_repeated(tiny_data: Path, tmp_path: Path) -> None:
    request, progress = request_of(tiny_data, tmp_path), Watcher()
    result = run_parity(request, progress, InProcess(request))
    assert progress.notes == [f"{name}: trained" for name in VARIANTS]
    assert json.loads((tmp_path / "parity.json").read_text()) == result
    losses = {}
    for name, variant in VARIANTS.items():
        lines = list(RunFolder(tmp_path / name).metrics())
        assert [line["step"] for line in lines] == list(range(1, STEPS + 1))
        losses[name] = fmean(line["loss"] for line in lines[-2:])
        assert result["runs"][name] == {
            "micro_batches": variant.num_micro_batches,
            "compiled": False,
            "attention": "sdpa",
            "loss_nats": losses[name],
        }
    # The same seed and tokens, on a CPU the same code too; cuts between micro-batches show.
    assert losses["fast"] == losses["plain"]
    assert 0 < abs(losses["plain"] - losses["split"]) < 0.1
    assert result["fast_minus_plain_nats"] == losses["fast"] - losses["plain"]
    assert result["plain_minus_split_nats"] == losses["plain"] - losses["split"]
    assert result["data_identity"] and result["steps"] == STEPS

    device = Device(tmp_path)
    (tmp_path / "parity.json").unlink()
    assert run_parity(request, launch=device) == result
    assert json.loads((tmp_path / "parity.json").read_text()) == result
    assert device.started == []
    # The command finds all runs finished.
    invoked = CliRunner().invoke(app, words_of(tiny_data, tmp_path))
    assert json.loads(invoked.stdout) == result
    assert invoked.exit_code == {"pass": 0, "fail": 1}[result["verdict"]]
