"""Ablations: which runs are made, what they are compared with, stopping, continuing, failing."""

import json
import math
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import pytest
import torch
from scipy import stats
from typer.testing import CliRunner

from underpar.build.levers import resolve_levers
from underpar.cli import app
from underpar.core.run_folder import RunFolder
from underpar.core.versions import device_name, versions
from underpar.data.folder import data_identity, load_data
from underpar.errors import BenchError, RecipeError, RunError
from underpar.lab import ablate, runs
from underpar.lab.ablate import (
    Plan,
    Request,
    make_plan,
    read_bpb,
    read_known,
    run_ablation,
    run_plan,
    summarize,
)
from underpar.lab.runs import LOG, Job, launcher, read_tail
from underpar.recipe import Recipe, load_recipe
from watcher import Watcher

TOKENS = 4096
SMALL = ("model.num_layers=6", "levers.smear=true", "levers.softcap=true", "levers.ema=true")
LOOPS = ("levers.loop={first=1, last=2, repeats=1}", "levers.recur_ab.sites=2")
BPB = {"seed-1337": 2.0, "seed-1338": 2.004, "seed-1339": 1.996, "loops-on": 1.98}


class Run:
    """A run in the place of a subprocess: it ends when asked for the third time."""

    def __init__(self, code: int, finish: Callable[[], None]) -> None:
        self.code, self.finish = code, finish
        self.asked, self.ended, self.terminated, self.waited = 0, False, False, False

    def poll(self) -> int | None:
        self.asked += 1
        if self.asked < 3:
            return None
        self.ended = True
        self.finish()
        return self.code

    def terminate(self) -> None:
        self.terminated = True

    def wait(self) -> int:
        self.waited = True
        return self.code


class Device:
    """Launches `Run`s and notes how many there were at a time; some fail or stay unfinished."""

    def __init__(
        self, out: Path, bpb: dict[str, float], codes: dict[str, int] | None = None
    ) -> None:
        self.out, self.bpb, self.codes = out, bpb, codes or {}
        self.started: list[str] = []
        self.runs: dict[str, Run] = {}
        self.most_at_once = 0

    def __call__(self, job: Job) -> Any:
        folder = self.out / job.name
        folder.mkdir(parents=True, exist_ok=True)
        code = self.codes.get(job.name, 0)
        lines = "".join(f"line {i} of {job.name}\n" for i in range(30))
        (folder / LOG).write_text(lines)
        about = {"recipe_hash": job.recipe_hash, "data_identity": "d", "device": "fake"}
        (folder / "run.json").write_text(json.dumps(about))

        def finish() -> None:
            if job.name not in self.codes:
                write_validation(folder, average=self.bpb.get(job.name, 2.01))

        self.started.append(job.name)
        self.runs[job.name] = Run(code, finish)
        alive = [run for run in self.runs.values() if not run.ended]
        self.most_at_once = max(self.most_at_once, len(alive))
        return self.runs[job.name]


def write_validation(
    folder: Path, average: float | None, live: float = 2.5, tokens: int = TOKENS
) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    tree = {"live_bpb": live, "average_bpb": average, "step": 2, "tokens": tokens, "seconds": 1.0}
    (folder / "validation.json").write_text(json.dumps(tree))


def plan_of(*overrides: str, levers: tuple[str, ...] = (), num_seeds: int = 3) -> Plan:
    return make_plan(Request("cpu", (*SMALL, *overrides), levers, num_seeds, TOKENS))


def recipe_of(job: Job) -> Recipe:
    return resolve_levers(load_recipe("cpu", job.overrides))


@pytest.fixture(autouse=True)
def no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runs, "POLL_SECONDS", 0.0)


