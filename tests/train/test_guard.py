"""Broken losses, their batches, and runs that fall behind."""

import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from underpar.core.run_folder import RunFolder
from underpar.core.tensor_files import save_tensors
from underpar.data.folder import load_data
from underpar.data.loader import Loader, MicroBatch
from underpar.errors import RunError
from underpar.train.guard import (
    RISEN_LOSSES,
    Guard,
    Reference,
    read_batches,
    read_reference,
    save_batches,
)

# Losses of steps 1 to 5 of PR 2014, seed 0: the normal spike.
PUBLISHED_START = [9.0105, 12.9462, 10.2571, 8.7591, 8.0009]


@pytest.fixture
def loader(tiny_data: Path) -> Loader:
    plan = [MicroBatch(256, 64), MicroBatch(256, 128)]
    return Loader(load_data(tiny_data).train, plan, seed=3)


def steady(loss: float, steps: int = 150) -> Guard:
    guard = Guard(8192)
    assert [guard.check(step, loss) for step in range(1, steps + 1)] == [None] * steps
    return guard


def test_the_spike_of_step_two_is_normal() -> None:
    guard = Guard(8192)
    assert [guard.check(i, loss) for i, loss in enumerate(PUBLISHED_START, 1)] == [None] * 5


@pytest.mark.parametrize("loss", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("step", [1, 151])
def test_a_loss_that_is_no_number_stops_at_once(step: int, loss: float) -> None:
    guard = Guard(8192) if step == 1 else steady(3.0)
    assert str(loss) in (guard.check(step, loss) or "")
    assert guard.healthy_step == step - 1


def last_check(guard: Guard, first: int, losses: list[float]) -> str | None:
    """The answer to the last of these losses; every answer before it is None."""
    *before, last = [guard.check(first + i, loss) for i, loss in enumerate(losses)]
    assert before == [None] * len(before)
    return last


def test_above_twice_ln_v_for_some_steps_stops_at_any_step() -> None:
    ceiling = 2 * math.log(8192)
    guard = Guard(8192)
    assert last_check(guard, 2, [ceiling - 0.01] * 60) is None
    assert "2 ln V" in (last_check(guard, 62, [ceiling + 0.01] * RISEN_LOSSES) or "")
    assert last_check(Guard(8192), 2, [ceiling + 0.01] * (RISEN_LOSSES - 1)) is None


def test_a_rise_that_stays_is_told_from_other_text() -> None:
    assert last_check(steady(3.0), 151, [5.9] * 100) is None
    assert last_check(steady(3.0), 151, [6.1] * (RISEN_LOSSES - 1)) is None
    reason = last_check(steady(3.0), 151, [6.1] * RISEN_LOSSES)
    assert "3.00 to 6.10" in (reason or "") and f"{RISEN_LOSSES} losses in a row" in (reason or "")
    # A table: the loss jumps and falls again, many times.
    table = [8.0, 7.0, 6.5, 6.2, 4.0] * 40
    assert last_check(steady(3.0), 151, table) is None
    # The same rise while nothing has settled, or with nothing to compare with.
    assert last_check(steady(3.0, 70), 71, [6.1] * 30) is None
    assert last_check(Guard(8192), 500, [6.1] * 30) is None


def test_a_step_counts_once_however_often_it_is_asked_about() -> None:
    guard = Guard(8192)
    for _ in range(20):
        assert guard.check(101, 3.0) is None
    assert last_check(guard, 102, [7.0] * 30) is None
    guard = steady(3.0)
    for _ in range(2 * RISEN_LOSSES):
        assert guard.check(151, 7.0) is None
    assert guard.num_high == 1
    assert guard.check(152, 3.0) is None and guard.num_high == 0


def test_a_rise_saves_the_batches_of_its_first_step() -> None:
    guard = steady(3.0)
    assert last_check(guard, 151, [7.0] * RISEN_LOSSES) is not None
    assert guard.suspects(150 + RISEN_LOSSES) == range(149, 151)


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 2**32 - 1), st.floats(0.1, 0.5))
def test_noise_around_a_falling_loss_never_stops(seed: int, noise: float) -> None:
    guard = Guard(8192)
    jitter = np.random.default_rng(seed).normal(0, noise, 600)
    falling = 3.0 + 6.0 * np.arange(1, 601) ** -0.5
    assert all(guard.check(i + 1, float(x)) is None for i, x in enumerate(falling + jitter))


