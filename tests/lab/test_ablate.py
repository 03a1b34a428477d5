"""Ablations: which runs are made, what they are compared with, stopping, continuing, failing."""

import json
import math
import signal
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import pytest
from scipy import stats
from typer.testing import CliRunner

from underpar.build.levers import resolve_levers
from underpar.cli import app
from underpar.core.run_folder import RunFolder
from underpar.data.folder import data_identity, load_data
from underpar.errors import BenchError, RecipeError, RunError
from underpar.lab import ablate, runs
from underpar.lab.ablate import Plan, Request, make_plan, run_ablation, summarize
from underpar.lab.measurement import Figure, Measurement, read_bpb
from underpar.lab.runs import LOG, read_tail
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
        self, data: Path, bpb: dict[str, float], codes: dict[str, int] | None = None
    ) -> None:
        self.identity = data_identity(load_data(data))
        self.bpb, self.codes = bpb, codes or {}
        self.started: list[str] = []
        self.runs: dict[str, Run] = {}
        self.most_at_once = 0

    def __call__(self, words: Sequence[str], folder: Path) -> Any:
        assert words[0] == "train" and str(folder) in words
        name = folder.name
        folder.mkdir(parents=True, exist_ok=True)
        code = self.codes.get(name, 0)
        lines = "".join(f"line {i} of {name}\n" for i in range(30))
        (folder / LOG).write_text(lines)
        sets = [word for before, word in pairwise(words) if before == "--set"]
        recipe = resolve_levers(load_recipe(words[1], sets))
        about = {"recipe_hash": recipe.hash, "data_identity": self.identity}
        (folder / "run.json").write_text(json.dumps(about))

        def finish() -> None:
            if name not in self.codes:
                write_validation(folder, average=self.bpb.get(name, 2.01))

        self.started.append(name)
        self.runs[name] = Run(code, finish)
        alive = [run for run in self.runs.values() if not run.ended]
        self.most_at_once = max(self.most_at_once, len(alive))
        return self.runs[name]


def write_validation(folder: Path, average: float | None, live: float = 2.5) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    tree = {"live_bpb": live, "average_bpb": average, "step": 2, "tokens": TOKENS, "seconds": 1.0}
    (folder / "validation.json").write_text(json.dumps(tree))


def plan_of(*overrides: str, levers: tuple[str, ...] = (), num_seeds: int = 3) -> Plan:
    return make_plan(Request("cpu", (*SMALL, *overrides), levers, num_seeds, TOKENS))


def recipe_of(figure: Figure) -> Recipe:
    return resolve_levers(figure.recipe)


def run(
    data: Path, out: Path, device: Device, num_at_once: int = 1, *overrides: str, **rest: Any
) -> tuple[Plan, dict[str, float], dict[str, str]]:
    """Measure a plan: it, bits per byte by the names of the runs, and what failed."""
    plan = plan_of(*overrides)
    measurement = Measurement(
        [*plan.figures.values()], data, out, "cpu", num_at_once, start=device, **rest
    )
    failed = measurement.run(lambda: None)
    by_name = {f.job.name: measurement.figures.get(f.key) for f in plan.figures.values()}
    return plan, {name: bpb for name, bpb in by_name.items() if bpb is not None}, failed


@pytest.fixture(autouse=True)
def no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runs, "POLL_SECONDS", 0.0)


def test_every_lever_of_the_model_is_left_out_once() -> None:
    plan = plan_of()
    names = ["seed-1337", "seed-1338", "seed-1339", "without-smear", "without-softcap"]
    assert [figure.job.name for figure in plan.figures.values()] == [*plan.figures] == names
    recipes = {name: recipe_of(figure) for name, figure in plan.figures.items()}
    assert [recipes[name].train.seed for name in names] == [1337, 1338, 1339, 1337, 1337]
    assert [set(recipes[name].levers) for name in names[2:]] == [
        {"ema", "smear", "softcap"},
        {"ema", "softcap"},
        {"ema", "smear"},
    ]
    for name, figure in plan.figures.items():
        assert recipes[name].hash == figure.job.recipe_hash
    assert plan.recipe_hash == resolve_levers(load_recipe("cpu", SMALL)).hash


def test_tokens_are_the_only_budget() -> None:
    overrides = ("train.budget_seconds=90", "train.reserve_seconds=5", "train.budget_flops=1e9")
    for figure in plan_of(*overrides).figures.values():
        part = recipe_of(figure).train
        assert (part.budget_tokens, part.budget_steps) == (TOKENS, 0)
        assert part.budget_seconds == part.reserve_seconds == part.budget_flops == 0


def test_what_needs_the_loop_goes_with_it_and_is_compared_with_loops_on() -> None:
    plan = plan_of(*LOOPS)
    recipes = {name: recipe_of(figure) for name, figure in plan.figures.items()}
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
    assert "loops-on" not in plan.figures


