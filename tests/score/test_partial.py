"""A stopped score continues to the same bits, whatever it learns; what it cannot trust it leaves.

Started by itself this file runs its arguments as commands, which send themselves a signal.
"""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from lane_runs import MODEL, SETTINGS, SHARD, STREAM, Run
from lane_runs import SORTED as BY_LENGTH
from lever_stacks import CPU, randomized
from thread_ranks import Ranks
from tiny import TinyRun
from underpar import cli
from underpar.artifact.unpack import Artifact
from underpar.build.scoring import ScoringRequest, open_method, run_method
from underpar.core.makers import maker_of
from underpar.core.runtime import Clock, Runtime
from underpar.errors import RunError
from underpar.infer.lora import Lora
from underpar.infer.step import forward_step
from underpar.levers import phased_sgd
from underpar.model.chunk_cache import ChunkCache
from underpar.quant.schemes import QuantizedTensor, Scheme
from underpar.recipe import load_recipe
from underpar.score.ledger import Score
from underpar.score.method import PUBLISHED, Method
from underpar.score.partial import Partial, Stopped
from underpar.score.ttt import loop

RECIPE = load_recipe("cpu", [*MODEL, "levers.smear.init=0.5", "levers.softcap=true"])
SMALL = ["score.batch_tokens=1", "score.adapt_tokens=1"]
LANES = ["levers.lora_ttt={rank=2, chunk=4, short=['8:2'], lr=0.01, lanes=3, group=3}"]
FRESH = [*LANES, "levers.lora_ttt.keys=fresh"]
DECAY = [*LANES, "levers.lora_ttt.decay_all=true", "levers.lora_ttt.decay=10.0"]
PHASES = ["levers.phased_sgd={prefix=0.5, phases=3, lr=0.1, chunk_tokens=16}"]
EXPERTS = ["levers.counts={orders=[2], min_count=1, min_confidence=0.0, prior=0.0}"]
EXPERTS += ["levers.match={lengths=[1, 2]}"]
SORTED = {"order": PUBLISHED}

WAYS: dict[str, tuple[Method, Sequence[str]]] = {
    "plain": (Method(), SMALL),
    "sliding": (Method(stride=4), SMALL),
    "flat": (Method(stride=4, flat=True), SMALL),
    "scales": (Method(("adapt_scales",)), SMALL),
    "stream": (Method(("stream_sgd", "adapt_bias")), [*SMALL, "levers.stream_sgd.lr=0.1"]),
    "flat chunks": (
        Method(("stream_sgd",), stride=4, flat=True),
        [*SMALL, "levers.stream_sgd={lr=0.1, cosine=true}"],
    ),
    "hedge": (Method(("counts", "match")), [*SMALL, *EXPERTS]),
    "late": (Method(("adapt_scales",), seconds=1e-9), SMALL),
    "lanes": (Method(("lora_ttt",)), LANES),
    "few left": (Method(("lora_ttt",)), [*LANES, "levers.lora_ttt.lanes=6"]),
    "fresh": (Method(("lora_ttt",)), FRESH),
    "sorted": (Method(("lora_ttt",), **SORTED), DECAY),
    "phases": (Method(("lora_ttt", "phased_sgd")), [*LANES, *PHASES]),
    "sorted phases": (Method(("lora_ttt", "phased_sgd"), **SORTED), [*LANES, *PHASES]),
    "tilted": (Method(("lora_ttt", "counts", "match")), [*LANES, *EXPERTS]),
    "sorted tilt": (Method(("lora_ttt", "counts", "match"), **SORTED), [*LANES, *EXPERTS]),
    "late lanes": (Method(("lora_ttt",), seconds=1e-9), LANES),
}
EVERY_WAY = pytest.mark.parametrize("name", WAYS)


@pytest.fixture(scope="module")
def artifact() -> Artifact:
    weights = randomized(RECIPE).state_dict()
    tensors = {
        name: QuantizedTensor(tuple(w.shape), Scheme(), w.numpy().astype(np.float16).ravel())
        for name, w in weights.items()
    }
    return Artifact(RECIPE, b"", tensors)


