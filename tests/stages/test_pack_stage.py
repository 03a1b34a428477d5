"""The stages from weights to a file: each re-runnable, none takes what belongs to other weights."""

import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from tiny import TinyRun
from underpar.build.artifact import read_artifact
from underpar.build.model import build_model, build_predictor
from underpar.core.run_folder import RunFolder
from underpar.core.runtime import Runtime
from underpar.core.tensor_files import read_tensors, save_tensors
from underpar.data.build import build_data
from underpar.data.folder import load_data
from underpar.errors import ArtifactError, RecipeError, RunError
from underpar.quant.files import read_measured, read_quantized
from underpar.quant.schemes import dequantize, steps_of
from underpar.recipe import Recipe, from_tree, merge, to_tree
from underpar.schema import QuantPart
from underpar.stages.calibrate import calibrate_run
from underpar.stages.data import build_options
from underpar.stages.pack import pack_run, unpack_artifact
from underpar.stages.score import score_artifact
from underpar.stages.train import train

GRIDS = ("embedding.weight grid1", "blocks.*.weight grid1+columns", "*.weight int6:12", "* fp16")
# Of a run that takes 299 kB with its own rules, 63 kB of them code.
CAP = 220_000


def with_rules(recipe: Recipe, *rules: str) -> QuantPart:
    return from_tree(merge(to_tree(recipe), {"quant": {"rules": list(rules)}})).quant


@pytest.fixture(scope="module")
def calibrated(
    tiny_run: TinyRun, runtime: Runtime, tmp_path_factory: pytest.TempPathFactory
) -> RunFolder:
    """A copy of the tiny run with a calibration; tests must not change it (copy it first)."""
    path = tmp_path_factory.mktemp("calibrated") / "run"
    shutil.copytree(tiny_run.folder.path, path)
    folder = RunFolder(path)
    calibrate_run(folder, load_data(tiny_run.data), runtime)
    return folder


@pytest.fixture
def folder(calibrated: RunFolder, tmp_path: Path) -> RunFolder:
    shutil.copytree(calibrated.path, tmp_path / "run")
    return RunFolder(tmp_path / "run")


@pytest.mark.parametrize("share", [0.62, 0.75])
def test_grids_fill_any_cap(folder: RunFolder, tiny_run: TinyRun, share: float) -> None:
    part = with_rules(tiny_run.recipe, *GRIDS)
    cap = int(share * pack_run(folder).total_bytes)
    budget = pack_run(folder, cap, part)
    assert 0.998 * cap <= budget.total_bytes <= cap
    assert budget.model_file_bytes == folder.artifact_file.stat().st_size
    assert sum(budget.classes.values()) == budget.total_bytes
    # What was rounded is what is packed is what is scored.
    tensors, about = read_quantized(folder.quantized_file)
    artifact, _ = read_artifact(folder.artifact_file)
    assert about["cap_bytes"] == cap and about["constant"] > 0
    for name, weight in build_predictor(artifact, torch.device("cpu")).model.state_dict().items():
        assert np.array_equal(weight.numpy(), dequantize(tensors[name]))


def test_fixed_steps_are_widened_by_the_least_factor_that_fits(
    folder: RunFolder, tiny_run: TinyRun
) -> None:
    rules = (
        "embedding.weight gptq6:8",
        "blocks.*.weight gptq6:8+log",
        "*.weight int6:12",
        "* fp16",
    )
    fitted = replace(with_rules(tiny_run.recipe, *rules), fit=True)
    as_given = pack_run(folder, part=replace(fitted, fit=False))
    plain, _ = read_quantized(folder.quantized_file)
    # What fits is left as it is.
    assert pack_run(folder, part=fitted).tensors == as_given.tensors
    assert read_quantized(folder.quantized_file)[1]["constant"] == 1
    cap = as_given.total_bytes - 12_000
    budget = pack_run(folder, cap, fitted)
    assert 0.998 * cap <= budget.total_bytes <= cap
    wider, about = read_quantized(folder.quantized_file)
    factor = float(str(about["constant"]))
    assert factor > 1.1
    for name, tensor in wider.items():
        expected = steps_of(plain[name]) if tensor.codes is not None else None
        if tensor.scheme.calibrated:
            assert steps_of(tensor) == pytest.approx(factor * expected, rel=0.05), name
        elif expected is not None:
            assert np.array_equal(steps_of(tensor), expected), name
    with pytest.raises(ArtifactError, match="over the cap"):
        pack_run(folder, cap, replace(fitted, fit=False))


def test_fewer_bytes_cost_bits(folder: RunFolder, tiny_run: TinyRun, runtime: Runtime) -> None:
    part = with_rules(tiny_run.recipe, *GRIDS)
    whole = pack_run(folder).total_bytes
    sizes = []
    for share in (0.8, 0.42):
        pack_run(folder, int(share * whole), part)
        sizes.append(score_artifact(folder.artifact_file, tiny_run.data, runtime))
    assert sizes[0].score.bpb < sizes[1].score.bpb


