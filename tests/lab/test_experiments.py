"""Experiments: seeds in turn, a limit of time, what a stop leaves, the page, the shipped file."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from underpar.build.levers import resolve_levers
from underpar.cli import app
from underpar.core.run_folder import RunFolder
from underpar.core.runtime import Runtime
from underpar.data.folder import data_identity, load_data
from underpar.errors import BenchError, RunError
from underpar.lab import runs
from underpar.lab.claims import EXPERIMENTS, SCORED, WITH, WITHOUT, read_claims
from underpar.lab.experiments import (
    DONE,
    NO_TIME,
    RUNS,
    plan_request,
    read_record,
    to_tables,
    write_page,
)
from underpar.lab.measurement import Allowance, read_bpb
from underpar.lab.runs import token_budget
from underpar.lab.variants import Request, make_cells, run_variants
from underpar.recipe import Recipe, load_recipe, to_toml
from underpar.stages.pack import pack_run
from underpar.stages.train import train

FILE = """
[gain]
hypothesis = "sharper attention"
source = "PR 1"
base = "{base}"
set = ["levers.qk_gain.init=4.0"]
expected = "2"

[smear]
hypothesis = "pairs from the start"
source = "PR 2"
base = "{base}"
both = ["levers.qk_gain.init=4.0"]
set = ["levers.smear=true"]
decision = "not in the recipe: bytes"
"""
# Seconds that the made-up machine needs for a run.
SECONDS = 100.0


class Ended:
    """A process that has ended."""

    def poll(self) -> int:
        return 0

    def terminate(self) -> None:
        pass

    def wait(self) -> int:
        return 0


class Machine:
    """Trains in no time by a clock of its own, with made-up figures; may be stopped."""

    def __init__(self, identity: str, stop_before: int = -1) -> None:
        self.identity, self.stop_before, self.time = identity, stop_before, 0.0
        self.trained: list[tuple[bool, bool, int]] = []

    def now(self) -> float:
        return self.time

    def __call__(self, words: Sequence[str], path: Path) -> Any:
        if len(self.trained) == self.stop_before:
            raise KeyboardInterrupt
        seed = next(int(w.split("=")[1]) for w in words if w.startswith("train.seed="))
        gain, smear = (f"levers.{w}" in words for w in ("qk_gain.init=4.0", "smear=true"))
        self.trained.append((gain, smear, seed))
        self.time += SECONDS
        # The luck of a seed is large, a change is worth 4, and 0.1 mBPB are noise.
        luck = 0.05 * (seed % 7) + 1e-4 * (seed * (1 + gain + 2 * smear) % 5)
        values = {"average_bpb": None, "live_bpb": 2.0 + luck - 0.004 * gain, "tokens": 1}
        folder = RunFolder(path)
        path.mkdir(parents=True, exist_ok=True)
        name = path.name.rpartition("-")[2]
        folder.about_file.write_text(
            json.dumps({"recipe_hash": name, "data_identity": self.identity})
        )
        folder.validation_file.write_text(json.dumps(values))
        return Ended()


@pytest.fixture(autouse=True)
def no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runs, "POLL_SECONDS", 0.0)


@pytest.fixture
def request_(tmp_path: Path, tiny_recipe: Any) -> Request:
    base = tmp_path / "base.toml"
    base.write_text(to_toml(tiny_recipe))
    path = tmp_path / "experiments.toml"
    path.write_text(FILE.format(base=base))
    return Request(path, num_seeds=3)


@pytest.fixture
def machine(tiny_data: Path) -> Machine:
    return Machine(data_identity(load_data(tiny_data)))


def run(
    request: Request, data: Path, out: Path, machine: Machine, seconds: float = 1e9, **rest: Any
) -> dict[str, Any]:
    allowance = Allowance(seconds, now=machine.now)
    result, failed = run_variants(
        request, data, out, "cpu", start_words=machine, allowance=allowance, **rest
    )
    assert not failed
    return result


def test_all_get_their_first_seed_before_any_gets_its_second(
    request_: Request, tiny_data: Path, tmp_path: Path, machine: Machine
) -> None:
    run(request_, tiny_data, tmp_path / "out", machine)
    first = machine.trained[0][2]
    # With the gain is one of the first experiment's runs and, as `both`, one of the second's.
    kinds = [(False, False), (True, False), (True, True)]
    assert machine.trained == [(*kind, seed) for seed in range(first, first + 3) for kind in kinds]


def test_no_run_starts_that_would_end_too_late(
    request_: Request, tiny_data: Path, tmp_path: Path, machine: Machine
) -> None:
    out = tmp_path / "out"
    # The first run tells what a run takes: 100 s. Of 450 s, 50 are not enough for another.
    result = run(request_, tiny_data, out, machine, 450.0)
    assert len(machine.trained) == 4
    assert [len(row["bpb"]) for row in result["claims"]["gain"].values()] == [2, 1]
    # The next session knows how long runs take, and what is left to do.
    allowance = Allowance(250.0, now=machine.now)
    rows = plan_request(request_, tiny_data, out, "cpu", None, allowance)
    assert [row.state for row in rows] == [DONE] * 4 + [RUNS] * 2 + [NO_TIME] * 3
    assert {row.seconds for row in rows} == {SECONDS}
    assert rows[1].uses == ("gain with", "smear without")
    assert len(machine.trained) == 4
    # Side by side, twice as many have time.
    rows = plan_request(request_, tiny_data, out, "cpu", None, allowance, 2)
    assert [row.state for row in rows] == [DONE] * 4 + [RUNS] * 4 + [NO_TIME]
    run(request_, tiny_data, out, machine, 250.0)
    assert len(machine.trained) == 6


def test_a_stop_loses_nothing_that_was_finished(
    request_: Request, tiny_data: Path, tmp_path: Path, machine: Machine
) -> None:
    machine.stop_before = 5
    with pytest.raises(KeyboardInterrupt):
        run(request_, tiny_data, tmp_path / "a", machine)
    result = json.loads((tmp_path / "a" / "variants.json").read_text())
    assert len(result["figures"]) == 5
    # Another machine has the result alone, without the run folders.
    shutil.copy(tmp_path / "a" / "variants.json", tmp_path / "known.json")
    machine.stop_before = -1
    known = tmp_path / "known.json"
    result = run(request_, tiny_data, tmp_path / "b", machine, known=known)
    assert len(result["figures"]) == 9 and len(machine.trained) == 9
    again = run(request_, tiny_data, tmp_path / "b", machine)
    assert again == result and len(machine.trained) == 9


def test_the_page_says_what_each_change_brought(
    request_: Request, tiny_data: Path, tmp_path: Path, machine: Machine
) -> None:
    result = run(request_, tiny_data, tmp_path / "out", machine)
    rows = [line for line in to_tables(request_.file, result).splitlines() if line[:2] == "| "][1:]
    cells = [[cell.strip() for cell in row.strip("|").split("|")] for row in rows[1:]]
    gain, smear = cells
    assert gain[:2] == ["gain", "sharper attention (PR 1). Expected: 2."]
    assert gain[2].endswith(": `levers.qk_gain.init=4.0`") and gain[3] == "3"
    difference, low, _, high = gain[4].replace("(", "").replace(")", "").split()
    assert float(low) < float(difference) < float(high) < 0
    assert float(difference) == pytest.approx(-4, abs=0.2) and gain[5] == "helps"
    assert smear[2].endswith("`levers.smear=true` on `levers.qk_gain.init=4.0`")
    assert smear[5] == "open; not in the recipe: bytes"


def test_one_seed_decides_nothing_and_none_is_said(
    request_: Request, tiny_data: Path, tmp_path: Path, machine: Machine
) -> None:
    one = Request(request_.file, ("gain",), num_seeds=1)
    page = to_tables(one.file, run(one, tiny_data, tmp_path / "out", machine))
    (gain,) = [line for line in page.splitlines() if line.startswith("| gain")]
    (smear,) = [line for line in page.splitlines() if line.startswith("| smear")]
    assert gain.endswith("| one seed |") and "to" not in gain.split("|")[5]
    assert "| 0 |  | not in the recipe: bytes |" in smear


def test_the_page_has_a_table_per_protocol(
    request_: Request, tiny_data: Path, tmp_path: Path, machine: Machine
) -> None:
    run(request_, tiny_data, tmp_path / "out", machine)
    steps = ("train.budget_steps=7",)
    short = Request(request_.file, ("gain",), steps, 2)
    result = run(short, tiny_data, tmp_path / "out", machine)
    page = to_tables(request_.file, result)
    assert "## Recipes as they are" in page and "## train.budget_steps=7" in page
    gains = [line.split("|")[4].strip() for line in page.splitlines() if "| gain" in line]
    assert gains == ["3", "2"]


def test_a_budget_of_tokens_replaces_all_others() -> None:
    train = load_recipe("h200-300s", token_budget(60_000_000)).train
    assert (train.budget_tokens, train.budget_seconds, train.budget_steps) == (60_000_000, 0, 0)


def test_the_shipped_experiments_can_be_built() -> None:
    claims = read_claims(EXPERIMENTS)
    cells = make_cells(Request(EXPERIMENTS, num_seeds=1))
    assert {cell.claim.name for cell in cells} == {*claims}
    for claim in claims.values():
        jobs = {cell.variant.name: cell.figure.job.name for cell in cells if cell.claim == claim}
        # The change changes something.
        assert jobs[WITH] != jobs[WITHOUT]


def test_an_experiment_may_stand_on_another(
    request_: Request, tiny_data: Path, tmp_path: Path, machine: Machine
) -> None:
    text = request_.file.read_text()
    both = 'both = ["levers.qk_gain.init=4.0"]'
    assert both in text
    on = request_.file.with_name("on.toml")
    on.write_text(text.replace(both, 'on = "gain"'))
    runs_of = [
        [cell.figure.key for cell in make_cells(Request(file, num_seeds=2))]
        for file in (request_.file, on)
    ]
    assert runs_of[0] == runs_of[1]
    result = run(Request(on, num_seeds=2), tiny_data, tmp_path / "out", machine)
    (smear,) = [line for line in to_tables(on, result).splitlines() if line.startswith("| smear")]
    assert "`levers.smear=true` on `gain` |" in smear


def test_the_plan_says_the_bits_that_the_cap_leaves_a_weight(
    request_: Request, tiny_data: Path, tmp_path: Path
) -> None:
    def bits_with(*overrides: str) -> set[float | None]:
        rules = "quant.rules=['blocks.*.weight grid8', 'embedding.weight grid8', '* fp16']"
        request = Request(request_.file, ("gain",), (rules, *overrides), 1)
        rows = plan_request(request, tiny_data, tmp_path, "cpu", None, Allowance())
        return {row.bits for row in rows}

    rest = 320_000
    (small,), (large,) = (bits_with(f"limits.cap_bytes={rest + n}") for n in (100_000, 200_000))
    assert small and large and 2 < small < large
    # What the cap gives more, the matrices get.
    weights = 2 * (3 * 96 * 96 + 2 * 96 * 128) + 512 * 96
    assert large - small == pytest.approx(8 * 100_000 / weights, rel=1e-3)
    with pytest.raises(BenchError, match=r"does not fit: .* bits per weight, expected 2 or more"):
        bits_with("limits.cap_bytes=200000")
    request = Request(request_.file, ("gain",), (), 1)
    rows = plan_request(request, tiny_data, tmp_path, "cpu", None, Allowance())
    assert [row.bits for row in rows] == [None, None]


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('set = ["levers.smear=true"]', 'set = []\non = "gian"', "no such.*mean 'gain'"),
        ('set = ["levers.smear=true"]', 'set = []\non = "smear"', "recursion"),
        ('source = "PR 1"', 'from = "PR 1"', "unexpected keyword argument 'from'"),
        ("set = [", "set = [1, ", "settings are text"),
        ('set = ["levers.smear=true"]', 'set = "levers.smear=true"', "settings are text"),
    ],
)
def test_mistakes_in_the_file_are_named(
    request_: Request, old: str, new: str, message: str
) -> None:
    text = request_.file.read_text()
    assert old in text
    request_.file.write_text(text.replace(old, new, 1))
    with pytest.raises(BenchError, match=message):
        make_cells(request_)


def test_the_page_of_the_repository_is_made_from_its_record(tmp_path: Path) -> None:
    docs = Path(__file__).resolve().parents[2] / "docs"
    record = docs / "evidence" / "experiments.json"
    page = tmp_path / "frontier.md"
    shutil.copy(docs / "frontier.md", page)
    write_page(page, EXPERIMENTS, read_record(record if record.exists() else None))
    assert (docs / "frontier.md").read_text() == page.read_text()


def test_the_page_alone_needs_no_data(
    request_: Request, tiny_data: Path, tmp_path: Path, machine: Machine
) -> None:
    result = run(request_, tiny_data, tmp_path / "out", machine)
    words = ["lab", "experiments", "--file", str(request_.file)]
    page, record = tmp_path / "page.md", str(tmp_path / "out" / "variants.json")
    answer = CliRunner().invoke(app, [*words, "--known", record, "--page", str(page)])
    assert answer.exit_code == 0 and to_tables(request_.file, result) in page.read_text()
    # What people write around the tables stays.
    page.write_text("Above.\n" + page.read_text().replace("| gain |", "| lost |") + "Below.\n")
    assert CliRunner().invoke(app, [*words, "--known", record, "--page", str(page)]).exit_code == 0
    text = page.read_text()
    assert text.startswith("Above.\n<!-- begin: underpar lab experiments -->\n")
    assert text.endswith("<!-- end: underpar lab experiments -->\nBelow.\n")
    assert to_tables(request_.file, result) in text
    answer = CliRunner().invoke(app, [*words, "--out", str(tmp_path)])
    assert "name both --data and --out" in str(answer.exception)
    (tmp_path / "other.json").write_text("{}")
    with pytest.raises(RunError, match="has no 'data_identity': it is not the result"):
        read_record(tmp_path / "other.json")
    with pytest.raises(RunError, match="does not exist"):
        read_record(tmp_path / "none.json")


def test_no_time_is_refused() -> None:
    with pytest.raises(BenchError, match="-5 seconds are no time"):
        Allowance(-5.0)


def test_the_command_plans_without_training(
    request_: Request, tiny_data: Path, tmp_path: Path
) -> None:
    words = ["lab", "experiments", "--data", str(tiny_data), "--out", str(tmp_path / "out")]
    words += ["--file", str(request_.file), "--plan", "--device", "cpu", "--seeds", "1", "--json"]
    answer = CliRunner().invoke(app, words)
    assert answer.exit_code == 0, answer.output
    assert [row["state"] for row in json.loads(answer.stdout)["runs"]] == [RUNS] * 3
    assert not (tmp_path / "out").exists()


# Sizes at which each shipped experiment trains in seconds; layers are those of the recipe.
SMALL = ("train.budget_steps=3", "train.micro_batch_tokens=512", "train.num_micro_batches=1")
SMALLER = {
    "model.mlp_dim=1536": "model.mlp_dim=96",
    "model.mlp_dim=1792": "model.mlp_dim=112",
    "train.query_rows=128": "train.query_rows=24",
}


@pytest.mark.slow
@pytest.mark.parametrize("name", read_claims(EXPERIMENTS))
def test_a_shipped_experiment_trains(
    name: str, data_for: Callable[[Recipe], Path], tmp_path: Path
) -> None:
    claim = read_claims(EXPERIMENTS)[name]
    change = next(variant.set for variant in claim.variants if variant.name == WITH)
    words = (*(SMALLER.get(word, word) for word in change), *SMALL)
    recipe = resolve_levers(load_recipe(f"{claim.base}+cpu", words))
    folder = RunFolder(tmp_path)
    assert train(recipe, data_for(recipe), folder, Runtime(torch.device("cpu")))["finished"]
    # Three steps are better than a guess among 512 pieces of two bytes.
    assert 1 < (read_bpb(folder) or 0) < 5.5
    if claim.figure == SCORED:
        budget = pack_run(folder)
        assert budget.total_bytes <= recipe.limits.cap_bytes


@pytest.mark.slow
def test_real_runs_make_a_page(request_: Request, tiny_data: Path, tmp_path: Path) -> None:
    page = tmp_path / "frontier.md"
    words = ["lab", "experiments", "--data", str(tiny_data), "--out", str(tmp_path / "out")]
    words += ["--file", str(request_.file), "--experiment", "gain", "--tokens", "2000"]
    words += ["--seeds", "1", "--jobs", "2", "--device", "cpu", "--page", str(page)]
    answer = CliRunner().invoke(app, words)
    assert answer.exit_code == 0, answer.output
    assert "| gain | " in page.read_text() and "| 1 | " in page.read_text()