def test_every_lever_of_the_model_is_left_out_once() -> None:
    plan = plan_of()
    names = ["seed-1337", "seed-1338", "seed-1339", "without-smear", "without-softcap"]
    assert [job.name for job in plan.jobs] == names
    recipes = {job.name: recipe_of(job) for job in plan.jobs}
    assert [recipes[name].train.seed for name in names] == [1337, 1338, 1339, 1337, 1337]
    assert [set(recipes[name].levers) for name in names[2:]] == [
        {"ema", "smear", "softcap"},
        {"ema", "softcap"},
        {"ema", "smear"},
    ]
    for job in plan.jobs:
        assert recipes[job.name].hash == job.recipe_hash
    assert plan.recipe_hash == resolve_levers(load_recipe("cpu", SMALL)).hash


def test_tokens_are_the_only_budget() -> None:
    overrides = ("train.budget_seconds=90", "train.reserve_seconds=5", "train.budget_flops=1e9")
    for job in plan_of(*overrides).jobs:
        part = recipe_of(job).train
        assert (part.budget_tokens, part.budget_steps) == (TOKENS, 0)
        assert part.budget_seconds == part.reserve_seconds == part.budget_flops == 0


def test_what_needs_the_loop_goes_with_it_and_is_compared_with_loops_on() -> None:
    plan = plan_of(*LOOPS)
    recipes = {job.name: recipe_of(job) for job in plan.jobs}
    rows = {row.lever: row for row in plan.rows}
    assert set(rows) == {"loop", "recur_ab", "smear", "softcap"}
    assert rows["loop"].also_dropped == ("recur_ab",)
    assert [name for name, row in rows.items() if row.loops_on] == ["loop", "recur_ab"]
    assert {"loop", "recur_ab"}.isdisjoint(recipes["without-loop"].levers)
    for name in ("loops-on", "without-recur_ab"):
        assert recipes[name].levers["loop"]["start"] == 0
    for name in ("seed-1337", "without-smear"):
        assert recipes[name].levers["loop"]["start"] == 0.35
    assert "recur_ab" not in recipes["without-recur_ab"].levers
    assert recipes["loops-on"].train.seed == 1337


def test_loops_that_are_always_on_need_no_run_of_their_own() -> None:
    plan = plan_of(*LOOPS, "levers.loop.start=0.0")
    assert not any(row.loops_on for row in plan.rows)
    assert "loops-on" not in {job.name for job in plan.jobs}


def test_named_levers_only_in_the_order_of_the_table() -> None:
    plan = plan_of(*LOOPS, levers=("ema", "smear", "ema"))
    assert [row.lever for row in plan.rows] == ["smear", "ema"]
    assert "loops-on" not in {job.name for job in plan.jobs}


@pytest.mark.parametrize(
    ("overrides", "levers", "message"),
    [
        ((), ("smeer",), "unknown lever 'smeer'; did you mean 'smear'"),
        ((), ("xsa",), "lever 'xsa' is not in the recipe"),
        (("levers.caseops=true",), ("caseops",), "stage 'data'"),
        (("levers.smear=false", "levers.softcap=false"), (), "no levers of the model"),
        (("levers.loop={first=9, last=9}",), (), "run 'seed-1337' cannot be built: levers.loop"),
    ],
)
def test_what_cannot_be_left_out_is_refused_before_training(
    overrides: tuple[str, ...], levers: tuple[str, ...], message: str
) -> None:
    with pytest.raises(RecipeError, match=message) as caught:
        plan_of(*overrides, levers=levers)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("values", [{"num_seeds": 1}, {"num_tokens": 0}])
def test_requests_that_measure_nothing_are_refused(values: dict[str, int]) -> None:
    with pytest.raises(BenchError, match=r"use (at least 2|1 or more)"):
        Request("cpu", **values)


@pytest.mark.parametrize("num_at_once", [1, 2, 9])
def test_runs_share_the_device(tmp_path: Path, num_at_once: int) -> None:
    plan, progress = plan_of(*LOOPS), Watcher()
    device = Device(tmp_path, BPB)
    outcome = run_plan(plan, tmp_path, device, num_at_once, "d", progress)
    assert device.started == [job.name for job in plan.jobs]
    assert device.most_at_once == min(num_at_once, len(plan.jobs))
    counts, names = zip(*(note.split(": ")[0].split(", ") for note in progress.notes), strict=True)
    assert list(counts) == [f"{done} of 8" for done in range(1, 9)]
    assert outcome.failed == {} and outcome.bpb["seed-1338"] == 2.004
    assert set(names) == set(outcome.bpb)