@pytest.mark.parametrize(
    "scheme",
    ["gptq6:12.85", "gptq6:12.85+log", "gptq4:5+awq", "gptq5+clip", "gptq6:12+hq", "grid8"],
)
def test_every_scheme_packs_and_scores(
    folder: RunFolder, tiny_run: TinyRun, runtime: Runtime, scheme: str
) -> None:
    part = with_rules(tiny_run.recipe, f"blocks.*.weight {scheme}", "*.weight int6", "* fp16")
    budget = pack_run(folder, CAP, part)
    assert budget.total_bytes <= CAP
    assert score_artifact(folder.artifact_file, tiny_run.data, runtime).score.bpb < 8


def test_the_largest_inputs_get_one_more_bit(folder: RunFolder, tiny_run: TinyRun) -> None:
    part = with_rules(tiny_run.recipe, "blocks.*.weight gptq5+clip", "* fp16")
    pack_run(folder, part=replace(part, finer_matrices=5))
    tensors, _ = read_quantized(folder.quantized_file)
    hessians = read_measured(folder.calibration_file, torch.device("cpu")).calibration.hessians
    bits = {n: t.scheme.bits for n, t in tensors.items() if t.scheme.form == "gptq"}
    traces = {bit: [hessians[n].trace() for n in bits if bits[n] == bit] for bit in (5, 6)}
    assert len(traces[6]) == 5 and min(traces[6]) >= max(traces[5])


def test_packing_again_rounds_nothing_again(folder: RunFolder, tiny_run: TinyRun) -> None:
    part = with_rules(tiny_run.recipe, *GRIDS)
    rounds: list[object] = []
    pack_run(folder, CAP, part, on_round=rounds.append)
    first, tried = folder.artifact_file.read_bytes(), len(rounds)
    assert tried > 0
    pack_run(folder, CAP, part, on_round=rounds.append)
    assert len(rounds) == tried and folder.artifact_file.read_bytes() == first
    # Another cap is another model.
    pack_run(folder, CAP - 5_000, part, on_round=rounds.append)
    assert len(rounds) > tried
    # The same weights, the same bytes, from the start.
    folder.quantized_file.unlink()
    pack_run(folder, CAP, part)
    assert folder.artifact_file.read_bytes() == first


def test_files_of_other_weights_are_refused(folder: RunFolder, tiny_run: TinyRun) -> None:
    tensors, about = read_tensors(folder.weights_file)
    tensors["embedding.weight"][0, 0] += 1
    save_tensors(folder.weights_file, tensors, about)
    part = with_rules(tiny_run.recipe, *GRIDS)
    with pytest.raises(RunError, match="other weights; run 'underpar calibrate"):
        pack_run(folder, CAP, part)
    folder.calibration_file.unlink()
    with pytest.raises(RunError, match=r"run 'underpar calibrate .*' first"):
        pack_run(folder, CAP, part)


def test_a_cap_too_small_is_said(folder: RunFolder, tiny_run: TinyRun) -> None:
    part = with_rules(tiny_run.recipe, *GRIDS)
    before = folder.artifact_file.read_bytes()
    with pytest.raises(ArtifactError, match="does not fit into 40000 bytes"):
        pack_run(folder, 40_000, part)
    assert folder.artifact_file.read_bytes() == before


def test_calibration_repeats_and_may_write_its_own_text(
    folder: RunFolder, tiny_run: TinyRun, runtime: Runtime
) -> None:
    data = load_data(tiny_run.data)
    first = folder.calibration_file.read_bytes()
    again = calibrate_run(folder, data, runtime)
    assert again.about["text"] == "train" and again.about["tokens"] == 4 * 2048
    tensors = read_tensors(folder.calibration_file)[0]
    for name, tensor in read_tensors(_written(folder.path / "first", first))[0].items():
        assert torch.equal(tensor, tensors[name]), name
    summary = calibrate_run(folder, data, runtime, "self")
    assert summary.about["text"] == "self"
    assert not torch.equal(
        summary.calibration.hessians["embedding.weight"],
        again.calibration.hessians["embedding.weight"],
    )
    with pytest.raises(RecipeError, match="'val'"):
        calibrate_run(folder, data, runtime, "val")


def _written(path: Path, data: bytes) -> Path:
    path.write_bytes(data)
    return path


def test_training_calibrates_where_rules_ask(
    tiny_run: TinyRun, runtime: Runtime, tmp_path: Path
) -> None:
    tree = {"quant": {"rules": list(GRIDS)}, "train": {"budget_steps": 3}}
    recipe = from_tree(merge(to_tree(tiny_run.recipe), tree))
    folder = RunFolder(tmp_path)
    assert train(recipe, tiny_run.data, folder, runtime)["finished"]
    assert folder.calibration_file.exists()
    assert pack_run(folder, CAP).total_bytes <= CAP
    plain = RunFolder(tmp_path / "plain")
    assert train(
        from_tree(merge(to_tree(tiny_run.recipe), {"train": {"budget_steps": 3}})),
        tiny_run.data,
        plain,
        runtime,
    )["finished"]
    assert not plain.calibration_file.exists()


