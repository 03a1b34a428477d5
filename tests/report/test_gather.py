"""Gathering: what is read, what is refused by name, and the arithmetic against xz."""

from __future__ import annotations

import json
import math
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from underpar.audit.rules import RULES
from underpar.core.run_folder import RunFolder
from underpar.errors import RecipeError, RunError, UnderparError
from underpar.recipe import load_recipe
from underpar.report.facts import Comparison
from underpar.report.gather import gather


def test_a_full_run(make_run: Any) -> None:
    run = gather(make_run("first"))
    assert run.name == "first"
    assert run.recipe_hash == "0123456789"
    assert ("train_tokens", "970,467") in run.about
    assert ("versions.torch", "2.13.0") in run.about
    assert [s.step for s in run.steps] == list(range(1, 11))
    assert run.sizes and run.sizes.classes == (("mlp", 5001), ("code", 1789), ("framing", -1))
    assert run.sizes.tensors[0].shape == "384 \u00d7 128"
    assert list(run.scores) == ["plain", "adapt"]
    assert run.scores["plain"].score.bpb == 3.0
    assert run.audit and run.audit.num_findings("pass") == len(RULES)
    assert ("sums", "1.0, 0.5") in run.audit.findings[0].evidence
    assert run.stale_files() == []


def test_recipe_sections_in_order(make_run: Any) -> None:
    assert gather(make_run()).recipe == (
        ("model", (("dim", "128"),)),
        ("levers.adapt_scales", ()),
        ("quant", (("rules", "*.attn.* int6:13\n* fp16"),)),
    )