def test_named_levers_only_in_the_order_of_the_table() -> None:
    plan = plan_of(*LOOPS, levers=("ema", "smear", "ema"))
    assert [row.lever for row in plan.rows] == ["smear", "ema"]
    assert "loops-on" not in plan.figures


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
def test_runs_share_the_device(tmp_path: Path, tiny_data: Path, num_at_once: int) -> None:
    progress, device = Watcher(), Device(tiny_data, BPB)
    plan, bpb, failed = run(tiny_data, tmp_path, device, num_at_once, *LOOPS, progress=progress)
    assert device.started == [*plan.figures]
    assert device.most_at_once == min(num_at_once, len(plan.figures))
    counts, names = zip(*(note.split(": ")[0].split(", ") for note in progress.notes), strict=True)
    assert list(counts) == [f"train {done} of 8" for done in range(1, 9)]
    assert failed == {} and bpb["seed-1338"] == 2.004
    assert set(names) == set(bpb)


def test_no_run_at_once_is_refused(tmp_path: Path, tiny_data: Path) -> None:
    with pytest.raises(BenchError, match="0 runs at once"):
        run(tiny_data, tmp_path, Device(tiny_data, BPB), 0)


def test_finished_runs_are_kept_and_others_continue(tmp_path: Path, tiny_data: Path) -> None:
    write_validation(tmp_path / "seed-1338", average=None, live=1.75)
    # A run that was stopped has a folder without its end.
    (tmp_path / "without-smear").mkdir()
    device = Device(tiny_data, BPB)
    _, bpb, _ = run(tiny_data, tmp_path, device)
    assert device.started == ["seed-1337", "seed-1339", "without-smear", "without-softcap"]
    # Without an average the live weights count.
    assert bpb["seed-1338"] == 1.75
    again = Device(tiny_data, {})
    assert run(tiny_data, tmp_path, again)[1] == bpb
    assert again.started == []


@pytest.mark.parametrize("word", ["data_identity", "recipe_hash"])
def test_runs_of_another_recipe_or_data_are_refused(
    tmp_path: Path, tiny_data: Path, word: str
) -> None:
    device = Device(tiny_data, BPB)
    device.identity = "other" if word == "data_identity" else device.identity
    run(tiny_data, tmp_path, device)
    again = Device(tiny_data, BPB)
    overrides = ("train.clip=9.0",) if word == "recipe_hash" else ()
    with pytest.raises(RunError, match=rf"seed-1337 holds a run with {word} .* another --out"):
        run(tiny_data, tmp_path, again, 1, *overrides)
    assert again.started == []


@pytest.mark.parametrize("tree", ["[]", "{}", '{"live_bpb": "x", "average_bpb": null}'])
def test_a_damaged_validation_is_named(tmp_path: Path, tree: str) -> None:
    (tmp_path / "validation.json").write_text(tree)
    with pytest.raises(RunError, match=r"validation\.json"):
        read_bpb(RunFolder(tmp_path))


def test_a_score_that_is_no_number_is_named(tmp_path: Path) -> None:
    write_validation(tmp_path, average=math.nan)
    with pytest.raises(RunError, match="nan bits per byte"):
        read_bpb(RunFolder(tmp_path))


def test_failures_do_not_stop_the_others(tmp_path: Path, tiny_data: Path) -> None:
    device = Device(tiny_data, BPB, {"without-smear": 1, "without-softcap": 0})
    plan, bpb, failed = run(tiny_data, tmp_path, device)
    reasons = {
        "without-smear": "train: exit code 1",
        "without-softcap": "train: stopped before its end",
    }
    assert failed == reasons
    assert set(bpb) == {"seed-1337", "seed-1338", "seed-1339"}
    assert summarize(plan, bpb)["levers"] == []
    tail = read_tail(tmp_path / "without-smear", 2)
    assert tail == "line 28 of without-smear\nline 29 of without-smear"
    assert read_tail(tmp_path / "nothing") == ""


def test_a_stopped_ablation_ends_its_runs(tmp_path: Path, tiny_data: Path) -> None:
    device = Device(tiny_data, BPB)
    before = signal.getsignal(signal.SIGTERM)

    class Stop(Watcher):
        def note(self, line: str) -> None:
            signal.raise_signal(signal.SIGTERM)

    with pytest.raises(KeyboardInterrupt):
        run(tiny_data, tmp_path, device, 3, progress=Stop())
    assert device.started == ["seed-1337", "seed-1338", "seed-1339"]
    left = [started for name, started in device.runs.items() if name != "seed-1337"]
    assert all(started.terminated and started.waited for started in left)
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
    figure = plan.figures["without-smear"]
    measurement = Measurement([figure], tiny_data, tmp_path, "cpu")
    assert measurement.run(lambda: None) == {}, read_tail(tmp_path / "without-smear")
    folder = RunFolder(tmp_path / "without-smear")
    assert folder.read_json(folder.about_file)["recipe_hash"] == figure.job.recipe_hash
    assert [line["tokens"] for line in folder.metrics()] == [1024]
    # One step of training leaves a model of 512 pieces little better than a guess.
    assert 1 < measurement.figures[figure.key] < 9
    assert read_tail(folder.path)