def test_no_run_at_once_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BenchError, match="0 runs at once"):
        run_plan(plan_of(), tmp_path, Device(tmp_path, BPB), 0)


def test_finished_runs_are_kept_and_others_continue(tmp_path: Path) -> None:
    plan = plan_of()
    write_validation(tmp_path / "seed-1338", average=None, live=1.75)
    write_validation(tmp_path / "without-smear", average=1.5, tokens=TOKENS - 1)
    device = Device(tmp_path, BPB)
    outcome = run_plan(plan, tmp_path, device)
    assert device.started == ["seed-1337", "seed-1339", "without-smear", "without-softcap"]
    # Without an average the live weights count.
    assert outcome.bpb["seed-1338"] == 1.75
    again = Device(tmp_path, {})
    assert run_plan(plan, tmp_path, again).bpb == outcome.bpb
    assert again.started == []


@pytest.mark.parametrize(
    ("overrides", "identity", "word"),
    [((), "other", "data_identity"), (("train.clip=9.0",), "d", "recipe_hash")],
)
def test_runs_of_another_recipe_or_data_are_refused(
    tmp_path: Path, overrides: tuple[str, ...], identity: str, word: str
) -> None:
    run_plan(plan_of(), tmp_path, Device(tmp_path, BPB), 2, "d")
    device = Device(tmp_path, BPB)
    with pytest.raises(RunError, match=rf"seed-1337 holds a run with {word} .* another --out"):
        run_plan(plan_of(*overrides), tmp_path, device, 2, identity)
    assert device.started == []


@pytest.mark.parametrize("tree", ["[]", "{}", '{"live_bpb": "x", "average_bpb": null}'])
def test_a_damaged_validation_is_named(tmp_path: Path, tree: str) -> None:
    (tmp_path / "validation.json").write_text(tree)
    with pytest.raises(RunError, match=r"validation\.json"):
        read_bpb(RunFolder(tmp_path), TOKENS)


def test_a_score_that_is_no_number_is_named(tmp_path: Path) -> None:
    write_validation(tmp_path, average=math.nan)
    with pytest.raises(RunError, match="nan bits per byte"):
        read_bpb(RunFolder(tmp_path), TOKENS)


def test_failures_do_not_stop_the_others(tmp_path: Path) -> None:
    plan = plan_of()
    device = Device(tmp_path, BPB, {"without-smear": 1, "without-softcap": 0})
    outcome = run_plan(plan, tmp_path, device)
    reasons = {"without-smear": "exit code 1", "without-softcap": "stopped before its end"}
    assert outcome.failed == reasons
    assert set(outcome.bpb) == {"seed-1337", "seed-1338", "seed-1339"}
    assert summarize(plan, outcome.bpb)["levers"] == []
    tail = read_tail(tmp_path / "without-smear", 2)
    assert tail == "line 28 of without-smear\nline 29 of without-smear"
    assert read_tail(tmp_path / "nothing") == ""


def test_a_stopped_ablation_ends_its_runs(tmp_path: Path) -> None:
    device = Device(tmp_path, BPB)
    before = signal.getsignal(signal.SIGTERM)

    class Stop(Watcher):
        def note(self, line: str) -> None:
            signal.raise_signal(signal.SIGTERM)

    with pytest.raises(KeyboardInterrupt):
        run_plan(plan_of(), tmp_path, device, 3, None, Stop())
    assert device.started == ["seed-1337", "seed-1338", "seed-1339"]
    left = [run for name, run in device.runs.items() if name != "seed-1337"]
    assert all(run.terminated and run.waited for run in left)
    assert signal.getsignal(signal.SIGTERM) is before