def test_a_run_that_has_only_begun_is_shown_empty(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    folder.write_recipe(load_recipe("demo"))
    run = gather(folder)
    assert (run.recipe_hash, run.steps, run.sizes) == (None, (), None)
    assert (run.scores, run.audit, run.artifact_sha256) == ({}, None, None)


@pytest.mark.parametrize("exists", [False, True])
def test_what_is_no_run_folder_is_named(tmp_path: Path, exists: bool) -> None:
    path = tmp_path / "elsewhere"
    if exists:
        path.mkdir()
    with pytest.raises(RunError, match="elsewhere is not a run folder"):
        gather(RunFolder(path))


def test_totals_come_from_the_ledger(make_run: Any, trees: Any) -> None:
    lying = {**trees["score"]("plain"), "bpb": 0.5, "bits": 1.0, "bytes": 9}
    assert gather(make_run("a", plain=lying)).scores["plain"].comparison.bpb == 3.0
    # What a decoder must be told is no part of the ledger, and counts.
    told = {**trees["score"]("plain"), "side_bits": 2000.0}
    assert gather(make_run("b", plain=told)).scores["plain"].comparison.bpb == 4.0


def test_numbers_that_are_none_are_kept(make_run: Any, trees: Any) -> None:
    lines = [trees["step"](1, math.nan), trees["step"](2, math.inf)]
    run = gather(make_run(metrics=lines, plain=trees["score"]("plain", math.nan)))
    assert [math.isfinite(s.loss) for s in run.steps] == [False, False]
    assert run.scores["plain"].comparison.break_even_bytes is None


def test_results_of_another_artifact_are_named(make_run: Any, trees: Any) -> None:
    other = {**trees["score"]("adapt"), "artifact_sha256": "00"}
    assert gather(make_run("a", adapt=other)).stale_files() == ["score-adapt.json"]
    assert gather(make_run("b", adapt=other, artifact=None)).stale_files() == ["score-adapt.json"]
    repacked = gather(make_run("c", artifact="another"))
    assert repacked.stale_files() == ["score-plain.json", "score-adapt.json", "audit.json"]


DAMAGE = [
    ("about", "{", "run.json is not valid JSON"),
    ("about", "[1]", "run.json does not hold a JSON object"),
    ("about", {"recipe_hash": 7}, "run.json: recipe_hash is 7, expected a string"),
    ("recipe", "dim = = 3", "recipe.toml' is not valid TOML"),
    ("metrics", "{]\n", "metrics.jsonl is not valid JSON"),
    ("metrics", "3\n", "metrics.jsonl does not hold a JSON object"),
    ("metrics", '{"step": true}\n', "metrics.jsonl: step is True, expected a whole number"),
    ("metrics", '{"step": -1}\n', "metrics.jsonl: step is -1, expected a whole number from 0"),
    ("metrics", '{"step": 1, "loss": 1' + "0" * 400 + "}\n", "metrics.jsonl: loss is 10000"),
    ("budget", {"tensors": [1]}, "budget.json: tensors is .*, expected a list of objects"),
    ("budget", "[" * 100_000, "budget.json is not valid JSON"),
    ("plain", {"ledger": []}, "score-plain.json: method is missing"),
    ("audit", {"findings": []}, "audit.json: verdict is missing"),
    ("audit", {"findings": [], "verdict": "splendid"}, "audit.json: verdict 'splendid'"),
]


@pytest.mark.parametrize(("file", "content", "message"), DAMAGE)
def test_damage_is_refused_by_file_name(
    make_run: Any, file: str, content: Any, message: str
) -> None:
    with pytest.raises(UnderparError, match=message) as caught:
        gather(make_run(**{file: content}))
    assert "\n" not in str(caught.value)


def test_deep_nesting_is_refused(make_run: Any) -> None:
    deep = "a." * 2000 + "a"
    with pytest.raises(RecipeError, match="nested too deeply"):
        gather(make_run(recipe=f"[{deep}]\nx = 1\n"))


def test_scores_must_price_text_and_lie_under_their_own_name(make_run: Any, trees: Any) -> None:
    with pytest.raises(RunError, match="prices no text"):
        gather(make_run("a", plain={**trees["score"]("plain"), "ledger": []}))
    with pytest.raises(RunError, match=r"score-plain\.json holds method 'adapt'"):
        gather(make_run("b", plain=trees["score"]("adapt")))


def test_a_pass_over_a_fail_is_refused(make_run: Any, trees: Any) -> None:
    lying = {**trees["audit"]("fail"), "verdict": "pass"}
    with pytest.raises(RunError, match="says pass over findings that say fail"):
        gather(make_run(audit=lying))


def test_a_last_line_cut_short_is_left_out(make_run: Any, trees: Any) -> None:
    whole = json.dumps(trees["step"](1)) + "\n"
    assert len(gather(make_run(metrics=whole + whole[:20])).steps) == 1


def test_comparison_by_hand() -> None:
    c = Comparison(text_bytes=1000, bits=2000.0, xz_bytes=350, artifact_bytes=600)
    assert (c.xz_bpb, c.bpb, c.packed_bpb) == (2.8, 2.0, 6.8)
    # Saves 100 bytes in 1,000: 6,000 bytes pay for 600 exactly, one more is a gain.
    assert c.break_even_bytes == 6001


def test_no_break_even_without_a_gain() -> None:
    assert Comparison(1000, 2800.0, 350, 600).break_even_bytes is None
    assert Comparison(1000, 2900.0, 350, 600).break_even_bytes is None
    assert Comparison(1000, -math.inf, 350, 600).break_even_bytes is None


@settings(deadline=None, max_examples=100)
@given(st.integers(1, 10**9), st.integers(0, 10**9), st.integers(1, 10**9), st.integers(0, 10**8))
def test_break_even_is_the_first_length_that_wins(
    text: int, bits: int, xz: int, model: int
) -> None:
    length = Comparison(text, float(bits), xz, model).break_even_bytes

    def wins(num_bytes: int) -> bool:
        return model + Fraction(num_bytes * bits, 8 * text) < Fraction(num_bytes * xz, text)

    if length is None:
        assert bits >= 8 * xz
    else:
        assert wins(length) and not wins(length - 1)
