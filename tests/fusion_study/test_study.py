"""The command that times the operators of the fusion study."""

import json
from pathlib import Path

import pytest
import torch

study = pytest.importorskip("benchmarks.fusion_study.study")


def test_the_page_has_the_operators_of_every_file(capsys: pytest.CaptureFixture[str]) -> None:
    folder = Path(study.__file__).parent
    own = {"__init__", "__main__", "packaging", "runs", "study", "together"}
    assert {f.stem for f in folder.glob("*.py")} - own == set(study.FILES)
    assert study.main(["--list"]) == 0
    rows = capsys.readouterr().out.splitlines()
    names = [name for file in study.FILES for name in study.operators_of(file)]
    assert [row.split("`")[1] for row in rows] == names
    assert {name.partition(".")[0] for name in names} == set(study.FILES)
    page = (folder.parents[1] / "docs" / "fusion-study.md").read_text()
    assert [row for row in rows if row not in page] == []
    assert [name for name in names if page.count(f"\n| `{name}` |") != 2] == []


# `ema_update` has no streams.
@pytest.mark.parametrize("file", [file for file in study.FILES if file != "ema_update"])
def test_plain_versions_take_narrow_streams_and_wide_weights(file: str) -> None:
    for operator in study.operators_of(file).values():
        args = []
        for arg in operator.inputs(torch.device("cpu"), 5):
            streams = isinstance(arg, torch.Tensor) and arg.requires_grad and len(arg) == 5
            # In place of bf16, in which products crash some CPUs.
            args.append(arg.detach().half().requires_grad_() if streams else arg)
        learned = [a for a in args if isinstance(a, torch.Tensor) and a.requires_grad]
        for version in (operator.plain, operator.rival or operator.plain):
            out = version(*args)
            outputs = [out] if isinstance(out, torch.Tensor) else out
            total = sum(o.float().sum() for o in outputs if o.requires_grad)
            gradients = torch.autograd.grad(total, learned)
            assert [g.dtype for g in gradients] == [a.dtype for a in learned]


def test_operators_are_timed_and_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code = study.main(["--only", "linear_loss", "--tokens", "32", "--out", str(tmp_path)])
    assert code == 0, capsys.readouterr()
    (row,) = json.loads((tmp_path / "fusion-study.json").read_text())["rows"]
    assert row["plain_ms"] > 0 and row["fused_ms"] > 0 and row["floor_ms"] > 3
    assert "linear_loss" in capsys.readouterr().out


def test_what_has_no_time_left_is_named(tmp_path: Path) -> None:
    code = study.main(["--only", "linear_loss", "--budget", "0.01", "--out", str(tmp_path)])
    (row,) = json.loads((tmp_path / "fusion-study.json").read_text())["rows"]
    assert code == 1 and "budget" in row["error"]


@pytest.mark.parametrize("wrong", [["--only", "linear_los"], ["--budget", "0"], ["--tokens", "-1"]])
def test_wrong_options_are_refused(wrong: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert study.main(wrong) == 2
    assert capsys.readouterr().err.startswith("error: ")
