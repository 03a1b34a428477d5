"""Comparing scores: numbers, files and runs; pairing by seed; the record's margin."""

import json
from pathlib import Path

import pytest

from commands import run, run_json
from underpar.core.run_folder import RunFolder
from underpar.errors import BenchError, RunError
from underpar.lab.compare import Result, compare, mean_bytes_per_token, pair_by_seed, read_result
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
    assert mean_bytes_per_token(OLD) is None
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
    assert read_result(str(tmp_path), "plain") == Result(str(tmp_path), 2.0, 5, 3.0, num_bytes=30)
    folder.score_file("plain").write_text("{}")
    with pytest.raises(RunError, match="bytes is missing"):
        read_result(str(tmp_path), "plain")


# Final bits per byte by seed of published records; openai/parameter-golf PR 2014, 2135, 1953, 1855
# and the re-run of PR 1868, whose calibration fits into 600 s.
PR2014 = [1.05740567, 1.05730104, 1.05807084]
PR2135 = [1.05610947, 1.05662016, 1.05679341]
PR1953 = [1.05824720, 1.05846113, 1.05895276]
PR1855 = [1.05989454, 1.06124613, 1.06208695]
PR1868 = [1.06083288, 1.06090748, 1.06248776]
# Bytes over targets of the validation text in CaseOps tokens.
CASEOPS = 151_080_645 / 47_853_343


@pytest.mark.parametrize(
    ("old", "new", "gain", "p", "p_margin", "is_practice_met"),
    [
        (PR2014, PR2135, 0.00108, 0.0138, 0.99, True),
        (PR1953, PR2014, 0.00096, 0.0202, 0.99, True),
        (PR1855, PR2014, 0.00348, 0.0106, 0.096, True),
        (PR1855, PR2135, 0.00457, 0.0063, 0.029, True),
        (PR1868, PR1855, 0.00033, 0.36, 0.96, False),
    ],
)
def test_the_worked_values_of_published_records(
    old: list[float],
    new: list[float],
    gain: float,
    p: float,
    p_margin: float,
    is_practice_met: bool,
) -> None:
    result = compare(numbers(old), numbers(new), CASEOPS)
    assert result["gain_bpb"] == pytest.approx(gain, abs=6e-6)
    assert result["gain_nats_per_token"] == pytest.approx(gain / 0.456961, abs=2e-5)
    assert result["tests"][0]["p"] == pytest.approx(p, abs=6e-5 if p < 0.1 else 6e-3)
    assert result["tests"][1]["p"] == pytest.approx(p_margin, abs=6e-4 if p_margin < 0.2 else 6e-3)
    per_token, per_byte, practice = result["acceptance"]
    # No late record meets the README to the letter; two gains only have a p below 0.01 without it.
    assert (per_token["is_met"], per_byte["is_met"]) == (False, False)
    assert practice["is_met"] is is_practice_met


@pytest.mark.parametrize(
    ("width", "margin"),
    [
        (CASEOPS, 0.002285),
        (151_078_222 / 40_540_160, 0.001936),
        (151_080_363 / 62_021_632, 0.002961),
    ],
)
def test_a_margin_in_nats_per_token_is_converted_with_the_new_sides_tokens(
    width: float, margin: float
) -> None:
    result = compare(OLD, [Result("x", 1.05, 1, width), Result("y", 1.051, 2, width)])
    token, byte = result["tests"][1:3]
    assert token["margin"] == pytest.approx(margin, abs=5e-7)
    assert token["margin_nats_per_token"] == pytest.approx(0.005)
    assert byte["margin"] == pytest.approx(0.007213, abs=5e-7)
    assert byte["margin_nats_per_token"] == pytest.approx(0.005 * width)


def test_the_rules_are_met_by_a_large_gain_and_plan_the_seeds_of_a_small_one() -> None:
    large = compare(numbers([1.0600, 1.0604, 1.0602]), numbers([1.0500, 1.0504, 1.0502]), CASEOPS)
    assert [rule["is_met"] for rule in large["acceptance"]] == [True, True, True]
    assert [rule["num_missing"] for rule in large["acceptance"]] == [0, 0, 0]
    # A deviation of 0.0004 and a gain of 0.0016 beyond the margin: four runs per side.
    olds = [1.06, 1.0604, 1.0608]
    news = [value - 0.0016 - 0.005 / 0.6931471805599453 / CASEOPS for value in olds]
    small = compare(numbers(olds), numbers(news), CASEOPS)["acceptance"][0]
    assert (small["num_seeds"], small["num_missing"]) == (4, 1)
    worse = compare(numbers(news), numbers(olds), CASEOPS)
    assert {rule["num_seeds"] for rule in worse["acceptance"]} == {None}
    assert {rule["is_met"] for rule in worse["acceptance"]} == {False}