def test_batches_come_back_as_they_were(loader: Loader, tmp_path: Path) -> None:
    places = [(7, 0), (7, 1), (11, 1)]
    path = tmp_path / "broken.safetensors"
    save_batches(path, {p: loader.batch(*p) for p in places}, {"why": "test"})
    batches, about = read_batches(path)
    assert list(batches) == places and about == {"why": "test"}
    for place, ours in batches.items():
        theirs = loader.batch(*place)
        for name in ("inputs", "targets"):
            assert torch.equal(getattr(ours, name), getattr(theirs, name))
        for name in ("cu", "positions"):
            a, b = getattr(ours.segments, name), getattr(theirs.segments, name)
            assert torch.equal(a, b) and a.dtype == b.dtype
        assert ours.segments.max_len == theirs.segments.max_len
        assert ours.segments.context == theirs.segments.context
    assert ours.inputs.dtype == torch.int64
    assert [f.name for f in tmp_path.iterdir()] == [path.name]


@pytest.mark.parametrize("name", ["model/embedding.weight", "0/0/inputs", "x", "0/0"])
def test_another_file_is_refused(name: str, tmp_path: Path) -> None:
    path = tmp_path / "other.safetensors"
    save_tensors(path, {name: torch.zeros(3)}, {})
    with pytest.raises(RunError, match="no batches"):
        read_batches(path)


def test_a_failure_saves_every_step_that_may_be_its_cause(loader: Loader, tmp_path: Path) -> None:
    guard = Guard(512)
    assert guard.check(10, 5.0) is None
    reason = guard.check(12, math.nan)
    assert reason is not None
    path = tmp_path / "broken.safetensors"
    error = guard.save_failure(path, loader, 12, reason, context=32)
    assert isinstance(error, RunError)
    assert "\n" not in str(error)
    for part in (
        "step 12",
        "nan",
        str(path),
        "train.matrix_lr",
        "train.piece_tokens",
        "since step 10",
    ):
        assert part in str(error)
    batches, about = read_batches(path)
    # Logged step 10 is the loader's step 9: its update made the weights of step 11.
    assert list(batches) == [(s, m) for s in (9, 10, 11) for m in (0, 1)]
    assert all(batch.segments.context == 32 for batch in batches.values())
    assert about == {"step": 12, "reason": "the loss is nan"}


def curve(offset: float = 0.0, until: float = 1.0, num: int = 200) -> list[tuple[float, float]]:
    points = ((i / num, 3.0 - i / num + offset) for i in range(num))
    return [(p, loss) for p, loss in points if p < until]


def stops(reference: Reference, points: list[tuple[float, float]]) -> list[float]:
    return [p for p, loss in points if reference.check(p, loss) is not None]


def test_a_run_far_behind_stops_once_it_can_be_judged() -> None:
    assert stops(Reference(curve()), curve(0.15))[0] == 0.3
    assert stops(Reference(curve()), curve(0.09)) == []
    assert stops(Reference(curve(), margin=0.05), curve(0.09))[0] == 0.3
    assert stops(Reference(curve()), curve(-1.0)) == []


def test_runs_that_log_at_different_steps_are_comparable() -> None:
    reference = Reference(curve(num=1000))
    for p, loss in curve(0.2):
        reference.add(p, loss)
    assert reference.gap() == pytest.approx(0.2, abs=0.005)


def test_one_bad_batch_is_no_reason() -> None:
    points = curve()
    points[100] = (points[100][0], 4.0)
    assert stops(Reference(curve()), points) == []


def test_what_was_not_logged_is_not_judged() -> None:
    assert stops(Reference(curve(until=0.35)), curve(0.5))[-1] < 0.45
    assert stops(Reference(curve(num=20)), curve(0.5)) == []
    assert stops(Reference(curve()), curve(0.5, num=20)) == []
    assert Reference(curve()).gap() is None


def test_steps_taken_again_count_once() -> None:
    reference = Reference(curve())
    for p, loss in curve(5.0, until=0.6):
        reference.add(p, loss)
    for p, loss in [(p, loss) for p, loss in curve() if p >= 0.3]:
        reference.add(p, loss)
    assert reference.gap() == pytest.approx(0)


def test_a_reference_is_read_from_a_run(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    with pytest.raises(RunError, match="no losses"):
        read_reference(folder)
    lines = [{"step": i, "progress": p, "loss": loss} for i, (p, loss) in enumerate(curve())]
    lines[50]["loss"] = math.nan
    folder.metrics_file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    reference = read_reference(folder, 0.3)
    assert stops(reference, curve(0.31))[0] == 0.3
    folder.metrics_file.write_text('{"step": 1}\n')
    with pytest.raises(RunError, match="progress"):
        read_reference(folder)


@pytest.mark.parametrize("margin", [-1.0, float("nan"), float("inf")])
def test_a_margin_below_nothing_is_refused(margin: float, tmp_path: Path) -> None:
    with pytest.raises(RunError, match=r"margin .*0 or more"):
        read_reference(RunFolder(tmp_path), margin)
