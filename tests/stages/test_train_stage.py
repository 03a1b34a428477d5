"""What `train` refuses before its first step, and what it leaves of a run that fails."""

import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from tiny import TinyRun
from underpar.build.levers import resolve_levers
from underpar.build.model import weight_shapes
from underpar.cli import app
from underpar.compile import regions, rewrites
from underpar.core.run_folder import RunFolder
from underpar.core.runtime import Runtime, free_memory_bytes
from underpar.errors import RecipeError, RunError
from underpar.recipe import Recipe, list_recipes, load_recipe
from underpar.stages.train import (
    require_memory,
    require_packable,
    require_scored_lengths,
    telling_why,
    train,
)
from underpar.train import loop
from watcher import Watcher

COMPILED = Runtime(torch.device("cpu"), compiled=True, precision=torch.float32)


def test_a_run_says_what_it_trains_without(
    tiny_data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(regions, "inductor", lambda graph, examples: graph)
    few = ["train.budget_steps=2", "model.num_layers=1", "train.micro_batch_tokens=128"]
    changes = [[], ["levers.mlp_gate=true"]]
    losses, notes = [], []
    for number, change in enumerate(changes):
        recipe = resolve_levers(load_recipe("baseline+cpu", [*few, *change]))
        for device in ("cpu", "cuda"):
            # Tensors stay on the CPU: only the choice thinks of a GPU.
            chosen = replace(COMPILED, device=torch.device(device))
            monkeypatch.setattr(
                loop,
                "choose_rewrites",
                lambda wish, model, _, levers, at=chosen: rewrites.choose_rewrites(
                    wish, model, at, levers
                ),
            )
            watcher = Watcher()
            folder = RunFolder(tmp_path / f"{number}-{device}")
            losses.append(train(recipe, tiny_data, folder, COMPILED, watcher)["loss"])
            notes.append([note for note in watcher.notes if "without" in note])
    refused = "trains without folded_scales: levers at the seam 'mlp_out' act before the scale"
    assert notes == [[], [], [], [refused]]
    # With the loss that stores no logits, and without it.
    assert losses[0] == pytest.approx(losses[1]) and losses[2] == pytest.approx(losses[3])


@pytest.mark.parametrize("name", list_recipes())
def test_every_shipped_recipe_may_be_trained(name: str) -> None:
    # An overlay has to stand on something; every other recipe stands on the baseline anyway.
    recipe = resolve_levers(load_recipe(f"baseline+{name}"))
    require_packable(recipe, weight_shapes(recipe), bytes(1 << 18))
    # The records were trained with 80 GB per GPU.
    require_memory(recipe, weight_shapes(recipe), 80e9)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ("train.stages=['64@0.5', '256@1']", "train.stages reaches 256 tokens, .* reads 128"),
        ("train.contexts=[64, 256]", "train.contexts reaches 256 .* set model.context = 256"),
        ("train.context=129", "train.context reaches 129"),
    ],
)
def test_lengths_that_no_score_would_use_are_refused(
    tiny_run: TinyRun, tmp_path: Path, change: str, words: str
) -> None:
    run = ["train", "baseline+cpu", "--data", str(tiny_run.data), "--set", change]
    result = CliRunner().invoke(app, [*run, "--out", str(tmp_path / "run"), "--device", "cpu"])
    assert isinstance(result.exception, RecipeError) and re.search(words, str(result.exception))
    assert "\n" not in str(result.exception) and not (tmp_path / "run").exists()
    # A score of the recipe may be longer than a plain one.
    require_scored_lengths(load_recipe("baseline+cpu", [change, "score.context=256"]))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ("model.dim=4096", "weights: a file holds"),
        ("limits.cap_bytes=20000", "take at least .* the cap is 20000; use fewer bits"),
        ("quant.rules=['blocks.* int6:12']", "no pattern fits"),
        ("quant.rules=['* grid8']", "grid8 for"),
    ],
)
def test_a_model_that_cannot_be_packed_is_refused(change: str, words: str) -> None:
    recipe = resolve_levers(load_recipe("baseline", [change]))
    with pytest.raises(RecipeError, match=words):
        require_packable(recipe, weight_shapes(recipe), b"")


def test_grids_fit_any_cap(tiny_recipe: Recipe) -> None:
    grids = "quant.rules=['blocks.*.attn.?.weight grid8', 'blocks.*.mlp.*.weight grid8', '* int2']"
    recipe = resolve_levers(load_recipe("baseline", [grids, "limits.cap_bytes=1000000"]))
    require_packable(recipe, weight_shapes(recipe), b"")


def test_the_least_memory_grows_with_the_micro_batch(tiny_recipe: Recipe) -> None:
    shapes = weight_shapes(tiny_recipe)
    require_memory(tiny_recipe, shapes, 1e9)
    huge = replace(tiny_recipe, train=replace(tiny_recipe.train, micro_batch_tokens=1 << 30))
    with pytest.raises(
        RecipeError, match=r"train\.micro_batch_tokens = 1073741824: .* GB are free"
    ):
        require_memory(huge, shapes, 1e9)


def test_nothing_is_written_before_the_refusal(
    tiny_run: TinyRun, runtime: Runtime, tmp_path: Path
) -> None:
    assert free_memory_bytes(runtime.device) > 1e6
    huge = replace(tiny_run.recipe, train=replace(tiny_run.recipe.train, micro_batch_tokens=10**12))
    small = replace(tiny_run.recipe, limits=replace(tiny_run.recipe.limits, cap_bytes=5000))
    for recipe in (huge, small):
        with pytest.raises(RecipeError, match=r"GB are free|the cap is 5000"):
            train(recipe, tiny_run.data, RunFolder(tmp_path / "run"), runtime)
        assert not (tmp_path / "run").exists()


def test_a_run_says_why_it_ended_before_its_time(tmp_path: Path, runtime: Runtime) -> None:
    folder = RunFolder(tmp_path)

    def reason() -> object:
        return folder.read_json(folder.failure_file)["reason"]

    with (
        pytest.raises(RunError, match="the loss is nan"),
        telling_why(folder, runtime, lambda: None),
    ):
        raise RunError("stopped at step 6: the loss is nan")
    assert reason() == "stopped at step 6: the loss is nan"
    with telling_why(folder, runtime, lambda: "0.2 nats behind"):
        # A run that goes on has not failed yet.
        assert not folder.failure_file.exists()
    assert reason() == "0.2 nats behind"
    # Ctrl-C leaves a run that can continue.
    with pytest.raises(KeyboardInterrupt), telling_why(folder, runtime, lambda: None):
        raise KeyboardInterrupt
    assert not folder.failure_file.exists()


def test_a_run_knows_its_date_and_the_bytes_of_its_text(tiny_run: TinyRun) -> None:
    about = tiny_run.folder.read_json(tiny_run.folder.about_file)
    assert re.fullmatch(r"20\d\d-\d\d-\d\d", about["date"])
    assert about["train_bytes"] > about["train_tokens"] > 0