def invoke(
    device: Device, data: Path, out: Path, monkeypatch: pytest.MonkeyPatch, *words: str
) -> Any:
    def run_with(*args: Any) -> Any:
        return run_ablation(*args, start_words=device)

    monkeypatch.setattr(ablate, "run_ablation", run_with)
    sets = [word for override in (*SMALL, *LOOPS) for word in ("--set", override)]
    words = ("--data", str(data), "--out", str(out), "--device", "cpu", *sets, *words)
    return CliRunner().invoke(app, ["ablate", "cpu", "--tokens", str(TOKENS), *words])


def test_the_command_leaves_json_and_a_table(
    tiny_data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    device = Device(tiny_data, BPB)
    invoked = invoke(device, tiny_data, tmp_path, monkeypatch, "--seeds", "3")
    assert invoked.exit_code == 0, invoked.output
    assert "8 of 8, " in invoked.stderr and "seed-1338: 2.0040 bits per byte" in invoked.stderr
    result = json.loads((tmp_path / "ablation.json").read_text())
    assert result["data_identity"] == device.identity and len(result["levers"]) == 4
    assert "| loop (and recur_ab, loops on) | 2.0100 | +30.00 |" in (
        (tmp_path / "ablation.md").read_text()
    )
    # The result is all that a second call needs.
    device.started.clear()
    again = invoke(device, tiny_data, tmp_path, monkeypatch, "--seeds", "3", "--json")
    assert json.loads(again.stdout) == result and device.started == []


def test_the_command_names_what_failed(
    tiny_data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    device = Device(tiny_data, BPB, {"without-smear": 1})
    invoked = invoke(device, tiny_data, tmp_path, monkeypatch, "--seeds", "3", "--json")
    assert invoked.exit_code == 2
    assert "without-smear: failed, exit code 1" in invoked.stderr.replace("\n", " ")
    assert "line 29 of without-smear" in invoked.stderr
    levers = [row["lever"] for row in json.loads(invoked.stdout)["levers"]]
    assert levers == ["loop", "recur_ab", "softcap"]


def test_known_runs_are_not_made_again(tiny_data: Path, tmp_path: Path) -> None:
    old, new = tmp_path / "old", tmp_path / "new"
    request = Request("cpu", (*SMALL, *LOOPS), (), 3, TOKENS)
    device = Device(tiny_data, BPB | {"without-loop": 2.5})
    tree, _ = run_ablation(
        replace(request, levers=("loop",)), tiny_data, old, "cpu", start_words=device
    )
    device = Device(tiny_data, {"without-smear": 2.25})
    known = old / "ablation.json"
    result, failed = run_ablation(request, tiny_data, new, "cpu", known=known, start_words=device)
    assert failed == {}
    assert device.started == ["without-smear", "without-recur_ab", "without-softcap"]
    assert result["baseline"] == tree["baseline"] and result["loops_on"] == tree["loops_on"]
    bpb = {row["lever"]: row["bpb"] for row in result["levers"]}
    assert bpb == {"loop": 2.5, "recur_ab": 2.01, "smear": 2.25, "softcap": 2.01}
    # Another recipe, and other numbers of tokens, share no run with the known ones.
    longer = replace(request, num_tokens=2 * TOKENS, levers=("loop",))
    device = Device(tiny_data, BPB)
    run_ablation(longer, tiny_data, tmp_path / "long", "cpu", known=known, start_words=device)
    assert len(device.started) == 5


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"data_identity": "e"}, "has data_identity e, these runs have "),
        ({"device": "another"}, "has device another, these runs have "),
        ({"figures": {"x": "y"}}, "is not the record of a measurement"),
        ({"figures": None}, "is not the record of a measurement"),
    ],
)
def test_known_runs_of_something_else_are_refused(
    tiny_data: Path, tmp_path: Path, change: dict[str, Any], words: str
) -> None:
    request, path = Request("cpu", SMALL, (), 3, TOKENS), tmp_path / "known.json"
    device = Device(tiny_data, BPB)

    def again() -> None:
        run_ablation(request, tiny_data, tmp_path / "b", "cpu", known=path, start_words=device)

    with pytest.raises(RunError, match="does not exist; earlier runs leave"):
        again()
    path.write_text("[]")
    with pytest.raises(RunError, match="does not hold a JSON object"):
        again()
    result, _ = run_ablation(request, tiny_data, tmp_path / "a", "cpu", start_words=device)
    path.write_text(json.dumps(result | change))
    with pytest.raises(RunError, match=words):
        again()


def test_help_teaches_with_examples() -> None:
    text = CliRunner().invoke(app, ["ablate", "--help"]).stdout
    assert "underpar ablate pr2014 --data data --out runs/worth" in text
