"""Repeated training: honest runs pass, and no edit of run, chain or checkpoints does."""

import dataclasses
import hashlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from chains import Entries, forge, made_elsewhere, other_start
from commands import invoke, run
from tiny import TinyRun
from underpar.audit.case import Case, Limits
from underpar.audit.clock import training_time
from underpar.audit.finding import FAIL, NOT_SHOWN, PASS, Finding, judge
from underpar.audit.retrain import Segment, deal, training
from underpar.build.levers import resolve_levers
from underpar.core.run_folder import RunFolder, write_json
from underpar.core.runtime import Clock, Runtime
from underpar.core.tensor_files import read_tensors, save_tensors
from underpar.data.folder import DataFolder, data_identity, hash_file, load_data
from underpar.data.shards import pick_documents
from underpar.errors import RunError, UnderparError
from underpar.recipe import Recipe, load_recipe
from underpar.stages.audit import AuditRequest, open_case
from underpar.stages.train import make_trainer, train
from underpar.train.checkpoint import Position, read_checkpoint
from underpar.train.evidence import hash_parts, hash_tensors, read_account, read_chain

ALL = 1000
SETS = ["model.num_layers=1", "train.budget_steps=12", "train.checkpoint_seconds=0"]
SETS += ["levers.ema=true"]


def recipe_of(*sets: str) -> Recipe:
    return resolve_levers(load_recipe("baseline+cpu", [*SETS, *sets]))


def trained(path: Path, data: DataFolder, runtime: Runtime, num_kept: int = 3) -> RunFolder:
    """A run with `num_kept` kept checkpoints, without what an audit reads besides."""
    folder = RunFolder(path)
    path.mkdir()
    folder.write_recipe(recipe_of())
    assert make_trainer(recipe_of(), data, folder, runtime, num_kept).run()
    return folder


@pytest.fixture(scope="module")
def honest(
    tiny_data: Path, tmp_path_factory: pytest.TempPathFactory, runtime: Runtime
) -> RunFolder:
    path = tmp_path_factory.mktemp("runs") / "honest"
    return trained(path, load_data(tiny_data), runtime)


@pytest.fixture
def copied(honest: RunFolder, tmp_path: Path) -> RunFolder:
    shutil.copytree(honest.path, tmp_path / "copy")
    return RunFolder(tmp_path / "copy")


@pytest.fixture(scope="module")
def case(tiny_run: TinyRun, runtime: Runtime) -> Case:
    return open_case(tiny_run.folder, runtime, AuditRequest(tiny_run.data, seed=0))


def judged(case: Case, folder: RunFolder, num_steps: int | None = ALL) -> Finding:
    """The finding about the training of a folder; an error of the rule is a fail."""
    changed = dataclasses.replace(
        case,
        folder=folder,
        num_retrained=num_steps,
        open_trainer=lambda: make_trainer(folder.read_recipe(), case.data, folder, case.runtime),
    )
    try:
        return training(changed)
    except UnderparError as error:
        # As the loop over all rules does.
        return judge("training", False, str(error))


def test_steps_are_dealt_out_over_all_segments() -> None:
    rng = np.random.default_rng(0)
    assert deal([0, 4, 5, 9], 5, rng) == [Segment(0, 4, 2), Segment(4, 5, 1), Segment(5, 9, 2)]
    assert [s.num_steps for s in deal([0, 4, 5, 9], ALL, rng)] == [4, 1, 4]
    few = [tuple(s.num_steps for s in deal([0, 4, 8, 12], 1, rng)) for _ in range(30)]
    assert set(few) == {(1, 0, 0), (0, 1, 0), (0, 0, 1)}


@pytest.mark.parametrize(("num_steps", "repeated"), [(1, 1), (6, 6), (ALL, 12)])
def test_an_honest_run_repeats_bit_for_bit(
    case: Case, honest: RunFolder, num_steps: int, repeated: int
) -> None:
    finding = judged(case, honest, num_steps)
    assert finding.verdict == PASS, finding.summary
    assert f"{repeated} of 12 steps repeated from 4 checkpoints" in finding.summary
    assert finding.evidence["exact"] and finding.evidence["loss_difference_nats"] == 0
    # Even a single step is followed by a hash of the weights.
    assert finding.evidence["hashes_compared"] > 4


def test_elsewhere_an_honest_run_passes_if_it_is_the_same_bit_for_bit(
    case: Case, copied: RunFolder
) -> None:
    forge(copied, made_elsewhere)
    finding = judged(case, copied)
    assert finding.verdict == PASS and finding.evidence["exact"]


