"""The artifact is made again from the weights; one that knows held-out text is not the same."""

import dataclasses
import shutil
from pathlib import Path

import numpy as np
import pytest

from tiny import TinyRun
from underpar.audit.case import Case
from underpar.audit.finding import FAIL, NOT_SHOWN, PASS
from underpar.audit.packing import ERROR_SHARE, packing
from underpar.core.run_folder import RunFolder
from underpar.core.runtime import Runtime
from underpar.data.folder import DataFolder, load_data
from underpar.quant.files import read_quantized, save_measured, save_quantized
from underpar.quant.schemes import QuantizedModel
from underpar.recipe import QuantPart
from underpar.stages.audit import AuditRequest, open_case
from underpar.stages.calibrate import measure, read_trained
from underpar.stages.pack import pack_run

CALIBRATED = QuantPart(
    rules=(
        "blocks.*.attn.*.weight gptq6:13+awq",
        "blocks.*.mlp.*.weight grid8+columns",
        "embedding.weight int6:13",
        "* fp16",
    ),
    constant=0.002,
    calibration_batches=4,
    calibration_batch_tokens=2048,
    fisher_batches=2,
    lqer_tensors=2,
    lqer_rank=1,
    tune_steps=2,
)


def held_out_as_training(data: DataFolder) -> DataFolder:
    """The data folder of a cheater who calibrates on held-out text."""
    manifest = data.manifest | {"train": data.manifest["val"]}
    return dataclasses.replace(data, train=data.val, manifest=manifest)


def packed(
    tiny_run: TinyRun, path: Path, runtime: Runtime, data: DataFolder, part: QuantPart = CALIBRATED
) -> RunFolder:
    """A copy of the tiny run, calibrated on the training text of `data` and packed."""
    shutil.copytree(tiny_run.folder.path, path)
    folder = RunFolder(path)
    save_measured(folder.calibration_file, measure(read_trained(folder), data, runtime))
    pack_run(folder, part=part, runtime=runtime)
    return folder


@pytest.fixture(scope="module")
def honest(
    tiny_run: TinyRun, tmp_path_factory: pytest.TempPathFactory, runtime: Runtime
) -> RunFolder:
    path = tmp_path_factory.mktemp("packed") / "run"
    return packed(tiny_run, path, runtime, load_data(tiny_run.data))


def case_of(folder: RunFolder, tiny_run: TinyRun, runtime: Runtime) -> Case:
    return open_case(folder, runtime, AuditRequest(tiny_run.data, seed=0))


def change_tensors(folder: RunFolder, changes: QuantizedModel, **about: object) -> None:
    """Replace tensors of the quantized file, and pack the result."""
    tensors, stated = read_quantized(folder.quantized_file)
    save_quantized(folder.quantized_file, {**tensors, **changes}, {**stated, **about})
    pack_run(folder, part=CALIBRATED)


def test_an_honest_artifact_is_made_again_bit_for_bit(
    honest: RunFolder, tiny_run: TinyRun, runtime: Runtime
) -> None:
    finding = packing(case_of(honest, tiny_run, runtime))
    assert finding.verdict == PASS, finding.summary
    assert finding.evidence["equal"] and finding.evidence["same_machine"]


def test_packing_with_other_settings_of_calibration_is_repeated(
    honest: RunFolder, tiny_run: TinyRun, runtime: Runtime, tmp_path: Path
) -> None:
    folder = RunFolder(shutil.copytree(honest.path, tmp_path / "run"))
    other = dataclasses.replace(CALIBRATED, calibration_batches=CALIBRATED.calibration_batches + 1)
    pack_run(folder, part=other)
    finding = packing(case_of(folder, tiny_run, runtime))
    assert finding.verdict == PASS and finding.evidence["equal"], finding.summary


@pytest.mark.parametrize("is_elsewhere", [False, True])
def test_tuned_vectors_fail(
    honest: RunFolder, tiny_run: TinyRun, runtime: Runtime, tmp_path: Path, is_elsewhere: bool
) -> None:
    shutil.copytree(honest.path, tmp_path / "run")
    folder = RunFolder(tmp_path / "run")
    tensors, _ = read_quantized(folder.quantized_file)
    name = next(name for name, tensor in tensors.items() if tensor.scheme.is_half)
    steps = (tensors[name].steps.astype(np.float32) * 1.01).astype(np.float16)
    environment = {"environment": {"device": "cpu, elsewhere"}} if is_elsewhere else {}
    change_tensors(folder, {name: dataclasses.replace(tensors[name], steps=steps)}, **environment)
    finding = packing(case_of(folder, tiny_run, runtime))
    assert finding.verdict == FAIL
    assert finding.evidence["same_machine"] != is_elsewhere


@pytest.mark.parametrize(("is_elsewhere", "verdict"), [(False, FAIL), (True, NOT_SHOWN)])
def test_a_small_change_is_no_pass_whatever_machine_is_named(
    honest: RunFolder,
    tiny_run: TinyRun,
    runtime: Runtime,
    tmp_path: Path,
    is_elsewhere: bool,
    verdict: str,
) -> None:
    shutil.copytree(honest.path, tmp_path / "run")
    folder = RunFolder(tmp_path / "run")
    tensors, _ = read_quantized(folder.quantized_file)
    name = "embedding.weight"
    codes = tensors[name].codes
    assert codes is not None
    codes = codes.copy()
    codes[5, 3] += 1 if codes[5, 3] <= 0 else -1
    environment = {"environment": {"device": "cpu, elsewhere"}} if is_elsewhere else {}
    change_tensors(folder, {name: dataclasses.replace(tensors[name], codes=codes)}, **environment)
    finding = packing(case_of(folder, tiny_run, runtime))
    assert finding.verdict == verdict, finding.summary
    assert 0 < finding.evidence["differences"][name] < ERROR_SHARE


def test_calibration_on_held_out_text_fails(
    tiny_run: TinyRun, runtime: Runtime, tmp_path: Path
) -> None:
    data = held_out_as_training(load_data(tiny_run.data))
    folder = packed(tiny_run, tmp_path / "cheat", runtime, data)
    finding = packing(case_of(folder, tiny_run, runtime))
    assert finding.verdict == FAIL
    assert not finding.evidence["equal"]


def test_weights_or_tensors_of_another_run_fail(
    honest: RunFolder, tiny_run: TinyRun, runtime: Runtime, tmp_path: Path
) -> None:
    shutil.copytree(honest.path, tmp_path / "run")
    folder = RunFolder(tmp_path / "run")
    shutil.copy(tiny_run.folder.artifact_file, folder.artifact_file)
    finding = packing(case_of(folder, tiny_run, runtime))
    assert finding.verdict == FAIL and "other tensors" in finding.summary


@pytest.mark.parametrize("file", ["weights_file", "quantized_file"])
def test_without_weights_packing_is_not_shown(
    honest: RunFolder, tiny_run: TinyRun, runtime: Runtime, tmp_path: Path, file: str
) -> None:
    shutil.copytree(honest.path, tmp_path / "run")
    folder = RunFolder(tmp_path / "run")
    case = case_of(folder, tiny_run, runtime)
    getattr(folder, file).unlink()
    assert packing(case).verdict == NOT_SHOWN
