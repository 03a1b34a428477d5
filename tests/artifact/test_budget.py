"""The budget: every byte accounted for, the cap enforced, forecasts close."""

import json
import shutil
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
from every_scheme import draw_artifact

from tiny import TinyRun
from underpar.artifact.budget import read_budget
from underpar.artifact.format import HEAD_BYTES, squeeze
from underpar.artifact.pack import NUM_SECTIONS, pack
from underpar.core.run_folder import RunFolder
from underpar.errors import ArtifactError, RecipeError
from underpar.recipe import list_recipes, load_recipe
from underpar.stages.pack import forecast_size, pack_run
from underpar.submit.bundle import bundle


def test_the_parts_add_up_to_the_file_and_the_code(tiny_run: TinyRun) -> None:
    data = tiny_run.folder.artifact_file.read_bytes()
    budget = read_budget(data, code_bytes=1000, cap_bytes=10**6)
    assert budget.model_file_bytes == len(data)
    assert budget.total_bytes == len(data) + 1000
    assert sum(budget.classes.values()) == budget.total_bytes
    assert budget.num_weights == json.loads(tiny_run.folder.about_file.read_text())["num_weights"]
    assert {"code", "tokenizer", "header", "embedding", "attn", "mlp", "levers"} <= set(
        budget.classes
    )


def test_the_reported_size_is_the_size_on_disk(tiny_run: TinyRun) -> None:
    reported = json.loads(tiny_run.folder.budget_file.read_text())
    on_disk = tiny_run.folder.artifact_file.stat().st_size
    assert reported["model_file_bytes"] == on_disk
    assert reported["total_bytes"] == on_disk + len(bundle(tiny_run.recipe))


@pytest.mark.parametrize("inside", [True, False])
def test_every_byte_has_a_class(inside: bool) -> None:
    artifact = draw_artifact(shape=(24, 32))
    data = pack(artifact, tokenizer_inside=inside)
    budget = read_budget(data, code_bytes=1000, cap_bytes=10**6)
    apart = 0 if inside else len(squeeze(artifact.tokenizer))
    assert budget.model_file_bytes == len(data)
    assert budget.total_bytes == len(data) + 1000 + apart == sum(budget.classes.values())
    assert budget.classes["tokenizer"] == len(squeeze(artifact.tokenizer))
    # Lengths in the frame, and what rounding leaves.
    assert abs(budget.classes["framing"] - HEAD_BYTES - 8 * NUM_SECTIONS) <= 10
    assert {"corrections", "activations"} <= set(budget.classes)
    assert [t["name"] for t in budget.tensors] == list(artifact.tensors)
    plain = {n: replace(t, correction=None) for n, t in artifact.tensors.items()}
    bare = read_budget(pack(replace(artifact, tensors=plain, activations={})), 0, 10**6)
    assert not {"corrections", "activations"} & set(bare.classes)


def test_nothing_over_the_cap_is_written(tiny_run: TinyRun, tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    for name in ("recipe_file", "about_file", "weights_file", "tokenizer_file"):
        source, target = getattr(tiny_run.folder, name), getattr(folder, name)
        target.write_bytes(source.read_bytes())
    with pytest.raises(ArtifactError, match="over the cap of 50000"):
        pack_run(folder, cap_bytes=50_000)
    for lifted in (0, 16_000_001):
        with pytest.raises(RecipeError, match="recipe's 16000000"):
            pack_run(folder, cap_bytes=lifted)
    assert not folder.artifact_file.exists()
    pack_run(folder)
    assert folder.artifact_file.read_bytes() == tiny_run.folder.artifact_file.read_bytes()


def test_a_forecast_is_close_to_the_packed_size(tiny_run: TinyRun) -> None:
    forecast = forecast_size(tiny_run.recipe, tiny_run.folder.tokenizer_file)
    assert forecast.model_file_bytes == pytest.approx(
        tiny_run.folder.artifact_file.stat().st_size, rel=0.05
    )


@pytest.mark.slow
@pytest.mark.parametrize("name", list(list_recipes()))
def test_every_recipe_fits_the_cap_at_full_size(name: str) -> None:
    # An overlay has to stand on something; every other recipe stands on the baseline anyway.
    budget = forecast_size(load_recipe(f"baseline+{name}"))
    budget.enforce()
    assert budget.total_bytes <= budget.cap_bytes <= 16_000_000


@pytest.mark.parametrize("delay", [0.0, 1.5, 2.2, 2.6])
def test_a_killed_pack_leaves_the_old_file_or_a_whole_one(
    tiny_run: TinyRun, tmp_path: Path, delay: float
) -> None:
    shutil.copytree(tiny_run.folder.path, tmp_path / "run")
    folder = RunFolder(tmp_path / "run")
    whole = folder.artifact_file.read_bytes()
    folder.artifact_file.write_bytes(b"old")
    process = subprocess.Popen([sys.executable, "-m", "underpar", "pack", str(folder.path)])
    time.sleep(delay)
    process.kill()
    process.wait()
    assert folder.artifact_file.read_bytes() in (b"old", whole)
    pack_run(folder)
    assert folder.artifact_file.read_bytes() == whole