def bend_weights(folder: RunFolder) -> None:
    """A kept checkpoint a little off the way that led to it, with a hash that fits."""
    step = max(int(file.stem.removeprefix("step-")) for file in folder.kept_files())
    file = folder.kept_file(step)
    tensors, about = read_tensors(file)
    name = "model/embedding.weight"
    bent = tensors | {name: tensors[name] * (1 + 1e-6)}
    save_tensors(file, bent, about)
    model = {n.removeprefix("model/"): t for n, t in bent.items() if n.startswith("model/")}

    def change(entries: Entries) -> Entries:
        for entry in entries:
            if entry["kind"] == "checkpoint" and entry["position"]["step"] == step:
                entry["parts"]["model"] = hash_tensors(model)
        return entries

    forge(folder, change)


@pytest.mark.parametrize("is_elsewhere", [False, True])
@pytest.mark.parametrize("edit", [lambda f: forge(f, other_start), bend_weights])
def test_a_small_difference_is_no_pass_whatever_machine_is_named(
    case: Case, copied: RunFolder, edit: Callable[[RunFolder], None], is_elsewhere: bool
) -> None:
    edit(copied)
    if is_elsewhere:
        forge(copied, made_elsewhere)
    finding = judged(case, copied)
    assert finding.verdict == (NOT_SHOWN if is_elsewhere else FAIL), finding.summary
    assert ("another machine" in finding.summary) == is_elsewhere


def test_a_forged_place_in_the_schedule_fails(case: Case, copied: RunFolder) -> None:
    step = min(int(file.stem.removeprefix("step-")) for file in copied.kept_files())
    tensors, about = read_tensors(copied.kept_file(step))
    save_tensors(copied.kept_file(step), tensors, about | {"flops": 0.0})

    def change(entries: Entries) -> Entries:
        for entry in entries:
            if entry["kind"] == "checkpoint" and entry["position"]["step"] == step:
                entry["position"]["flops"] = 0.0
        return entries

    forge(copied, change)
    finding = judged(case, copied)
    assert finding.verdict == FAIL and "another position" in finding.summary


