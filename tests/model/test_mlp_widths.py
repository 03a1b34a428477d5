"""One MLP width per layer: shapes, loops, memory, size, and the way from training to a score."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from lever_stacks import batch_of, randomized
from underpar.build.model import weight_shapes
from underpar.core.run_folder import RunFolder
from underpar.core.runtime import Runtime
from underpar.errors import RecipeError
from underpar.infer.predictor import Predictor
from underpar.model.kv_cache import PackedCache
from underpar.recipe import Recipe, load_recipe
from underpar.score.method import ADAPT
from underpar.stages.pack import forecast_size, pack_run
from underpar.stages.score import score_artifact
from underpar.stages.train import require_memory, train

WIDTHS = (48, 96, 64, 128)
SETS = ["model.num_layers=4", f"model.mlp_dim={list(WIDTHS)}", "levers.unet=true"]
SETS += ["levers.loop={first=1, last=2, repeats=1, start=0.0}"]
SETS += ["levers.lora_ttt={rank=2, chunk=32, short=[], lanes=4}"]
SETS += ["train.budget_steps=2", "quant.rules=['blocks.*.weight gptq6:12.85', '* fp16']"]
RECIPE = load_recipe("cpu", SETS)


def test_each_layer_has_its_width_in_every_visit() -> None:
    model = randomized(RECIPE)
    seen = []
    for block in model.blocks:
        block.mlp.down.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0].size(1)))
    batch = batch_of([20], 128)
    model(batch.inputs, PackedCache(batch.segments))
    assert seen == [WIDTHS[layer] for layer in (0, 1, 2, 1, 2, 3)]


def test_equal_widths_are_one_width() -> None:
    specs = [replace(RECIPE.model, mlp_dim=width) for width in (64, (64,) * 4)]
    batch = batch_of([20], 128)
    one, listed = (
        Predictor(randomized(replace(RECIPE, model=spec)), torch.device("cpu"), []).log_probs(batch)
        for spec in specs
    )
    assert torch.equal(one, listed)


def test_memory_is_that_of_the_widths() -> None:
    narrow = replace(RECIPE, model=replace(RECIPE.model, mlp_dim=(48,) * 4))
    shapes = weight_shapes(narrow)
    least = 0
    while True:
        try:
            require_memory(narrow, shapes, least)
            break
        except RecipeError:
            least += 10_000
    with pytest.raises(RecipeError, match="smaller micro-batches"):
        require_memory(RECIPE, weight_shapes(RECIPE), least)


def test_widths_train_pack_and_score(
    data_for: Callable[[Recipe], Path], tmp_path: Path, runtime: Runtime
) -> None:
    data, folder = data_for(RECIPE), RunFolder(tmp_path)
    assert train(RECIPE, data, folder, runtime)["finished"]
    pack_run(folder)
    assert folder.read_recipe().model.mlp_dims == WIDTHS
    shapes = {row["name"]: tuple(row["shape"]) for row in forecast_size(RECIPE).tensors}
    assert shapes == weight_shapes(RECIPE)
    assert {w for name, (w, *_) in shapes.items() if name.endswith("up.weight")} == {*WIDTHS}
    plain = score_artifact(folder.artifact_file, data, runtime).score
    adapted = score_artifact(folder.artifact_file, data, runtime, ADAPT).score
    assert plain.bits != adapted.bits
