"""Curves on a tiny run: every point once, equal symbols, stopping, continuing, refusing."""

import json
import shutil
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from tiny import TinyRun
from underpar.audit.probes import first_documents
from underpar.build.model import build_model
from underpar.cli import app
from underpar.core.run_folder import RunFolder
from underpar.core.runtime import Runtime
from underpar.data.folder import load_data
from underpar.errors import BenchError, RunError
from underpar.lab import quant_case
from underpar.lab.quant_case import CURVES, Case
from underpar.lab.quant_curves import (
    FACTORS,
    Request,
    measure,
    open_case,
    write_results,
)
from underpar.model.gpt import GPT
from underpar.quant import fisher
from underpar.quant.calibration import TrainingText, collect
from underpar.quant.files import Measured, save_measured
from underpar.quant.schemes import QuantizedModel, dequantize, parse_scheme
from underpar.stages.pack import read_trained
from watcher import Watcher

DOCUMENTS, TUNE = 3, 2
# Those that differ in how they round or count.
SOME = {name: CURVES[name] for name in ("b", "a", "c", "h", "d", "e+", "f")}


@pytest.fixture(scope="module")
def run(tiny_run: TinyRun, runtime: Runtime, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny run with a calibration of little text."""
    path = tmp_path_factory.mktemp("curves") / "run"
    shutil.copytree(tiny_run.folder.path, path)
    folder = RunFolder(path)
    trained = read_trained(folder)
    model = build_model(trained.recipe)
    model.load_state_dict({name: torch.from_numpy(w) for name, w in trained.weights.items()})
    text = TrainingText(load_data(tiny_run.data), num_batches=2, batch_tokens=512)
    inputs, gradients = collect(model, text, runtime), fisher.measure(model, text, runtime)
    about = {"weights_sha256": trained.sha256}
    save_measured(folder.calibration_file, Measured(inputs, gradients, about))
    return path


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A program that compresses its standard input."""
    path = tmp_path_factory.mktemp("programs") / "pack"
    path.write_text(
        f"#!{sys.executable}\nimport lzma, sys\n"
        "sys.stdout.buffer.write(lzma.compress(sys.stdin.buffer.read()))\n"
    )
    path.chmod(0o755)
    return path


@pytest.fixture
def request_of(run: Path, tiny_run: TinyRun, program: Path, tmp_path: Path) -> Request:
    return Request(run, tiny_run.data, tmp_path / "out", 2, DOCUMENTS, TUNE, program, "cpu")


@pytest.fixture(scope="module")
def results(
    run: Path, tiny_run: TinyRun, program: Path, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """Some curves at two sizes."""
    out = tmp_path_factory.mktemp("results")
    request = Request(run, tiny_run.data, out, 2, DOCUMENTS, TUNE, program, "cpu")
    write_results(measure(request, curves=SOME), out)
    return out


def read_points(out: Path) -> dict[tuple[str, float], dict[str, Any]]:
    rows = json.loads((out / "quant_curves.json").read_text())["points"]
    assert len(rows) == len({(row["curve"], row["factor"]) for row in rows})
    return {(row["curve"], row["factor"]): row for row in rows}


def test_every_curve_has_its_sizes(results: Path) -> None:
    points = read_points(results)
    assert set(points) == {(name, factor) for name in SOME for factor in FACTORS[:2]}
    for row in points.values():
        assert row["total_bytes"] == sum(row["parts"].values())
        assert row["gap_bpb"] == pytest.approx(row["bpb"] - read_unrounded(results))
    for name in SOME:
        # Wider steps, fewer bytes.
        assert points[name, 1.0]["total_bytes"] > points[name, 1.25]["total_bytes"]


def read_unrounded(out: Path) -> float:
    bpb: float = json.loads((out / "quant_curves.json").read_text())["unrounded_bpb"]
    return bpb


def test_equal_symbols_cost_the_same(results: Path) -> None:
    points = read_points(results)
    for factor in FACTORS[:2]:
        assert points["a", factor]["bpb"] == points["c", factor]["bpb"]
        lzma_parts, our_parts = points["a", factor]["parts"], points["c", factor]["parts"]
        assert our_parts["symbols"] != lzma_parts["symbols"]
        for part in ("steps", "controls", "corrections"):
            assert our_parts[part] == lzma_parts[part]


def test_rates_of_grids_match(results: Path) -> None:
    points = read_points(results)
    for factor in FACTORS[:2]:
        wanted = points["c", factor]["parts"]["symbols"]
        # Steps of a trellis are chosen for the rate, not for the error.
        for name in ("d", "e+"):
            assert points[name, factor]["parts"]["symbols"] == pytest.approx(wanted, rel=0.12)


def test_the_public_curve_says_how_it_was_stored(results: Path) -> None:
    remark = read_points(results)["b", 1.0]["remark"]
    assert remark.startswith("pack, rows ")
    assert "sorted" in remark


def test_tables_are_written(results: Path) -> None:
    against = json.loads((results / "quant_curves.json").read_text())["against_b"]
    assert set(against) == set(SOME)
    assert [row["bytes_ratio"] for row in against["b"]] == pytest.approx([1.0, 1.0])
    assert "| e+ |" in (results / "quant_curves.md").read_text()
    assert "<svg" in (results / "quant_curves.svg").read_text()


def test_a_stopped_run_continues(results: Path, request_of: Request) -> None:
    record = json.loads((results / "quant_curves.json").read_text())
    missing = [("c", 1.25), ("d", 1.0)]
    kept = [p for p in record["points"] if (p["curve"], p["factor"]) not in missing]
    request_of.out.mkdir()
    path = request_of.out / "quant_curves.json"
    path.write_text(json.dumps({**record, "points": kept}))
    progress = Watcher()
    measured = measure(request_of, progress, SOME)
    [task] = progress.tasks
    rounded = [remark for _, remark in task.updates if remark.startswith("rounding")]
    assert rounded == [f"rounding ({name}) x {factor:g}" for name, factor in missing]
    assert len(measured["points"]) == len(record["points"])
    before = read_points(results)
    for key, row in read_points(request_of.out).items():
        assert (row["parts"], row["bpb"]) == (before[key]["parts"], before[key]["bpb"])


def test_points_are_kept_when_a_later_one_fails(request_of: Request) -> None:
    def fail(case: Case, factor: float) -> QuantizedModel:
        raise BenchError("out of luck")

    broken = {"c": CURVES["c"], "z": quant_case.Curve("never", fail, CURVES["c"].count)}
    with pytest.raises(BenchError, match="out of luck"):
        measure(request_of, curves=broken)
    assert set(read_points(request_of.out)) == {("c", 1.0), ("c", 1.25)}


def test_other_documents_are_refused(results: Path, request_of: Request) -> None:
    shutil.copytree(results, request_of.out)
    other = Request(request_of.run, request_of.data, request_of.out, 2, DOCUMENTS + 1)
    with pytest.raises(RunError, match="choose another --out"):
        measure(other)


def test_another_calibration_is_refused(results: Path, request_of: Request) -> None:
    record = json.loads((results / "quant_curves.json").read_text())
    request_of.out.mkdir()
    other = {**record, "points": record["points"][1:], "calibration_sha256": "0" * 64}
    (request_of.out / "quant_curves.json").write_text(json.dumps(other))
    with pytest.raises(RunError, match="earlier points"):
        measure(request_of)


def test_without_a_program_nothing_begins(
    request_of: Request, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", "")
    with pytest.raises(BenchError, match="neither lrzip nor zpaq"):
        measure(replace(request_of, zpaq=None))
    assert not request_of.out.exists()


def test_the_command_prints_the_table(results: Path, request_of: Request) -> None:
    record = json.loads((results / "quant_curves.json").read_text())
    # Nothing is left to measure: the other curves get the points of curve d.
    copied = [row for row in record["points"] if row["curve"] == "d"]
    others = CURVES.keys() - SOME.keys()
    record["points"] += [{**row, "curve": name} for name in others for row in copied]
    request_of.out.mkdir()
    (request_of.out / "quant_curves.json").write_text(json.dumps(record))
    words = ["lab", "quant-curves", str(request_of.run), "--data", str(request_of.data)]
    words += ["--out", str(request_of.out), "--sizes", "2", "--documents", str(DOCUMENTS)]
    words += ["--tune-steps", str(TUNE), "--device", "cpu"]
    invoked = CliRunner().invoke(app, words, catch_exceptions=False)
    assert invoked.stdout.strip() == (request_of.out / "quant_curves.md").read_text().strip()
    assert json.loads(CliRunner().invoke(app, [*words, "--json"]).stdout)["documents"] == DOCUMENTS


def test_files_are_counted_whole(results: Path) -> None:
    points = read_points(results)
    # Nothing but the recipe and the names of tensors is left over.
    assert points["d", 1.0]["parts"]["framing"] < 4000
    # Log steps are shorter than fp16 steps, and those of columns come on top.
    assert points["d", 1.0]["parts"]["steps"] < points["c", 1.0]["parts"]["steps"]
    assert points["e+", 1.0]["parts"]["steps"] > points["d", 1.0]["parts"]["steps"]


def test_widths_are_scaled() -> None:
    assert str(quant_case.widen(parse_scheme("gptq6:12"), 1.25)) == "gptq6:15"
    for name in ("fp16", "int8", "grid8+columns"):
        assert str(quant_case.widen(parse_scheme(name), 1.25)) == name


def test_control_tensors_are_tuned(
    request_of: Request, runtime: Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    trained, data = read_trained(RunFolder(request_of.run)), load_data(request_of.data)
    with ThreadPoolExecutor(1) as pool:
        case = open_case(request_of, trained, data, runtime, pool)
    tensors = CURVES["a"].round(case, 1.0)

    def nudge(model: GPT, names: list[str], *rest: object) -> dict[str, torch.Tensor]:
        # The rounded matrices are there already.
        np.testing.assert_array_equal(
            model.get_parameter("embedding.weight").detach().numpy(),
            dequantize(tensors["embedding.weight"]),
        )
        return {name: model.get_parameter(name).detach().half() + 1 for name in names}

    monkeypatch.setattr(quant_case.tune, "tune", nudge)
    tuned = case.tune(tensors)
    assert list(tuned) == list(tensors)
    changed = {n for n, t in tuned.items() if not np.array_equal(t.steps, tensors[n].steps)}
    assert "blocks.0.attn_scale" in changed
    for name in changed:
        assert tensors[name].scheme.is_half
        assert tuned[name].steps.dtype == np.float16
        assert tuned[name].steps.shape == tensors[name].steps.shape
        np.testing.assert_array_equal(
            dequantize(tuned[name]).astype(np.float16),
            dequantize(tensors[name]).astype(np.float16) + np.float16(1),
        )


def test_the_first_documents(tiny_run: TinyRun) -> None:
    shard = load_data(tiny_run.data).val
    part = first_documents(shard, 2)
    assert part.num_documents == 2
    assert part.num_bytes == int(shard.doc_bytes[:2].sum())
    for index in range(2):
        np.testing.assert_array_equal(part.doc(index), shard.doc(index))
    assert first_documents(shard, 0) is shard
    assert first_documents(shard, shard.num_documents) is shard


def test_requests_that_measure_nothing_are_refused() -> None:
    for wrong in ({"num_sizes": 1}, {"num_sizes": 9}, {"num_documents": -1}):
        with pytest.raises(BenchError, match="expected"):
            Request(Path("run"), Path("d"), Path("o"), **wrong)  # type: ignore[arg-type]
