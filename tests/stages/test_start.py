"""Starting a run where memory is short or the compiler fails: other micro-batches, no compiler."""

from pathlib import Path

import pytest
import torch

from tiny import TinyRun
from underpar.core.run_folder import RunFolder
from underpar.core.runtime import Runtime
from underpar.errors import RecipeError, RunError
from underpar.recipe import Recipe, load_recipe
from underpar.stages.start import with_half_micro_batches
from underpar.stages.train import train
from underpar.train import loop
from watcher import Watcher

COMPILED = Runtime(torch.device("cpu"), compiled=True)
FEW_STEPS = ["train.budget_steps=2", "model.num_layers=2"]


def short_of(memory_tokens: int) -> object:
    """A warm-up on a device that holds so many tokens, and whose compiler fails."""

    def warm_up(*job: object) -> int:
        _, loader, _, runtime, *_ = job
        if max(micro.tokens for micro in loader.plan) > memory_tokens:  # type: ignore[attr-defined]
            raise torch.OutOfMemoryError("CUDA out of memory")
        if runtime.compiled:  # type: ignore[attr-defined]
            raise RuntimeError("ptxas died of signal 9\nand more lines")
        return 1

    return warm_up


@pytest.fixture(scope="module")
def recipe() -> Recipe:
    return load_recipe("baseline+cpu", FEW_STEPS)


def test_a_run_starts_with_what_fits_and_continues_with_the_same_command(
    tiny_run: TinyRun, recipe: Recipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loop, "warm_up", short_of(300))
    folder, watcher = RunFolder(tmp_path / "run"), Watcher()
    summary = train(recipe, tiny_run.data, folder, COMPILED, watcher)
    assert summary["finished"] and not summary["compiled"]
    notes = " ".join(watcher.notes)
    assert "1,024 tokens does not fit" in notes and "512 tokens does not fit" in notes
    assert "not compiled" in notes and "ptxas died of signal 9" in notes and "\n" not in notes
    held = folder.read_recipe()
    assert (held.train.micro_batch_tokens, held.train.num_micro_batches) == (256, 8)
    about = folder.read_json(folder.about_file)
    assert not about["compiled"]
    assert (about["recipe_hash"], about["asked_recipe_hash"]) == (held.hash, recipe.hash)
    # The command, and the recipe in the folder, name the run. Another recipe does not.
    assert train(recipe, tiny_run.data, folder, COMPILED)["finished"]
    assert train(held, tiny_run.data, folder, COMPILED)["finished"]
    other = load_recipe("baseline+cpu", [*FEW_STEPS, "train.seed=5"])
    with pytest.raises(RunError, match="holds a run with recipe_hash"):
        train(other, tiny_run.data, folder, COMPILED)


def test_nothing_is_tried_where_nothing_can_help(
    tiny_run: TinyRun, recipe: Recipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loop, "warm_up", short_of(50))
    with pytest.raises(RecipeError, match="shorter than a context of 128"):
        train(recipe, tiny_run.data, RunFolder(tmp_path / "run"), COMPILED)
    assert not (tmp_path / "run" / "recipe.toml").exists()


def test_half_micro_batches_keep_the_global_batch() -> None:
    for name in ("h200-300s", "pr2014", "pr1219"):
        whole = load_recipe(name).train
        half = with_half_micro_batches(load_recipe(name)).train
        assert half.num_micro_batches == 2 * whole.num_micro_batches
        assert half.micro_batch_tokens * 2 == whole.micro_batch_tokens
        assert tuple(2 * size for size in half.micro_sizes) == whole.micro_sizes
        assert half.contexts == whole.contexts


@pytest.mark.parametrize("overlay", ["gpu-24gb", "gpu-16gb"])
def test_overlays_for_small_gpus_keep_the_tokens_of_a_step(overlay: str) -> None:
    whole, small = load_recipe("h200-300s"), load_recipe(f"h200-300s+{overlay}")
    for part in (whole.train, small.train):
        assert part.micro_batch_tokens * part.num_micro_batches == 98_304
    for quant in (whole.quant, small.quant):
        assert quant.calibration_batches * quant.calibration_batch_tokens == 1 << 20
