"""Starts of a training by phase, in fresh processes."""

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from commands import run, run_json
from underpar.errors import BenchError
from underpar.lab import start_times
from underpar.lab.start_times import CACHES, PHASES, Request, Start, measure_starts, to_markdown

SHORT = ("model.num_layers=1", "train.micro_batch_tokens=256", "train.num_micro_batches=1")


def test_the_second_process_finds_the_caches_of_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[list[str]] = []

    def started(words: list[str], **_: Any) -> Any:
        seen.append(words)
        answer = {"seconds": {"import": 2.0, "trace": 1.0}, "compiler": {}, "num_graphs": 0}
        text = "printed by a library\n" + json.dumps(answer | {"device": "cpu", "compiled": False})
        return subprocess.CompletedProcess(words, 0, text, "")

    monkeypatch.setattr(start_times.subprocess, "run", started)
    starts = measure_starts(Request("demo", "data"), warm=2)
    assert [len(group) for group in starts.values()] == [1, 2]
    folders = [[word for word in words if word.split("=")[0] in CACHES] for words in seen]
    assert len(folders[0]) == len(CACHES) and folders[0] == folders[1] == folders[2]
    # A later measurement begins with other folders.
    measure_starts(Request("demo", "data"))
    assert [word for word in seen[3] if word.split("=")[0] in CACHES] != folders[0]
    with pytest.raises(BenchError, match="0 warm starts"):
        measure_starts(Request("demo", "data"), warm=0)


def test_the_table_has_a_row_per_phase_and_the_total() -> None:
    cold = Start({"import": 3.0, "compile": 40.0}, {"small": 0.1, "large": 9.0}, 5, "cuda", True)
    warm = Start({"import": 3.0, "compile": 4.0}, {"large": 0.5}, 5, "cuda", True)
    text = to_markdown({"cold": [cold], "warm": [warm]})
    rows = text.splitlines()
    assert [row.split(" | ")[0].strip("| ") for row in rows[2 : 2 + len(PHASES)]] == list(PHASES)
    assert (
        "| compile | 40.0 | 4.0 |" in rows
        and "| **first step done** | **43.0** | **7.0** |" in rows
    )
    assert rows.index("| `large` | 9.0 | 0.5 |") < rows.index("| `small` | 0.1 | 0.0 |")


def test_a_start_that_fails_is_told_in_one_line(tmp_path: Path) -> None:
    with pytest.raises(BenchError, match=r"ended with code 1; .*no recipe .nowhere"):
        measure_starts(Request("nowhere", str(tmp_path), device="cpu"))


@pytest.mark.slow
def test_starts_are_measured_in_fresh_processes(tiny_data: Path, tmp_path: Path) -> None:
    words = ["lab", "start", "baseline+cpu", "--data", tiny_data, "--device", "cpu"]
    words += [word for change in SHORT for word in ("--set", change)]
    found = run_json(*words, "--out", tmp_path / "out")
    for start in (found["cold"][0], found["warm"][0]):
        assert start["total"] == pytest.approx(sum(start["seconds"].values()))
        assert start["seconds"]["import"] > 0 and start["seconds"]["first step"] > 0
        assert "trace" not in start["seconds"] and start["num_graphs"] == 0
    assert "**first step done**" in (tmp_path / "out/start.md").read_text()
    compiled = json.loads(run(*words, "--compile", "--json"))
    cold, warm = compiled["cold"][0], compiled["warm"][0]
    assert cold["num_graphs"] == warm["num_graphs"] > 0 and cold["seconds"]["trace"] > 0
    # What was compiled is found again.
    assert (
        warm["compiler"].get("GraphLowering.codegen", 0.0)
        < cold["compiler"]["GraphLowering.codegen"]
    )