def test_differences_are_held_against_the_spread_of_the_seeds() -> None:
    plan = plan_of(*LOOPS)
    measured = BPB | {"without-smear": 2.03, "without-softcap": 1.99}
    measured |= {"without-loop": 2.01, "without-recur_ab": 1.99}
    result = summarize(plan, measured)
    seeds = [2.0, 2.004, 1.996]
    assert result["baseline"] == {"bpb": seeds, "mean": fmean(seeds), "sd": stdev(seeds)}
    assert (result["seeds"], result["tokens"]) == ([1337, 1338, 1339], TOKENS)
    assert result["loops_on"] == 1.98
    rows = {row["lever"]: row for row in result["levers"]}
    assert rows["smear"]["difference_mbpb"] == pytest.approx(30)
    assert rows["softcap"]["difference_mbpb"] == pytest.approx(-10)
    # The single run with loops on is the baseline of these two.
    assert rows["loop"]["difference_mbpb"] == pytest.approx(30)
    assert rows["recur_ab"]["difference_mbpb"] == pytest.approx(10)
    # Student's t at two standard deviations, with two degrees of freedom, is 4.53.
    t = float(stats.t.isf(stats.norm.sf(2), 2))
    assert t == pytest.approx(4.527, abs=1e-3)
    assert rows["smear"]["noise_mbpb"] == pytest.approx(4 * t * math.sqrt(1 + 1 / 3))
    assert rows["loop"]["noise_mbpb"] == pytest.approx(4 * t * math.sqrt(2))
    beyond = {name for name, row in rows.items() if row["beyond_noise"]}
    assert beyond == {"smear", "loop"}
    assert json.loads(json.dumps(result)) == result


def test_nothing_is_said_without_all_seeds_or_a_rows_baseline() -> None:
    plan = plan_of(*LOOPS)
    measured = BPB | {row.run: 2.0 for row in plan.rows}
    with pytest.raises(BenchError, match="missing: seed-1338"):
        summarize(plan, {name: v for name, v in measured.items() if name != "seed-1338"})
    without = summarize(plan, {name: v for name, v in measured.items() if name != "loops-on"})
    assert [row["lever"] for row in without["levers"]] == ["smear", "softcap"]


def test_a_run_is_the_train_command_with_its_recipe(tiny_data: Path, tmp_path: Path) -> None:
    sets = ("model.num_layers=2", "levers.smear=true", "train.num_micro_batches=1")
    plan = make_plan(Request("cpu", sets, (), 2, 1024))
    job = plan.jobs[-1]
    process = launcher("cpu", tiny_data, tmp_path, "cpu")(job)
    assert process.wait() == 0, read_tail(tmp_path / job.name)
    folder = RunFolder(tmp_path / "without-smear")
    assert folder.read_json(folder.about_file)["recipe_hash"] == job.recipe_hash
    assert [line["tokens"] for line in folder.metrics()] == [1024]
    # One step of training leaves a model of 512 pieces little better than a guess.
    assert 1 < (read_bpb(folder, 1024) or 0) < 9
    assert read_tail(folder.path)


def invoke(device: Device, data: Path, monkeypatch: pytest.MonkeyPatch, *words: str) -> Any:
    monkeypatch.setattr(ablate, "launcher", lambda *_: device)
    sets = [word for override in (*SMALL, *LOOPS) for word in ("--set", override)]
    words = ("--data", str(data), "--out", str(device.out), *sets, *words)
    return CliRunner().invoke(app, ["ablate", "cpu", "--tokens", str(TOKENS), *words])