class Start:
    """One start of a score, which is asked to stop after so many steps."""

    def __init__(
        self,
        path: Path,
        num_steps: float = float("inf"),
        runtime: Runtime | None = None,
        **saving: float,
    ) -> None:
        self.lines: list[str] = []
        self.shares: list[float] = []
        self.clock = Clock("load")
        self.runtime = runtime or Runtime(CPU)
        self._left = num_steps
        about = {"of": "a test"}
        tell = self.lines.append
        self.partial = Partial(path, about, self.runtime, self.clock, self.is_asked, tell, **saving)

    def is_asked(self) -> bool:
        self._left -= 1
        return self._left < 0

    def go(
        self, artifact: Artifact, name: str, partial: bool = True, seconds: float = 0.0
    ) -> Score:
        method, changes = WAYS[name]
        method = replace(method, seconds=seconds or method.seconds)
        opened, recipe = open_method(artifact.recipe, method, changes)
        request = ScoringRequest(
            opened,
            self.runtime,
            self.clock,
            on_share=lambda share, bpb: self.shares.append(share),
            partial=self.partial if partial else None,
        )
        return run_method(replace(artifact, recipe=recipe), SHARD, request)


def all_but_seconds(score: Score) -> dict[str, Any]:
    return {key: value for key, value in score.as_dict().items() if key != "seconds"}


@EVERY_WAY
def test_stopped_after_every_step_it_is_the_same_score(
    name: str, artifact: Artifact, tmp_path: Path
) -> None:
    check_every_step(name, artifact, tmp_path, Runtime(CPU))


@pytest.mark.parametrize("name", ["lanes", "sorted phases"])
def test_so_it_is_where_steps_are_recorded(
    name: str, artifact: Artifact, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Recorded, but not compiled: that would take a minute.
    monkeypatch.setattr(loop, "CompiledForward", lambda vary: forward_step)
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)
    check_every_step(name, artifact, tmp_path, Runtime(CPU, compiled=True))


def check_every_step(name: str, artifact: Artifact, tmp_path: Path, runtime: Runtime) -> None:
    whole = Start(tmp_path / "none", runtime=runtime).go(artifact, name, partial=False)
    path, steps, share = tmp_path / "score", list[int](), 0.0
    while True:
        start = Start(path, num_steps=1, runtime=runtime)
        try:
            score = start.go(artifact, name)
            break
        except Stopped as stopped:
            steps.append(stopped.step)
            assert str(stopped).startswith(f"stopped at step {len(steps)}; the same command")
        # What is shown begins with what was shown last.
        assert share in (0.0, start.shares[0])
        share = start.shares[-1]
    assert steps == list(range(1, len(steps) + 1)) and len(steps) >= 5
    assert all_but_seconds(score) == all_but_seconds(whole)
    assert start.lines == [f"continuing {path} at step {steps[-1]}"]


def test_what_is_saved_on_the_way_is_good_to_continue(artifact: Artifact, tmp_path: Path) -> None:
    """As a kill leaves it: saved in passing, and some steps behind the end."""
    whole = Start(tmp_path / "none").go(artifact, "tilted", partial=False)
    path, kept, step = tmp_path / "score", tmp_path / "kept", 0

    class Copying(Partial):
        def offer(self, *arguments: Any) -> None:
            nonlocal step
            super().offer(*arguments)
            step += 1
            if step == 7:
                kept.write_bytes(path.read_bytes())

    start = Start(path, save_seconds=0.0, rest=0.0)
    start.partial.__class__ = Copying
    assert all_but_seconds(start.go(artifact, "tilted")) == all_but_seconds(whole)
    assert start.clock.read()["save"] > 0
    again = Start(kept)
    assert all_but_seconds(again.go(artifact, "tilted")) == all_but_seconds(whole)
    assert again.lines == [f"continuing {kept} at step 6"]


def stop(artifact: Artifact, path: Path, name: str = "lanes", num_steps: int = 3) -> Start:
    start = Start(path, num_steps)
    with pytest.raises(Stopped):
        start.go(artifact, name)
    return start


def test_large_states_are_saved_seldom(tmp_path: Path) -> None:
    start, calls = Start(tmp_path / "score", save_seconds=0.0, rest=1e9), list[int]()
    start.partial.offer(4, lambda: calls.append(1) or {})  # type: ignore[func-returns-value]
    start.partial.offer(5, lambda: calls.append(2) or {})  # type: ignore[func-returns-value]
    assert calls == [1]