def test_a_clock_that_is_far_too_slow_is_not_shown(
    case: Case, tmp_path: Path, runtime: Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = Clock.read
    with monkeypatch.context() as patch:
        patch.setattr(Clock, "read", lambda c: {n: 1e-9 * s for n, s in read(c).items()})
        folder = trained(tmp_path / "cheat", case.data, runtime)
    few = Limits(train_seconds=1e-6)
    assert max(read_account(read_chain(folder.evidence_file)).seconds) < few.train_seconds
    assert judged(case, folder).verdict == PASS
    finding = judged(dataclasses.replace(case, limits=few), folder)
    assert finding.verdict == NOT_SHOWN and "on the machine of the run" in finding.summary


def test_without_evidence_training_and_time_are_not_shown(case: Case, copied: RunFolder) -> None:
    assert training_time(dataclasses.replace(case, folder=copied)).verdict == PASS
    copied.evidence_file.unlink()
    assert judged(case, copied).verdict == NOT_SHOWN
    assert training_time(dataclasses.replace(case, folder=copied)).verdict == NOT_SHOWN


def test_without_repeated_steps_or_checkpoints_training_is_not_shown(
    case: Case, copied: RunFolder
) -> None:
    assert judged(case, copied, 0).verdict == NOT_SHOWN
    min(copied.kept_files()).unlink()
    assert judged(case, copied).verdict == NOT_SHOWN


def test_a_run_of_a_gpu_is_not_shown_on_a_cpu(case: Case, copied: RunFolder) -> None:
    def on_gpu(entries: Entries) -> Entries:
        entries[0]["environment"]["device"] = "NVIDIA H200"
        return entries

    forge(copied, on_gpu)
    finding = judged(case, copied)
    assert finding.verdict == NOT_SHOWN and "NVIDIA H200" in finding.summary


def change_line(folder: RunFolder) -> None:
    """A better loss in one line of metrics."""
    lines = folder.metrics_file.read_text().splitlines(keepends=True)
    line = json.loads(lines[6])
    lines[6] = json.dumps(line | {"loss": line["loss"] - 0.01}) + "\n"
    folder.metrics_file.write_text("".join(lines))


def rehash_lines(folder: RunFolder) -> None:
    lines = iter(folder.metrics_file.read_text().splitlines(keepends=True))

    def change(entries: Entries) -> Entries:
        for entry in entries:
            if entry["kind"] == "metrics":
                entry["sha256"] = hashlib.sha256(next(lines).encode()).hexdigest()
        return entries

    forge(folder, change)


def change_weights(folder: RunFolder) -> None:
    """Other weights, as after a few steps on other text."""
    tensors, about = read_tensors(folder.weights_file)
    save_tensors(folder.weights_file, {n: 1.01 * t for n, t in tensors.items()}, about)


def rehash_weights(folder: RunFolder) -> None:
    def change(entries: Entries) -> Entries:
        entries[-1]["weights_sha256"] = hash_file(folder.weights_file)
        return entries

    forge(folder, change)


def change_checkpoint(folder: RunFolder) -> None:
    file = max(folder.kept_files())
    tensors, about = read_tensors(file)
    name = next(name for name in tensors if name.startswith("model/"))
    save_tensors(file, tensors | {name: 1.01 * tensors[name]}, about)


def cut_entry(folder: RunFolder) -> None:
    lines = folder.evidence_file.read_text().splitlines(keepends=True)
    folder.evidence_file.write_text("".join(lines[:5] + lines[6:]))


def cut_end(folder: RunFolder) -> None:
    lines = folder.evidence_file.read_text().splitlines(keepends=True)
    folder.evidence_file.write_text("".join(lines[:-1]))


def splice(folder: RunFolder) -> None:
    """Leave a step out of the chain and out of the metrics."""
    steps = [json.loads(line)["step"] for line in folder.metrics_file.open()]
    lines = folder.metrics_file.read_text().splitlines(keepends=True)
    folder.metrics_file.write_text("".join(lines[:4] + lines[5:]))
    assert steps[4] == 5

    def change(entries: Entries) -> Entries:
        places = [i for i, e in enumerate(entries) if e["kind"] == "metrics"]
        return entries[: places[4]] + entries[places[4] + 1 :]

    forge(folder, change)


def other_seed(folder: RunFolder) -> None:
    def change(entries: Entries) -> Entries:
        entries[0]["seed"] = 7
        return entries

    forge(folder, change)


def faster_clock(folder: RunFolder) -> None:
    """Half of the seconds, in chain, metrics and validation.json, but not in checkpoints."""
    metrics = [json.loads(line) for line in folder.metrics_file.open()]
    halved = [json.dumps(m | {"seconds": m["seconds"] / 2}) + "\n" for m in metrics]
    folder.metrics_file.write_text("".join(halved))
    end = folder.read_json(folder.validation_file)
    write_json(folder.validation_file, end | {"seconds": end["seconds"] / 2})

    def change(entries: Entries) -> Entries:
        for entry in entries:
            if "seconds" in entry:
                entry["seconds"] = [s / 2 for s in entry["seconds"]]
            if "position" in entry:
                entry["position"]["seconds"] /= 2
        return entries

    forge(folder, change)
    rehash_lines(folder)


def fewer_tokens(folder: RunFolder) -> None:
    """Half of the tokens per step, in metrics and validation.json."""
    metrics = [json.loads(line) for line in folder.metrics_file.open()]
    halved = [json.dumps(m | {"tokens": m["tokens"] // 2}) + "\n" for m in metrics]
    folder.metrics_file.write_text("".join(halved))
    end = folder.read_json(folder.validation_file)
    write_json(folder.validation_file, end | {"tokens": end["tokens"] // 2})


@pytest.mark.parametrize(
    ("edits", "why"),
    [
        ([change_line], "metrics.jsonl has other lines"),
        ([change_line, rehash_lines], "step 7 gives loss"),
        ([fewer_tokens, rehash_lines], "the log says otherwise"),
        ([change_weights], "weights.safetensors is not the file"),
        ([change_weights, rehash_weights], "does not follow from the last checkpoint"),
        ([change_checkpoint], "is not the checkpoint of the chain"),
        ([cut_entry], "does not follow"),
        ([cut_end], "from its start to its end"),
        ([splice], "another step or clock"),
        ([other_seed], "seed is 1337"),
        ([faster_clock], "is not the checkpoint of the chain"),
    ],
    ids=lambda value: "+".join(e.__name__ for e in value) if isinstance(value, list) else "",
)
def test_an_edited_run_fails(
    case: Case, copied: RunFolder, edits: list[Callable[[RunFolder], None]], why: str
) -> None:
    for edit in edits:
        edit(copied)
    finding = judged(case, copied)
    assert finding.verdict == FAIL
    assert why in finding.summary


def test_weights_that_were_tuned_at_the_end_fail_by_default(case: Case, copied: RunFolder) -> None:
    # Checkpoint, final weights and chain all have the tuned weights; only the steps say otherwise.
    tensors, about = read_tensors(copied.checkpoint_file)
    is_tuned = {n for n, t in tensors.items() if n.startswith(("model/", "average0/")) and t.ndim}
    tuned = {n: 1.01 * t if n in is_tuned else t for n, t in tensors.items()}
    save_tensors(copied.checkpoint_file, tuned, about)
    change_weights(copied)
    run_of = Position(recipe_of().hash, data_identity(case.data))
    _, parts = read_checkpoint(copied.checkpoint_file, run_of)

    def change(entries: Entries) -> Entries:
        last = [entry for entry in entries if entry["kind"] == "checkpoint"][-1]
        last["parts"] = hash_parts(parts)
        return entries

    forge(copied, change)
    rehash_weights(copied)
    finding = judged(case, copied, None)
    assert finding.verdict == FAIL
    assert "the state after step 12 has other tensors" in finding.summary


@pytest.mark.parametrize("is_elsewhere", [False, True])
def test_a_run_that_trained_on_held_out_text_fails(
    case: Case, tmp_path: Path, runtime: Runtime, is_elsewhere: bool
) -> None:
    # Chain, run and checkpoints all name the audited data.
    leaked = dataclasses.replace(case.data, train=pick_documents(case.data.val, [0, 1, 2]))
    folder = trained(tmp_path / "cheat", leaked, runtime)
    if is_elsewhere:
        forge(folder, made_elsewhere)
    finding = judged(case, folder, 1)
    assert finding.verdict == FAIL
    assert "gives loss" in finding.summary


def test_a_continued_run_with_few_lines_repeats(
    case: Case, tiny_data: Path, tmp_path: Path, runtime: Runtime
) -> None:
    recipe, folder = recipe_of("train.log_every=4"), RunFolder(tmp_path / "run")
    trainer = make_trainer(recipe, case.data, folder, runtime)
    folder.path.mkdir()
    # Stopped after step 8; the next start takes the rest, and a third one has nothing to do.
    assert not trainer.run(lambda line: line["step"] == 8)
    for _ in range(2):
        assert train(recipe, tiny_data, folder, runtime)["finished"]
    account = read_account(read_chain(folder.evidence_file))
    assert list(account.metrics) == [4, 8, 12] and len(account.seconds) == 12
    assert list(account.environments)[-1] in (8, 12)
    finding = judged(case, folder)
    assert finding.verdict == PASS, finding.summary
    assert finding.evidence["exact"]


@pytest.mark.parametrize("log_every", [2, 10_000])
def test_a_run_with_a_budget_in_seconds_repeats(
    case: Case, tmp_path: Path, runtime: Runtime, log_every: int
) -> None:
    sets = ("train.budget_steps=0", "train.budget_seconds=0.5", f"train.log_every={log_every}")
    folder = RunFolder(tmp_path / "run")
    folder.path.mkdir()
    folder.write_recipe(recipe_of(*sets))
    assert make_trainer(recipe_of(*sets), case.data, folder, runtime).run()
    finding = judged(case, folder)
    assert finding.verdict == PASS, finding.summary
    assert finding.evidence["exact"]


def test_a_run_continued_without_its_evidence_is_not_believed(
    case: Case, copied: RunFolder, tiny_data: Path, runtime: Runtime
) -> None:
    copied.evidence_file.unlink()
    assert train(recipe_of(), tiny_data, copied, runtime)["finished"]
    finding = judged(case, copied)
    assert finding.verdict == NOT_SHOWN and "begun without evidence" in finding.summary


def test_the_command_line_asks_for_steps_and_checkpoints(
    tiny_data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sets = [word for value in SETS for word in ("--set", value)]
    out = ("--data", tiny_data, "--out", tmp_path / "run", "--device", "cpu")
    run("train", "baseline+cpu", *out, *sets, "--keep", 1)
    assert len(RunFolder(tmp_path / "run").kept_files()) == 1
    requests = []

    def audit_run(folder: RunFolder, runtime: Runtime, request: AuditRequest, *_: object) -> None:
        requests.append(request)
        raise RunError("not audited")

    monkeypatch.setattr("underpar.stages.audit.audit_run", audit_run)
    for words in ([], ["--retrain", 3, "--seed", 5]):
        with pytest.raises(RunError, match="not audited"):
            invoke("audit", tmp_path / "run", "--device", "cpu", *words)
    assert [(r.num_retrained, r.seed) for r in requests] == [(None, None), (3, 5)]


def test_random_numbers_of_the_caller_are_left_alone(case: Case, honest: RunFolder) -> None:
    before = torch.get_rng_state()
    judged(case, honest, 1)
    assert torch.equal(torch.get_rng_state(), before)