def test_unpacked_weights_load_elsewhere(tiny_run: TinyRun, tmp_path: Path) -> None:
    out = tmp_path / "weights.safetensors"
    unpacked = unpack_artifact(tiny_run.folder.artifact_file, out)
    tensors, about = read_tensors(out)
    artifact, identity = read_artifact(tiny_run.folder.artifact_file)
    assert about == {"artifact_sha256": identity}
    assert unpacked["weights"] == sum(t.numel() for t in tensors.values())
    build_model(tiny_run.recipe).load_state_dict(tensors)
    for name, tensor in artifact.tensors.items():
        assert np.array_equal(tensors[name].numpy(), dequantize(tensor))


def test_a_tokenizer_beside_the_file_counts(tiny_run: TinyRun, tmp_path: Path) -> None:
    shutil.copytree(tiny_run.folder.path, tmp_path / "run")
    folder = RunFolder(tmp_path / "run")
    inside = pack_run(folder)
    size = folder.artifact_file.stat().st_size
    apart = pack_run(folder, tokenizer_inside=False)
    assert apart.classes["tokenizer"] == inside.classes["tokenizer"] > 1_000
    assert folder.artifact_file.stat().st_size < size - 1_000
    # The hash that takes its place.
    assert inside.total_bytes <= apart.total_bytes < inside.total_bytes + 200
    artifact, _ = read_artifact(folder.artifact_file)
    assert artifact.tokenizer == folder.tokenizer_file.read_bytes()
    folder.tokenizer_file.write_bytes(b"another")
    with pytest.raises(ArtifactError, match="tokenizer"):
        read_artifact(folder.artifact_file)


def test_other_data_never_calibrate_a_run(
    folder: RunFolder, tiny_run: TinyRun, runtime: Runtime, corpus_file: Path, tmp_path: Path
) -> None:
    """Text held out of this run may be the training text of another folder."""
    options = replace(build_options(tiny_run.recipe), holdout=0.5)
    build_data([corpus_file], tmp_path / "other", options)
    before = folder.calibration_file.read_bytes()
    with pytest.raises(RunError, match="name the folder that it was trained on"):
        calibrate_run(folder, load_data(tmp_path / "other"), runtime)
    assert folder.calibration_file.read_bytes() == before


@pytest.mark.parametrize("published", [False, True])
def test_corrections_reach_the_artifact(
    folder: RunFolder, tiny_run: TinyRun, published: bool
) -> None:
    plain = with_rules(tiny_run.recipe, "blocks.*.weight gptq4:5", "*.weight int6", "* fp16")
    part = replace(plain, lqer_tensors=9, lqer_rank=1, lqer_left_bits=4, tune_steps=4)
    part = replace(part, lqer_published=published)
    pack_run(folder, None, plain)
    before, _ = read_artifact(folder.artifact_file)
    pack_run(folder, None, part)
    after, _ = read_artifact(folder.artifact_file)
    corrected = [n for n, t in after.tensors.items() if t.correction is not None]
    assert corrected and (len(corrected) == 9 or not published)
    assert not any(t.correction for t in before.tensors.values())
    halves = [n for n, t in after.tensors.items() if t.scheme.is_half]
    moved = [
        n for n in halves if not np.array_equal(after.tensors[n].steps, before.tensors[n].steps)
    ]
    assert moved
    assert read_quantized(folder.quantized_file)[1]["tune_seconds"] > 0


def test_another_or_damaged_tokenizer_is_refused(folder: RunFolder) -> None:
    before, good = folder.artifact_file.read_bytes(), folder.tokenizer_file.read_bytes()
    text = good.replace(b"the", b"teh", 1)
    assert text != good
    for content, words in (
        (good[:-9], "tokenizer"),
        (b"", "tokenizer"),
        (text, "not the tokenizer that the run was trained with"),
    ):
        folder.tokenizer_file.write_bytes(content)
        with pytest.raises(RunError, match=words):
            pack_run(folder)
    assert folder.artifact_file.read_bytes() == before


def test_a_flipped_byte_never_becomes_another_artifact(folder: RunFolder) -> None:
    before = folder.artifact_file.read_bytes()
    for path in (folder.weights_file, folder.quantized_file):
        good = path.read_bytes()
        path.write_bytes(good[:-50] + bytes([good[-50] ^ 1]) + good[-49:])
        with pytest.raises(RunError, match="checksum is wrong"):
            pack_run(folder)
        path.write_bytes(good)
    assert folder.artifact_file.read_bytes() == before