@pytest.mark.parametrize("name", ["lanes", "scales"])
def test_seconds_and_their_limit_go_on(name: str, artifact: Artifact, tmp_path: Path) -> None:
    path = tmp_path / "score"
    first = Start(path, 3)
    first.clock.add({"load": 5000.0, "score": 300.0})
    with pytest.raises(Stopped):
        first.go(artifact, name, seconds=1000.0)
    second = Start(path, 2)
    second.clock.add({"adapt": 900.0})
    with pytest.raises(Stopped):
        second.go(artifact, name, seconds=1000.0)
    assert 300 < second.partial.spent_seconds < 400
    third = Start(path)
    score = third.go(artifact, name, seconds=1000.0)
    # What this start's own clock counts is not over, what the two before it used is.
    assert score.stopped_at == 5
    assert 6200 < sum(score.seconds.values()) < 6300
    assert score.seconds["score"] > 300 and score.seconds["load"] > 5000


def test_a_file_of_another_score_is_left_aside(artifact: Artifact, tmp_path: Path) -> None:
    path = tmp_path / "score"
    whole = Start(tmp_path / "none").go(artifact, "lanes", partial=False)
    for change in ({"about": {"of": "else"}}, {"runtime": Runtime(CPU, compiled=True)}):
        stop(artifact, path)
        other = Start(path)
        other.partial = replace(other.partial, **change)
        assert other.partial.find() is None
        assert other.lines == [
            f"{path} belongs to another artifact, text, setting or machine; starting over"
        ]
    other = Start(path, 2)
    other.partial = replace(other.partial, about={"of": "else"})
    with pytest.raises(Stopped):
        other.go(artifact, "lanes")
    # It was overwritten: now the first one has to start over.
    first = Start(path)
    assert all_but_seconds(first.go(artifact, "lanes")) == all_but_seconds(whole)
    assert "starting over" in first.lines[0]


