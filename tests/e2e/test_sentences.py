"""What commands say at their end: a sentence first, then words and units, then the next command."""

import re
from pathlib import Path
from typing import Any

import pytest

from commands import run
from tiny import TinyRun
from underpar.audit.finding import verdict_text
from underpar.cli import results
from underpar.core.words import bytes_text, change_text, clock_text, count_text
from underpar.report.facts import parts_of

TRAINED: dict[str, Any] = {
    "finished": True,
    "run": "runs/mine",
    "recipe_hash": "abc",
    "attention": "sdpa",
    "compiled": False,
    "step": 1200,
    "tokens": 8192,
    "start_seconds": 7.3,
    "seconds": 270.0,
    "loss": 2.5,
}
SCORED: dict[str, Any] = {
    "finished": True,
    "method": "plain",
    "bpb": 2.0,
    "bytes": 1000,
    "documents": 1,
    "xz_bpb": 2.5,
    "bpb_with_artifact": 9.0,
    "order": "stream",
    "stopped_at": -1,
    "seconds": 1.0,
    "file": "score-plain.json",
}


def test_numbers_have_units() -> None:
    assert (bytes_text(1), bytes_text(1.4), bytes_text(1234)) == ("1 byte", "1 byte", "1,234 bytes")
    assert count_text(1, "step") == "1 step"
    assert (change_text(0.865), change_text(1.07)) == ("13.5 % smaller", "7.0 % larger")
    assert [clock_text(s) for s in (0, 61, 3723)] == ["0:00", "1:01", "1:02:03"]


def test_a_run_is_told_finished_stopped_or_ended() -> None:
    told = results.trained(TRAINED | {"average_bpb": 1.5, "live_bpb": 1.6})
    assert told.sentence == (
        "Trained 1,200 steps in 4 min 30 s: 1.5000 bits per byte of held-out text, before "
        "quantization."
    )
    assert told.next == "pack runs/mine"
    told = results.trained(TRAINED | {"finished": False})
    assert "can continue" in told.sentence and told.next == "train --resume runs/mine"
    told = results.trained(TRAINED | {"finished": False, "stopped": "0.2 nats behind"})
    assert told.sentence.endswith(": 0.2 nats behind.") and not told.next
    without_steps = {k: v for k, v in TRAINED.items() if k not in ("step", "seconds", "loss")}
    assert results.trained(without_steps).next == "pack runs/mine"


def test_a_score_is_told_against_xz() -> None:
    told = results.scored(SCORED, "runs/mine")
    assert told.sentence == "20.0 % smaller than xz: 2.0000 bits per byte."
    assert ("held-out text", "1 document, 1,000 bytes") in told.rows
    assert told.next == "audit runs/mine"
    told = results.scored(SCORED | {"xz_bpb": 1.6}, "runs/mine")
    assert told.sentence.startswith("25.0 % larger than xz")
    stopped = results.scored({"finished": False, "method": "plain", "step": 3}, "runs/mine")
    assert "same command continues" in stopped.sentence


@pytest.mark.parametrize(
    ("verdicts", "on_all", "words"),
    [
        (["pass", "pass"], "pass", "all 2 checks pass"),
        (["pass", "fail"], "fail", "fail, of 2 checks 1 fails (rule 1)"),
        (
            ["fail", "not shown", "fail"],
            "fail",
            "fail, of 3 checks 2 fail (rule 0, rule 2) and 1 is not shown (rule 1)",
        ),
        (["pass", "deviation"], "deviation", "deviation, of 2 checks 1 deviates (rule 1)"),
        # Verdicts of a report that are worse than those of the findings.
        (["pass"], "of other files", "of other files"),
    ],
)
def test_an_audit_names_what_is_no_pass(verdicts: list[str], on_all: str, words: str) -> None:
    pairs = [(f"rule {i}", verdict) for i, verdict in enumerate(verdicts)]
    assert verdict_text(pairs, on_all) == words


def test_bytes_of_levers_are_named_by_lever() -> None:
    tensors = [("levers.bigram.a", 20.0), ("levers.bigram.b", 15.5), ("levers.smear.w", 5.0)]
    tensors.append(("levers.unheard.of", 1.5))
    parts = parts_of({"attn": 30, "levers": 40, "code": 7}, [*tensors, ("embedding.weight", 1.0)])
    assert parts == [
        ("Bigram-hash embedding (bigram)", 35.5),
        ("attention", 30),
        ("code that decodes and scores", 7),
        ("SmearGate (smear)", 5.0),
        ("lever unheard", 1.5),
    ]


def test_a_comparison_is_told_in_a_sentence() -> None:
    rules = [{"rule": "a", "is_met": True}, {"rule": "b", "is_met": None}]
    figures: dict[str, Any] = {"gain_bpb": 0.001, "tests": [{"p": 0.02}], "acceptance": rules}
    assert results.compared(figures) == (
        "The new side is better by 0.001000 bits per byte (p = 0.0200); of the rules of the field "
        "it meets 'a'."
    )
    assert results.compared(figures | {"gain_bpb": -0.001}).startswith("The old side is better")
    assert results.compared(figures | {"gain_bpb": 0.0}) == "Both sides have the same mean."
    assert "p below 0.0001" in results.compared(figures | {"tests": [{"p": 1e-9}]})


def test_every_command_begins_with_a_sentence(tiny_run: TinyRun, tmp_path: Path) -> None:
    artifact, text = tiny_run.folder.artifact_file, tmp_path / "in.txt"
    text.write_text("The quick brown fox. " * 20)
    packed, back = tmp_path / "out.upz", tmp_path / "back.txt"
    for words in (
        ("size", "baseline+cpu"),
        ("compress", artifact, text, packed),
        ("decompress", artifact, packed, back),
        ("unpack", artifact, "--out", tmp_path / "weights.safetensors"),
        ("compare", "1.1", "1.2", "--with", "1.0", "1.1"),
    ):
        lines = run(*words).splitlines()
        # A sentence may take two lines; a table never comes first.
        first = " ".join(lines[:2]).partition(".")[0]
        assert re.match(r"[A-Z0-9]", first) and "\u2500" not in first, words
        assert any(line.rstrip().endswith(".") for line in lines[:3]), words


def test_the_demo_is_told_in_a_sentence_and_the_table_of_the_readme() -> None:
    plain = SCORED | {"percent_of_xz": 86.5}
    figures: dict[str, Any] = {
        "plain": plain,
        "adapted": SCORED | {"bpb": 1.9},
        "document": {"raw_bytes": 1127, "compressed_bytes": 388},
        "total_bytes": 849_875,
        "audit": "pass",
        "audited": "a random sample",
        "report": "demo/run/report.html",
        "seconds": 116.0,
    }
    told = results.demo(figures)
    assert told.sentence == "13.5 % smaller than xz; all checks pass."
    assert ("model", "2.0000 bits per byte, 13.5 % fewer than xz") in told.rows
    readme = (Path(__file__).parents[2] / "README.md").read_text()
    assert all(
        re.search(rf"^{re.escape(name)}  +\S", readme, re.MULTILINE) for name, _ in told.rows
    )
    worse = results.demo(figures | {"plain": plain | {"percent_of_xz": 107.0}, "audit": "fail"})
    assert worse.sentence == "7.0 % larger than xz; the audit says 'fail'."
    assert ("model", "2.0000 bits per byte, 7.0 % more than xz") in worse.rows
