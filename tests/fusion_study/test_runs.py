"""Runs of all variants of the study in turns: what is paired, judged, refused and written."""

import json
from pathlib import Path

import pytest
import torch

from underpar.errors import BenchError

runs = pytest.importorskip("benchmarks.fusion_study.runs")

TINY = ["model.num_layers=2", "train.micro_batch_tokens=128", "train.num_micro_batches=1"]
TINY += ["train.stages=['64@0.3', '128@1']", "train.budget_steps=1"]


def made_up(seconds: list[float], losses: list[float]) -> object:
    return runs.Run(None, seconds, [torch.tensor(loss) for loss in losses])


def test_variants_train_alike_on_the_same_tokens(
    tiny_data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page = tmp_path / "page.md"
    page.write_text(f"before\n\n{runs.BEGIN}\nold\n{runs.END}\n\nafter\n")
    words = ["baseline+cpu", "--data", str(tiny_data), "--steps", "6", "--turn", "2"]
    words += ["--device", "cpu", "--out", str(tmp_path / "out"), "--page", str(page)]
    words += ["--seeds", "1", "2", "--only", "fp8", "linear_loss", "qkv", "--set", *TINY]
    # A rewrite is for compiled training: the row says so, and so does the exit code.
    assert runs.main(words) == 1, capsys.readouterr()
    found = json.loads((tmp_path / "out/runs.json").read_text())
    rows = {row["name"]: row for row in found["rows"]}
    assert found["finished"] and found["seeds"] == [1, 2]
    assert "not compiled" in rows["linear_loss"]["refused"]
    assert rows["plain again"]["loss"] == rows["plain"]["loss"] != rows["fp8"]["loss"]
    assert rows["qkv"]["loss"] == pytest.approx(rows["plain"]["loss"], abs=1e-4)
    # Seeds start from other weights and read other tokens.
    first, second = rows["plain"]["loss"]
    assert first != second
    mean, low, high = rows["fp8"]["loss_difference"]
    assert low < mean < high and abs(mean) < 0.05
    assert rows["fp8"]["verdict"] == "refused" and "too few" in rows["fp8"]["reason"]
    text = page.read_text()
    assert text.startswith("before\n") and text.endswith("after\n") and "old" not in text
    assert "| fp8 | " in text and "6 steps on a CPU, 2 seeds" in text


def test_a_pair_is_two_turns_and_the_rules_of_bench_step_judge() -> None:
    plain = made_up([9.0, 9.0, 1.0, 3.0, 2.0, 2.0], [])
    half = made_up([1.0, 1.0, 1.0, 1.0, 1.0, 1.0], [])
    effects = runs.pair_effects(plain, half)
    assert effects == pytest.approx([-0.6931, -0.6931], abs=1e-4)
    quiet = [0.0001, -0.0001, 0.0002, -0.0002, 0.0]
    fast = runs.judged([-0.05, -0.051, -0.049, -0.05, -0.05], quiet)
    assert fast["verdict"] == "faster" and fast["time"][0] == pytest.approx(-0.0488, abs=1e-4)
    drifted = runs.judged([-0.05, -0.051, -0.049, -0.05], [0.02, 0.021, 0.02, 0.019])
    assert drifted["verdict"] == "refused" and "time" not in drifted


def test_losses_are_compared_with_the_plain_network_of_the_same_seed() -> None:
    study = runs.Study(8, "a CPU")
    for seed, shift in ((1, 0.0), (2, 1.0)):
        level = [9.0] * 6 + [1.0 + shift] * 2
        better = [9.0] * 6 + [0.9 + shift + 0.001 * seed] * 2
        study.finished[seed] = {
            "plain": made_up([1.0], level),
            "plain again": made_up([1.0], level),
            "fp8": made_up([1.0], better),
            # Stopped early: no loss to compare.
            "qkv": made_up([1.0], level[:4]),
        }
    rows = {row["name"]: row for row in study.rows()}
    assert rows["fp8"]["loss_difference"][0] == pytest.approx(-0.0985, abs=1e-4)
    assert rows["qkv"]["loss"] == [] and "loss_difference" not in rows["qkv"]
    assert "| qkv | 1.00 | refused: 0 pairs are too few | - | - |" in runs.table_of(study)


def test_the_page_of_the_study_has_a_place_for_the_table(tmp_path: Path) -> None:
    page = Path(runs.__file__).parents[2] / "docs/fusion-study.md"
    assert page.read_text().count(runs.BEGIN) == page.read_text().count(runs.END) == 1
    (tmp_path / "page.md").write_text("no place")
    with pytest.raises(BenchError, match="no place for the table"):
        runs.write_page(tmp_path / "page.md", "table\n")


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        (["--only", "fp9"], "no variant 'fp9'"),
        (["--steps", "2"], "--steps takes 4 or more"),
        (["--data", "nowhere"], "nowhere"),
    ],
)
def test_wrong_options_are_refused(
    wrong: list[str], words: str, tiny_data: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    start = ["baseline+cpu", "--data", str(tiny_data), "--device", "cpu", "--set", *TINY]
    assert runs.main([*start, *wrong]) == 2
    assert words in capsys.readouterr().err
