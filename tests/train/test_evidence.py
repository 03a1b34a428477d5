"""The hash chain: every link holds, checkpoints are thinned evenly, a kill loses only the end."""

import json
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from underpar.core.run_folder import RunFolder
from underpar.core.runtime import Runtime
from underpar.errors import RunError
from underpar.train.checkpoint import Position, save_checkpoint
from underpar.train.evidence import Evidence, hash_tensors, read_account, read_chain, thin

WEIGHTS = {"w": torch.arange(6.0)}


def parts(step: int) -> dict[str, dict[str, torch.Tensor]]:
    return {"model": {"w": WEIGHTS["w"] + step}, "optimizer": {}}


def open_evidence(folder: RunFolder, runtime: Runtime, num_kept: int = 2) -> Evidence:
    return Evidence(folder, {"recipe_hash": "recipe", "seed": 1}, runtime, num_kept)


def take_steps(evidence: Evidence, first: int, last: int) -> None:
    """Steps with a line each, and a checkpoint after every second one."""
    for step in range(first, last + 1):
        evidence.add_step(step / 10)
        evidence.add_metrics(f"line {step}\n", WEIGHTS)
        if step % 2 == 0:
            position = Position("recipe", "data", step=step, seconds=step / 10)
            evidence.add_checkpoint(position, parts(step))
            save_checkpoint(evidence.folder.checkpoint_file, position, parts(step))


@pytest.fixture
def folder(tmp_path: Path, runtime: Runtime) -> RunFolder:
    """A finished run of ten steps."""
    folder = RunFolder(tmp_path)
    evidence = open_evidence(folder, runtime)
    evidence.begin(Position("recipe", "data"), parts(0))
    take_steps(evidence, 1, 10)
    folder.weights_file.write_bytes(b"weights")
    evidence.end()
    return folder


def test_the_account_has_every_step_and_the_first_weights_after_a_checkpoint(
    folder: RunFolder,
) -> None:
    account = read_account(read_chain(folder.evidence_file))
    assert account.seconds == [step / 10 for step in range(1, 11)]
    assert list(account.checkpoints) == [0, 2, 4, 6, 8, 10]
    assert list(account.metrics) == list(range(1, 11))
    followed = [step for step, entry in account.metrics.items() if "weights" in entry]
    assert followed == [1, 3, 5, 7, 9]
    assert account.kept_steps == [0, 4, 8]
    assert {file.name for file in folder.kept_files()} == {
        "step-4.safetensors",
        "step-8.safetensors",
    }


@pytest.mark.parametrize("change", ["a figure", "an order", "a loss of the middle", "a repetition"])
def test_any_edit_breaks_a_link(folder: RunFolder, change: str) -> None:
    lines = folder.evidence_file.read_text().splitlines(keepends=True)
    changed = {
        "a figure": [*lines[:3], lines[3].replace("0.2", "0.1"), *lines[4:]],
        "an order": [*lines[:3], lines[4], lines[3], *lines[5:]],
        "a loss of the middle": [*lines[:3], *lines[4:]],
        "a repetition": [*lines[:4], *lines[3:]],
    }[change]
    assert changed != lines
    folder.evidence_file.write_text("".join(changed))
    with pytest.raises(RunError, match="does not follow"):
        read_chain(folder.evidence_file)


@pytest.mark.parametrize("text", ["[]\n", "{}\n", "no\n", '{"hash": 1}\n', "[" * 9999 + "\n"])
def test_other_files_are_refused(folder: RunFolder, text: str) -> None:
    folder.evidence_file.write_text(text)
    with pytest.raises(RunError, match=r"evidence\.jsonl"):
        read_chain(folder.evidence_file)


def test_a_kill_loses_what_follows_the_checkpoint(folder: RunFolder, runtime: Runtime) -> None:
    whole = read_chain(folder.evidence_file)
    # Killed while the entry of step 7 was written, so its line has no end.
    place = next(i for i, e in enumerate(whole) if e.get("position", {}).get("step") == 6)
    lines = folder.evidence_file.read_text().splitlines(keepends=True)
    folder.evidence_file.write_text("".join([*lines[: place + 2], lines[place + 2][:20]]))
    evidence = open_evidence(folder, runtime)
    evidence.resume(6)
    entries = read_chain(folder.evidence_file)
    assert entries[: place + 1] == whole[: place + 1]
    assert (entries[-1]["kind"], entries[-1]["step"]) == ("resume", 6)
    take_steps(evidence, 7, 10)
    evidence.end()
    account = read_account(read_chain(folder.evidence_file))
    assert account.seconds == [step / 10 for step in range(1, 11)]
    assert sorted(account.environments) == [0, 6]


def test_a_run_without_a_chain_gets_one_that_tells_no_start(
    tmp_path: Path, runtime: Runtime
) -> None:
    evidence = open_evidence(RunFolder(tmp_path), runtime)
    evidence.resume(6)
    evidence.folder.weights_file.write_bytes(b"weights")
    evidence.end()
    with pytest.raises(RunError, match="from its start to its end"):
        read_account(read_chain(evidence.folder.evidence_file))


def test_a_new_start_forgets_the_old_checkpoints(folder: RunFolder, runtime: Runtime) -> None:
    open_evidence(folder, runtime).begin(Position("recipe", "data"), parts(0))
    assert folder.kept_files() == []
    kinds = [json.loads(line)["kind"] for line in folder.evidence_file.open()]
    assert kinds == ["start", "checkpoint"]


@given(st.lists(st.integers(1, 50), min_size=1, max_size=200), st.integers(0, 10))
def test_thinning_keeps_the_newest_and_spreads_the_rest(gaps: list[int], most: int) -> None:
    steps = [sum(gaps[: i + 1]) for i in range(len(gaps))]
    kept = thin(steps, most)
    assert kept == sorted(set(kept)) and set(kept) <= set(steps)
    assert len(kept) == min(most, len(steps))
    assert most == 0 or kept[-1] == steps[-1]


def test_even_checkpoints_stay_even() -> None:
    for num_steps in range(1, 300):
        kept = [0, *thin(range(10, 10 * num_steps + 1, 10), 8)]
        widest = max(b - a for a, b in pairwise(kept))
        assert widest <= 10 * max(1, num_steps / 4)


def test_a_hash_tells_names_shapes_types_and_values_apart() -> None:
    w = torch.arange(6.0)
    others = [{"v": w}, {"w": w.view(2, 3)}, {"w": w.double()}, {"w": w + 1}, {"w": w, "v": w}]
    assert len({hash_tensors(tensors) for tensors in ({"w": w}, *others)}) == len(others) + 1
    assert hash_tensors({"w": w}) == hash_tensors({"w": torch.stack([w, w]).T.contiguous()[:, 0]})
    # A single number of any stride.
    corner = torch.arange(6.0).view(2, 3).T[:1, :1]
    assert hash_tensors({"w": corner}) == hash_tensors({"w": torch.zeros(1, 1)})
