"""kill -9 at random moments of every stage: nothing complete is lost, and the same command goes on.

Each trial copies what the stages before left, kills a command, starts it again, and compares with
what an undisturbed command made, bit for bit.
"""

import json
import os
import random
import shutil
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

import commands
from killing import Killer
from small_data import write_jsonl
from tiny import TinyRun
from underpar.core.locks import lock_folder
from underpar.core.run_folder import RunFolder
from underpar.core.tensor_files import read_tensors
from underpar.data.sources.corpus import demo_corpus, read_documents

Fails = Callable[..., str]

SETS = ["model.vocab_size=400", "model.num_layers=1", "data.holdout=0.15"]
SETS += ["train.budget_seconds=0", "train.budget_steps=6", "train.checkpoint_seconds=0"]
SETS += ["levers.ema=true", "levers.softcap=true", "levers.adapt_scales=true"]
# Killed in the fast suite: both continue from a state that they saved themselves.
FAST = ["train", "adapt"]
# What a command that was not killed may answer: done, or an audit that lacks evidence.
ENDED = (0, 3)


def essence(path: Path) -> Any:
    """What a file says, without seconds, which differ from run to run."""
    if path.suffix == ".safetensors":
        tensors, _ = read_tensors(path)
        return {name: (t.shape, t.numpy().tobytes()) for name, t in tensors.items()}
    if path.name == "metrics.jsonl":
        return [(m["step"], m["loss"]) for m in RunFolder(path.parent).metrics()]
    if path.name == "evidence.jsonl":
        # It hashes seconds and names each start; the audit judges it.
        return "a chain"
    if path.name == "audit.json":
        return [(f["rule"], f["verdict"]) for f in json.loads(path.read_text())["findings"]]
    if path.suffix == ".json":
        return {k: v for k, v in json.loads(path.read_text()).items() if "seconds" not in k}
    return "a page" if path.suffix == ".html" else path.read_bytes()


def outcome(folder: Path) -> dict[str, Any]:
    """What all finished files say; reading them shows that they are whole."""
    files = [f for f in folder.rglob("*") if f.is_file() and not is_passing(f.relative_to(folder))]
    return {str(f.relative_to(folder)): essence(f) for f in files}


def is_passing(path: Path) -> bool:
    """Whether a file is not a result: hidden while it is written, saved on the way, a log."""
    is_hidden = any(part.startswith(".") for part in path.parts)
    return is_hidden or ".partial" in path.name or path.name.startswith("events.out")


def leftovers(folder: Path) -> list[str]:
    """Files of commands that are not there any more."""
    return [f.name for f in folder.rglob("*") if f.name.startswith(".") or ".partial" in f.name]


class Road:
    """All stages from text to a report, in one folder, and what each of them found there."""

    def __init__(self, root: Path) -> None:
        self.work, self.before, self.killer = root / "work", root / "before", Killer(root)
        texts = [d.text[:600] for d in islice(read_documents([demo_corpus()]), 60)]
        docs = write_jsonl(root / "docs.jsonl", texts)
        book = root / "book.txt"
        book.write_text("A very short book. " * 3)
        data, run = self.work / "data", self.work / "run"
        model, coded = run / "model.upar", self.work / "book.upz"
        sets = [word for value in SETS for word in ("--set", value)]
        build = ["data", "build", docs, "--out", data, "--recipe", "baseline+cpu", "--workers", 1]
        audit = ["audit", run, "--documents", 2, "--code-tokens", 100, "--seed", 1]
        self.stages: dict[str, list[object]] = {
            "data": [*build, "--overwrite", *sets],
            "train": ["train", "baseline+cpu", "--data", data, "--out", run, *sets],
            "calibrate": ["calibrate", run],
            "quantize": ["quantize", run],
            "pack": ["pack", run],
            "score": ["score", model, "--data", data],
            "adapt": ["score", model, "--data", data, "--adapt"],
            "audit": audit,
            "compress": ["compress", model, book, coded],
            "decompress": ["decompress", model, coded, self.work / "book.txt"],
            "report": ["report", run],
        }
        self.seconds: dict[str, float] = {}
        self.wanted: dict[str, dict[str, Any]] = {}
        self.work.mkdir()

    def walk(self, last: str) -> None:
        """Run the stages up to `last` without a kill, as far as that was not done."""
        for stage, words in self.stages.items():
            if stage not in self.wanted:
                self.restore(next(reversed(self.wanted), None))
                [end] = self.killer.run(words)
                assert end.code in ENDED, end.output
                self.seconds[stage], self.wanted[stage] = end.seconds, outcome(self.work)
                shutil.copytree(self.work, self.before / stage)
            if stage == last:
                return

    def restore(self, stage: str | None) -> None:
        """The files as they were after a stage."""
        shutil.rmtree(self.work)
        shutil.copytree(self.before / stage, self.work) if stage else self.work.mkdir()

    def kill(self, stage: str, is_done: bool, dice: random.Random, most: int) -> int:
        """Kill a stage up to `most` times, start it again, compare; returns how often it died.

        It runs for the first time, or once more over its complete results.
        """
        self.walk(stage)
        order = [None, *self.stages]
        self.restore(stage if is_done else order[order.index(stage) - 1])
        earlier, wanted, num_killed = outcome(self.work), self.wanted[stage], 0
        for _ in range(dice.randint(1, most)):
            seconds = dice.uniform(0.0, self.seconds[stage])
            moments = [{"seconds": seconds}, {"event": dice.randint(0, 40)}]
            [end] = self.killer.run(self.stages[stage], **dice.choice(moments))
            assert end.code in (*ENDED, -9), end.output
            num_killed += end.code == -9
            left = outcome(self.work)
            # A kill between the two renames of an exchange: the old folder has its other name.
            aside = self.work / ".data.underpar-old"
            if aside.exists() and not (self.work / "data").exists():
                left |= {f"data/{name}": value for name, value in outcome(aside).items()}
            for name, before in earlier.items():
                assert left[name] in (before, wanted[name]), f"{stage} lost {name}"
        [end] = self.killer.run(self.stages[stage])
        assert end.code in ENDED, end.output
        assert outcome(self.work) == wanted
        assert leftovers(self.work) == []
        return num_killed


