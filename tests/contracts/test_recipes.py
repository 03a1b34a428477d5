"""Every shipped recipe builds at full size and trains at cpu size."""

from collections.abc import Callable
from pathlib import Path

import pytest

from underpar import pipeline
from underpar.build import plug_levers, weight_shapes
from underpar.recipe import Recipe, list_recipes, load_recipe
from underpar.run import RunFolder
from underpar.runtime import Runtime


@pytest.mark.parametrize("name", list(list_recipes()))
def test_full_size_builds(name: str) -> None:
    recipe = load_recipe(name)
    assert weight_shapes(recipe)["embedding.weight"] == (recipe.model.vocab_size, recipe.model.dim)
    for stage in ("data", "model", "train", "quant", "infer"):
        plug_levers(recipe, stage)


@pytest.mark.parametrize("name", list(list_recipes()))
def test_cpu_size_trains_and_fits(
    name: str, data_for: Callable[[Recipe], Path], tmp_path: Path, runtime: Runtime
) -> None:
    recipe = load_recipe(f"{name}+cpu", ["train.budget_steps=8"])
    folder = RunFolder(tmp_path)
    assert pipeline.train_run(recipe, data_for(recipe), folder, runtime)
    losses = [m["loss"] for m in folder.metrics()]
    assert losses[-1] < losses[0]
    assert pipeline.pack_run(folder).total_bytes <= recipe.limits.cap_bytes
