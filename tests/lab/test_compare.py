"""Comparing scores: numbers, files and runs; pairing by seed; the record's margin."""

import json
from pathlib import Path

import pytest

from underpar.core.run_folder import RunFolder
from underpar.errors import BenchError
from underpar.lab.compare import Result, compare, pair_by_seed, read_result, record_margin_bpb
from underpar.recipe import load_recipe

OLD = [Result("a", 1.0574, 1), Result("b", 1.0573, 2), Result("c", 1.0581, 3)]
NEW = [Result("d", 1.0561, 3, 3.0), Result("e", 1.0566, 1, 3.0), Result("f", 1.0568, 2, 3.0)]


def test_seeds_are_paired_whatever_their_order() -> None:
    assert pair_by_seed(OLD, NEW) == ([1.0574, 1.0573, 1.0581], [1.0566, 1.0568, 1.0561])
    assert pair_by_seed(OLD, NEW[:2]) is None
    assert pair_by_seed([Result("x", 1.0), Result("y", 1.1)], NEW[:2]) is None


def test_both_margins_and_both_designs_are_reported() -> None:
    result = compare(OLD, NEW)
    assert [t["test"] for t in result["tests"]] == ["welch", "welch", "welch", "paired"]
    assert result["tests"][1]["margin"] == pytest.approx(0.005 / 0.693147 / 3.0, rel=1e-5)
    assert result["tests"][2]["margin"] == pytest.approx(0.007213, abs=1e-6)
    assert result["tests"][0]["p"] < result["tests"][1]["p"] < result["tests"][2]["p"]
    assert result["seeds_needed_for_this_gain"] > 1


def test_the_margin_needs_to_know_the_tokens() -> None:
    assert record_margin_bpb(OLD) is None
    assert len(compare(OLD, [Result("x", 1.05), Result("y", 1.06)])["tests"]) == 1


def test_scores_of_different_texts_do_not_compare() -> None:
    other = [Result("x", 1.0, data="one"), Result("y", 1.1, data="two")]
    with pytest.raises(BenchError, match="different held-out texts"):
        compare(OLD, other)


def test_a_loss_needs_no_seeds() -> None:
    assert compare(NEW, OLD)["seeds_needed_for_this_gain"] is None


def test_a_tiny_gain_says_that_no_number_of_seeds_will_do() -> None:
    olds = [Result("a", 1.0), Result("b", 3.0)]
    news = [Result("c", 1.0), Result("d", 3.0 - 1e-9)]
    assert compare(olds, news)["seeds_needed_for_this_gain"] is None


def test_runs_are_read_with_their_seed(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    folder.write_recipe(load_recipe("demo", ["train.seed=5"]))
    folder.score_file("plain").write_text(json.dumps({"bpb": 2.0, "bytes": 30, "targets": 10}))
    assert read_result(str(tmp_path), "plain") == Result(str(tmp_path), 2.0, 5, 3.0)
    folder.score_file("plain").write_text("{}")
    with pytest.raises(BenchError, match="not a score file"):
        read_result(str(tmp_path), "plain")