def test_own_margins_are_tested_in_either_unit() -> None:
    result = compare(OLD, NEW, margin_nats=0.001, margin_bpb=0.0004)
    assert [t["margin"] for t in result["tests"][3:5]] == pytest.approx(
        [0.001 / 0.6931471805599453 / 3.0, 0.0004]
    )
    with pytest.raises(BenchError, match="--bytes-per-token"):
        compare(numbers(PR2014), numbers(PR2135), margin_nats=0.001)
    for bad in (-1.0, float("nan"), float("inf")):
        with pytest.raises(BenchError, match="expected a finite number"):
            compare(OLD, NEW, margin_bpb=bad)
        with pytest.raises(BenchError, match="expected a finite number above 0"):
            compare(OLD, NEW, bytes_per_token=bad)


def test_without_tokens_the_reading_per_token_is_not_shown() -> None:
    result = compare(numbers(PR2014), numbers(PR2135))
    per_token, per_byte, practice = result["acceptance"]
    assert per_token["is_met"] is None and "bytes per token" in per_token["why"]
    assert (per_byte["is_met"], practice["is_met"]) == (False, True)
    assert result["gain_nats_per_token"] is None


def test_sides_without_spread_show_nothing() -> None:
    result = compare(numbers([1.06, 1.06]), numbers([1.05, 1.05]), CASEOPS)
    assert {rule["is_met"] for rule in result["acceptance"]} == {None}
    assert any("neither side varies" in note for note in result["notes"])
    json.dumps(result, allow_nan=False)


@pytest.mark.parametrize("bad", ["nan", "inf", "-1.0", "0", "1e400"])
def test_numbers_that_are_no_score_are_refused(bad: str) -> None:
    with pytest.raises(BenchError, match="expected a finite number above 0"):
        read_result(bad, "plain")


def test_one_result_per_side_is_refused() -> None:
    with pytest.raises(BenchError, match="the old side has 1 result; a test needs 2"):
        compare(OLD[:1], NEW)


def a_score(name: str, bpb: float, **known: object) -> Result:
    about = {"data": "text", "num_bytes": 100, "method": "plain", "artifact": name} | known
    return Result(name, bpb, **about)  # type: ignore[arg-type]


def test_one_run_may_not_be_given_twice_on_a_side() -> None:
    sides = [a_score("a", 1.1), a_score("b", 1.2)], [a_score("c", 1.0), a_score("d", 1.05)]
    compare(*sides)
    with pytest.raises(BenchError, match="copy is the run of a again; give it once"):
        compare([sides[0][0], a_score("copy", 1.1, artifact="a")], sides[1])
    with pytest.raises(BenchError, match="a is the run of a again"):
        compare(sides[1], [sides[0][0], sides[0][0]])
    notes = compare(sides[0], [sides[0][0], sides[1][0]])["notes"]
    assert "a is on both sides, which hides a gain" in notes
    # The same artifacts by another method are other scores, and the difference is said.
    adapted = [a_score(r.name, r.bpb - 0.1, method="adapt") for r in sides[0]]
    notes = compare(sides[0], adapted)["notes"]
    assert any("different methods (plain and adapt)" in note for note in notes)


def test_a_side_of_several_methods_or_texts_is_refused() -> None:
    with pytest.raises(BenchError, match=r"the new side mixes scoring methods \(adapt, plain\)"):
        compare(OLD, [a_score("c", 1.0), a_score("d", 1.05, method="adapt")])
    news = [a_score("c", 1.0, num_bytes=90), a_score("d", 1.05, num_bytes=90)]
    with pytest.raises(BenchError, match="numbers of held-out bytes do not compare: 100 and 90"):
        compare([a_score("a", 1.1), a_score("b", 1.2)], news)


def test_the_command_prints_both_units_and_both_rules() -> None:
    words = ["compare", *PR1855, "--with", *PR2135, "--bytes-per-token", CASEOPS]
    text = run(*words)
    assert "0.002285" in text and "0.00500" in text and "0.007213" in text
    assert "README, margin per token" in text and "not met" in text and "met" in text
    assert "0.004568 bits per byte = 0.009997 nats per token" in text
    assert run_json(*words)["acceptance"][2]["is_met"] is True
    refused = invoke_error("compare", 1.05, "--with", 1.04, 1.03)
    assert "2 runs or more per side" in refused


def numbers(values: list[float]) -> list[Result]:
    return [Result(str(value), value) for value in values]


def invoke_error(*words: object) -> str:
    with pytest.raises(BenchError) as caught:
        run(*words)
    return str(caught.value)