@pytest.fixture(scope="module")
def road(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Road]:
    made = Road(tmp_path_factory.mktemp("road"))
    yield made
    made.killer.close()


@pytest.mark.parametrize("stage", FAST)
def test_a_killed_stage_goes_on_to_the_same_result(road: Road, stage: str) -> None:
    seed = random.randrange(10**6)
    print("seed", seed)
    road.kill(stage, False, random.Random(seed), most=1)


@pytest.mark.slow
def test_fifty_kills_lose_nothing(road: Road) -> None:
    seed = random.randrange(10**6)
    print("seed", seed)
    dice, num_killed = random.Random(seed), 0
    while num_killed < 50:
        stage, is_done = dice.choice(list(road.stages)), dice.random() < 0.5
        killed = road.kill(stage, is_done, dice, most=3)
        num_killed += killed
        print(num_killed, stage, "again" if is_done else "first", killed)


def test_of_several_builds_at_once_one_wins(road: Road) -> None:
    road.walk("data")
    road.restore(None)
    words = [word for word in road.stages["data"] if word != "--overwrite"]
    ends = road.killer.run(words, copies=4)
    assert sorted(end.code for end in ends) == [0, 2, 2, 2], [end.output for end in ends]
    assert all(is_one_line(end.output) for end in ends if end.code)
    assert outcome(road.work) == road.wanted["data"]
    assert leftovers(road.work) == []


def test_several_trainings_at_once_do_not_mix(road: Road) -> None:
    road.walk("train")
    road.restore("data")
    ends = road.killer.run(road.stages["train"], copies=4)
    refused = [end for end in ends if end.code]
    # One that starts very late finds a finished run.
    assert 1 <= len(refused) <= 3 and {end.code for end in refused} == {2}
    assert all(is_one_line(e.output) and "is in use by process" in e.output for e in refused)
    assert outcome(road.work) == road.wanted["train"]
    assert leftovers(road.work) == []


def test_a_full_disk_names_the_file_and_leaves_the_old_ones(road: Road) -> None:
    files = {"data": ".shard", "train": "checkpoint.safetensors", "pack": "model.upar"}
    road.walk(list(files)[-1])
    for stage, name in files.items():
        road.restore(stage)
        [end] = road.killer.run(road.stages[stage], file_bytes=30_000)
        assert (end.code, is_one_line(end.output)) == (2, True), end.output
        assert f"{name} cannot be written: File too large; no file was replaced" in end.output
        left = outcome(road.work)
        # A training that failed says why, in a file of its own.
        assert (left.pop("run/failure.json", None) is not None) == (stage == "train")
        assert left == road.wanted[stage]
        assert leftovers(road.work) == []


def is_one_line(text: str) -> bool:
    """One line of error. A busy machine may be named before it."""
    lines = text.strip().splitlines()
    return len([line for line in lines if not line.startswith("other processes use")]) == 1


@pytest.mark.parametrize(
    "words",
    [
        ["train", "--resume", "RUN"],
        ["calibrate", "RUN"],
        ["quantize", "RUN"],
        ["pack", "RUN"],
        ["score", "RUN/model.upar", "--data", "DATA"],
        ["score", "RUN/model.upar", "--data", "DATA", "--fresh"],
        ["audit", "RUN"],
        ["report", "RUN"],
    ],
    ids=lambda words: words[0] + words[-1].strip("RUN"),
)
def test_a_run_in_use_is_refused(
    tiny_run: TinyRun, tmp_path: Path, fails: Fails, words: list[str]
) -> None:
    run = Path(shutil.copytree(tiny_run.folder.path, tmp_path / "run"))
    before = {path.name: path.read_bytes() for path in run.iterdir()}
    places = {"RUN": str(run), "DATA": str(tiny_run.data)}
    for name, place in places.items():
        words = [word.replace(name, place) for word in words]
    with lock_folder(run):
        assert f"{run} is in use by process {os.getpid()} (" in fails(*words)
    assert {path.name: path.read_bytes() for path in run.iterdir()} == before


def test_a_run_in_use_can_be_read(tiny_run: TinyRun, tmp_path: Path) -> None:
    run = Path(shutil.copytree(tiny_run.folder.path, tmp_path / "run"))
    text = tmp_path / "text"
    text.write_text("A short text.")
    with lock_folder(run):
        commands.run("report", run, "--out", tmp_path / "page.html")
        commands.run("compress", run / "model.upar", text, tmp_path / "coded")
        commands.run("data", "inspect", tiny_run.data)


def test_a_demo_in_use_is_refused(tmp_path: Path, fails: Fails) -> None:
    with lock_folder(tmp_path / "demo", create=True):
        assert "demo is in use by process" in fails("demo", "--out", tmp_path / "demo")