def test_a_damaged_file_is_refused(artifact: Artifact, tmp_path: Path) -> None:
    path = tmp_path / "score"
    stop(artifact, path)
    good = path.read_bytes()
    place = good.index(b"=tensor")
    bad = {
        "cut": good[: len(good) // 2],
        "empty": b"",
        "foreign": b"no tensors at all",
        "number": good[:-9] + bytes([good[-9] ^ 1]) + good[-8:],
        "name": good[:place] + b"=tensaw" + good[place + 7 :],
        "step": good.replace(b'\\"step\\": 3', b'\\"step\\": 4'),
        "key": good.replace(b'\\"saved\\"', b'\\"saves\\"'),
    }
    for content in bad.values():
        assert content != good
        path.write_bytes(content)
        with pytest.raises(RunError) as caught:
            Start(path).go(artifact, "lanes")
        line = str(caught.value)
        assert line.startswith(f"{path} is damaged (") and "\n" not in line
        command = maker_of(path.with_suffix(".json"))
        assert line.endswith(f"; start over with --fresh, as in '{command} --fresh'")
    path.write_bytes(good)
    assert Start(path).partial.find() is not None


def test_memory_stays_where_it_is_and_is_as_large_as_it_was() -> None:
    """What is recorded for a device has addresses."""

    def addresses(*states: dict[str, Any]) -> list[int]:
        parts = [part for state in states for part in (state, state.get("slots", {}))]
        lines = [value for part in parts for value in part.values()]
        return [value.data_ptr() for value in lines if isinstance(value, torch.Tensor)]

    model, settings = randomized(RECIPE), replace(SETTINGS, sites=("k",))
    for num_lanes in (2, 1):
        lora, other = (Lora(model, settings, range(n), CPU) for n in (2, num_lanes))
        cache, before = ChunkCache(RECIPE.model, 2, CPU), ChunkCache(RECIPE.model, num_lanes, CPU)
        for one in (cache, before):
            one.reserve(5)
            one._cache(0, torch.zeros(1, 1, 4))
        where = addresses(lora.state(), cache.state())
        lora.load(other.state())
        cache.load(before.state())
        assert (addresses(lora.state(), cache.state()) == where) == (num_lanes == 2)
        assert cache.room == before.room > 0 and len(cache.lengths) == len(lora.lanes) == num_lanes
        assert torch.equal(lora.work, lora.weights * lora.root)


def test_only_files_of_the_score_are_removed(artifact: Artifact, tmp_path: Path) -> None:
    names = ["score-tilt.partial", "score-tilt.partial-1", ".score-tilt.partial.next.part"]
    others = ["score-tilt.json", "score-tilt+match.partial", "score-lora_ttt+tilt.partial"]
    for name in (*names, *others):
        (tmp_path / name).touch()
    pair = Start(tmp_path / names[0], runtime=Runtime(CPU, 1, 2))
    pair.partial.remove()
    assert {p.name for p in tmp_path.iterdir()} == {*names, *others} - {names[1]}
    Start(tmp_path / names[0]).partial.remove()
    assert {p.name for p in tmp_path.iterdir()} == set(others)


class Lanes(Run):
    """One rank's scoring, which may end by being stopped."""

    def go(self) -> "Lanes":
        self.stopped_at = -1
        try:
            super().go()
        except Stopped as stopped:
            self.stopped_at = stopped.step
        return self


class Pair:
    """Two ranks that save beside `path`; the main rank alone is asked to stop."""

    def __init__(self, path: Path, method: Method) -> None:
        self.path, self.method = path, method
        self.lines: list[str] = []

    def go(self, num_steps: float = float("inf")) -> list[Run]:
        def make(runtime: Runtime) -> Run:
            start = Start(self.path, num_steps if runtime.is_main else float("inf"), runtime)
            self.lines = start.lines if runtime.is_main else self.lines
            phases = phased_sgd.PhasedSGD(phased_sgd.Settings(prefix=0.5, lr=0.1, chunk_tokens=16))
            # Lanes of one rank rest, and decay, while those of the other learn.
            settings = replace(SETTINGS, warm=True, decay_all=True, decay=10.0, lanes=2)
            return Lanes(
                settings=settings,
                method=self.method,
                phases=phases,
                runtime=runtime,
                partial=start.partial,
            )

        ranks = Ranks()
        runs = [make(runtime) for runtime in ranks.runtimes]
        ranks.go([run.go for run in runs])
        return runs


@pytest.mark.parametrize("method", [STREAM, BY_LENGTH], ids=["stream", "published"])
def test_ranks_stop_and_continue_together(method: Method, tmp_path: Path) -> None:
    pair = Pair(tmp_path / "score", method)
    whole, stops = pair.go(), 0
    while (runs := pair.go(1))[0].stopped_at >= 0:  # type: ignore[attr-defined]
        stops += 1
        assert [run.stopped_at for run in runs] == [stops, stops]  # type: ignore[attr-defined]
        assert {p.name for p in tmp_path.iterdir()} == {"score", "score-1"}
    assert stops > 10
    for run, other in zip(runs, whole, strict=True):
        assert all_but_seconds(run.score) == all_but_seconds(other.score)
        assert run.predictor.state_hash() == other.predictor.state_hash()


def test_ranks_that_do_not_agree_start_over(tmp_path: Path) -> None:
    path, other = tmp_path / "score", tmp_path / "score-1"
    pair = Pair(path, STREAM)
    whole = pair.go()
    pair.go(3)
    early = other.read_bytes()
    pair.go(3)
    late = other.read_bytes()
    for content in (early, b""):
        other.write_bytes(content)
        if not content:
            other.unlink()
        runs = pair.go()
        assert all_but_seconds(runs[0].score) == all_but_seconds(whole[0].score)
        assert pair.lines == [f"{path} was not saved at the step of all ranks; starting over"]
    other.write_bytes(late[:-9])
    with pytest.raises(RunError, match="score-1 is damaged"):
        pair.go()
    other.write_bytes(late)
    runs = pair.go()
    assert pair.lines == [f"continuing {path} at step 6"]
    assert all_but_seconds(runs[1].score) == all_but_seconds(whole[1].score)


def ask(*words: object) -> list[str]:
    """The words of a command."""
    return ["score", *map(str, words), "--device", "cpu", "--json"]


def launch(
    command: Sequence[str], *launcher: str, number: int = signal.SIGKILL
) -> subprocess.CompletedProcess[str]:
    """Run a command that saves before every step, and sends itself a signal; 0: none."""
    return subprocess.run(
        [sys.executable, *launcher, __file__, str(int(number)), *command],
        # Bit for bit needs the same number of threads everywhere.
        env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        timeout=120,
    )


def ledger(path: Path) -> dict[str, Any]:
    stored = json.loads(path.read_text())
    return {key: stored[key] for key in ("bits", "ledger", "events", "stopped_at", "how")}


# Every document is a step, so that there are some to stop between.
METHODS = {
    "adapt": ["--adapt", "--set", "score.adapt_tokens=1"],
    "ttt": ["--with", "lora_ttt", "--set", "levers.lora_ttt={rank=2, chunk=64, short=[]}"],
}
# "adapt" with another setting is a method of its own.
LABELS = {"adapt": "adapt_scales", "ttt": "lora_ttt"}
STEP = 4


@pytest.fixture
def artifact_file(tiny_run: TinyRun, tmp_path: Path) -> Path:
    path = tmp_path / "model.upar"
    path.write_bytes(tiny_run.folder.artifact_file.read_bytes())
    return path


def continue_and_start_over(command: list[str], label: str, folder: Path) -> None:
    """What a stopped command left is continued, and left aside, to the same ledger."""
    file, score = folder / f"score-{label}.partial", folder / f"score-{label}.json"
    assert file.exists() and not score.exists()
    runner, left = CliRunner(), file.read_bytes()
    continued = runner.invoke(cli.app, command, catch_exceptions=False)
    assert continued.exit_code == 0, continued.output
    assert continued.stderr.splitlines() == [f"continuing {file} at step {STEP}"]
    assert {p.name for p in folder.iterdir()} == {"model.upar", score.name}
    entries = ledger(score)
    file.write_bytes(left)
    whole = runner.invoke(cli.app, [*command, "--fresh"], catch_exceptions=False)
    assert (whole.exit_code, whole.stderr) == (0, "")
    assert ledger(score) == entries and not file.exists()
    assert all(json.loads(result.stdout)["finished"] for result in (whole, continued))


@pytest.mark.parametrize(("label", "number"), [("adapt", signal.SIGTERM), ("ttt", signal.SIGINT)])
def test_a_signal_ends_a_command_that_continues(
    label: str,
    number: int,
    tiny_run: TinyRun,
    artifact_file: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    command = ask(artifact_file, "--data", tiny_run.data, *METHODS[label])
    label = LABELS[label]
    with monkeypatch.context() as patch:
        patch.setattr(Partial, "offer", sending(number))
        ended = CliRunner().invoke(cli.app, command, catch_exceptions=False)
    assert ended.exit_code == 0
    assert ended.stderr.splitlines() == [str(Stopped(STEP))]
    assert json.loads(ended.stdout) == {"finished": False, "method": label, "step": STEP}
    continue_and_start_over(command, label, artifact_file.parent)


def test_a_killed_command_continues(tiny_run: TinyRun, artifact_file: Path) -> None:
    command = ask(artifact_file, "--data", tiny_run.data, *METHODS["adapt"])
    assert launch(command).returncode == -signal.SIGKILL
    continue_and_start_over(command, LABELS["adapt"], artifact_file.parent)


@pytest.mark.slow
def test_killed_ranks_continue_together(tiny_run: TinyRun, artifact_file: Path) -> None:
    pair = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    command = ask(artifact_file, "--data", tiny_run.data, *METHODS["ttt"])
    folder = artifact_file.parent
    names = {"model.upar", "score-lora_ttt.partial", "score-lora_ttt.partial-1"}
    assert launch(command, *pair).returncode != 0
    assert {p.name for p in folder.iterdir()} >= names
    done = launch(command, *pair, number=0)
    assert done.returncode == 0, done.stderr
    assert f"score-lora_ttt.partial at step {STEP}" in done.stderr
    score = folder / "score-lora_ttt.json"
    assert {p.name for p in folder.iterdir()} == {"model.upar", score.name}
    entries = ledger(score)
    assert launch(command, *pair, number=0).returncode == 0
    assert ledger(score) == entries


def sending(number: int) -> Any:
    """A `Partial.offer` that saves every time, and sends this process a signal so that STEP is the
    last; 0: none."""
    offer = Partial.offer

    def watched(partial: Partial, at: int, state: Any) -> None:
        partial._due = 0.0
        # A kill leaves what was offered before it.
        if number and at == STEP + (number == signal.SIGKILL):
            os.kill(os.getpid(), number)
        offer(partial, at, state)

    return watched


if __name__ == "__main__":
    Partial.offer = sending(int(sys.argv[1]))  # type: ignore[method-assign]
    sys.argv[1:] = sys.argv[2:]
    cli.main()