def test_the_command_leaves_json_and_a_table(
    tiny_data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    invoked = invoke(Device(tmp_path, BPB), tiny_data, monkeypatch, "--seeds", "3")
    assert invoked.exit_code == 0, invoked.output
    assert "8 of 8, " in invoked.stderr and "seed-1338: 2.0040 bits per byte" in invoked.stderr
    result = json.loads((tmp_path / "ablation.json").read_text())
    assert result["data_identity"] == "d" and len(result["levers"]) == 4
    assert "| loop (and recur_ab, loops on) | 2.0100 | +30.00 |" in (
        (tmp_path / "ablation.md").read_text()
    )
    # The folders say "d" for their data, which these are not: a second call is refused.
    again = invoke(Device(tmp_path, BPB), tiny_data, monkeypatch, "--seeds", "3", "--json")
    assert isinstance(again.exception, RunError) and "data_identity" in str(again.exception)


def test_the_command_names_what_failed(
    tiny_data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    device = Device(tmp_path, BPB, {"without-smear": 1})
    invoked = invoke(device, tiny_data, monkeypatch, "--seeds", "3", "--json")
    assert invoked.exit_code == 2
    assert "without-smear failed, exit code 1:" in invoked.stderr.replace("\n", " ")
    assert "line 29 of without-smear" in invoked.stderr
    levers = [row["lever"] for row in json.loads(invoked.stdout)["levers"]]
    assert levers == ["loop", "recur_ab", "softcap"]


def test_known_runs_are_not_made_again(tiny_data: Path, tmp_path: Path) -> None:
    old, new = tmp_path / "old", tmp_path / "new"
    request = Request("cpu", (*SMALL, *LOOPS), (), 3, TOKENS)
    device = Device(old, BPB | {"without-loop": 2.5})
    run_ablation(replace(request, levers=("loop",)), tiny_data, old, "cpu", launch=device)
    known = old / "ablation.json"
    here = {"data_identity": data_identity(load_data(tiny_data)), "versions": versions()}
    here |= {"device": device_name(torch.device("cpu")), "remark": "By hand."}
    tree = json.loads(known.read_text()) | here
    known.write_text(json.dumps(tree))
    device = Device(new, {"without-smear": 2.25})
    result, failed = run_ablation(request, tiny_data, new, "cpu", known=known, launch=device)
    assert failed == {}
    assert device.started == ["without-smear", "without-recur_ab", "without-softcap"]
    assert result["baseline"] == tree["baseline"] and result["loops_on"] == tree["loops_on"]
    bpb = {row["lever"]: row["bpb"] for row in result["levers"]}
    assert bpb == {"loop": 2.5, "recur_ab": 2.01, "smear": 2.25, "softcap": 2.01}
    assert {key: result[key] for key in here} == here
    assert "\n- By hand.\n" in (new / "ablation.md").read_text()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"recipe_hash": "0"}, "has recipe_hash 0, this ablation has "),
        ({"tokens": 5}, "has tokens 5, this ablation has 4096"),
        ({"data_identity": "e"}, "has data_identity e, this ablation has d"),
        ({"device": "another"}, "has device another, this ablation has fake"),
        ({"levers": [{}]}, "is not the result of an ablation"),
        ({"seeds": [1]}, "is not the result of an ablation"),
    ],
)
def test_known_runs_of_something_else_are_refused(
    tmp_path: Path, change: dict[str, Any], words: str
) -> None:
    plan = plan_of()
    here = {"data_identity": "d", "device": "fake"}
    result = summarize(plan, BPB) | here
    path = tmp_path / "ablation.json"
    with pytest.raises(RunError, match="does not exist; 'underpar ablate' leaves"):
        read_known(path, plan, here)
    path.write_text("[]")
    with pytest.raises(RunError, match="does not hold a JSON object"):
        read_known(path, plan, here)
    path.write_text(json.dumps(result))
    assert read_known(path, plan, here).bpb == BPB
    path.write_text(json.dumps(result | change))
    with pytest.raises(RunError, match=words):
        read_known(path, plan, here)


def test_help_teaches_with_examples() -> None:
    text = CliRunner().invoke(app, ["ablate", "--help"]).stdout
    assert "underpar ablate pr2014 --data data --out runs/worth" in text
