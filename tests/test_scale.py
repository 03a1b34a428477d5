"""Scaled recipes: the table [scale] changes batch and counts of steps, and nothing else."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner

from underpar.build.levers import resolve_levers
from underpar.cli import app
from underpar.core.run_folder import RunFolder
from underpar.core.runtime import Runtime
from underpar.data.folder import load_data
from underpar.errors import RecipeError
from underpar.lab.deviations import STACKED, deviations_of
from underpar.recipe import Recipe, load_recipe, scaled_values, to_toml, to_tree
from underpar.stages.train import begin_run, make_trainer
from underpar.train.step import step_of

PUBLISHED = ("pr2014", "pr2135", "pr1894", "pr1493", "pr1219")
EMA = ("pr2014", "pr2135", "pr1493", "pr1219")


def step_tokens(recipe: Recipe) -> int:
    return sum(micro.tokens for micro in step_of(recipe.train))


def stack(tmp_path: Path, below: str, overlay: str) -> str:
    """The name of a recipe of these two texts, one on the other."""
    for name, text in (("below", below), ("overlay", overlay)):
        (tmp_path / f"{name}.toml").write_text(text)
    return f"{tmp_path}/below.toml+{tmp_path}/overlay.toml"


@pytest.mark.parametrize("name", PUBLISHED)
def test_one_gpu_scales_batch_and_steps_and_leaves_the_rest(name: str) -> None:
    whole, small = load_recipe(name), load_recipe(f"{name}+one-gpu")
    # To whole sequences: 18,432 tokens are 0.25 and 0.3 of the micro-batches of PR 1219.
    assert step_tokens(small) / step_tokens(whole) == pytest.approx(0.25, abs=0.02)
    assert small.train.rewarm_steps == whole.train.rewarm_steps // 4
    assert small.train.momentum_warmup_steps == 1500 // 4
    assert (whole.train.budget_seconds, small.train.budget_seconds) == (600, 300)
    changed = {row.key for row in deviations_of(f"{name}+one-gpu", small) if row.why == STACKED}
    scaled = {*scaled_values(f"{name}+one-gpu")}
    calibration = {"quant.calibration_batches", "quant.calibration_batch_tokens"}
    assert changed - calibration == {"train.budget_seconds", "train.reserve_seconds", *scaled}
    # What one GPU was measured to read in the time that is kept for it.
    tuned = load_recipe("h200-300s")
    for part, key in (("train", "reserve_seconds"), *(("quant", k[6:]) for k in calibration)):
        assert getattr(getattr(small, part), key) == getattr(getattr(tuned, part), key)


def test_an_average_covers_fewer_steps(tmp_path: Path) -> None:
    decays = {name: load_recipe(f"{name}+one-gpu").levers["ema"]["decay"] for name in EMA}
    assert decays == {"pr2014": 0.986, "pr2135": 0.986, "pr1493": 0.986, "pr1219": 0.988}
    short = stack(tmp_path, "[levers.ema]\ndecay = 0.5\n", "[scale]\nsteps = 0.25\n")
    with pytest.raises(RecipeError, match=r"scale.steps = 0.25: an average with decay 0.5"):
        load_recipe(short)
    # A share of the run stays.
    share = stack(tmp_path, "[levers.ema]\nhorizon = 0.03\n", "[scale]\nsteps = 0.25\n")
    assert load_recipe(share).levers["ema"] == {"horizon": 0.03}


@pytest.mark.parametrize("name", PUBLISHED)
def test_scaled_recipes_train(
    name: str, data_for: Callable[[Recipe], Path], tmp_path: Path, runtime: Runtime
) -> None:
    recipe = resolve_levers(load_recipe(f"{name}+cpu+one-gpu", ["train.budget_steps=3"]))
    assert step_tokens(recipe) == step_tokens(load_recipe(f"{name}+cpu")) / 4
    folder, path = RunFolder(tmp_path / "run"), data_for(recipe)
    data = load_data(path)
    trainer = make_trainer(recipe, data, folder, runtime)
    begin_run(folder, recipe, path, data, runtime)
    assert trainer.run()
    lines = [json.loads(line) for line in folder.metrics_file.read_text().splitlines()]
    assert [line["tokens"] for line in lines] == [step_tokens(recipe) * n for n in (1, 2, 3)]
    assert folder.read_recipe().train == recipe.train


def test_mixed_lengths_keep_their_shares_of_a_step() -> None:
    whole, small = (step_of(load_recipe(n).train) for n in ("pr1219", "pr1219+one-gpu"))
    assert [(micro.context, micro.share) for micro in small] == [(2048, 5), (6144, 3)]
    assert [micro.context for micro in whole for _ in range(micro.share)] == 5 * [2048] + 3 * [6144]
    assert all(micro.tokens % micro.context == 0 for micro in small)


def test_factors_apply_to_what_is_below_and_values_above_stay(tmp_path: Path) -> None:
    below = "[train]\nnum_micro_batches = 8\nrewarm_steps = 40\nmicro_batch_tokens = 4096\n"
    scale = "[scale]\nbatch = 0.5\nsteps = 0.1\n[train]\nrewarm_steps = 5\n"
    name = stack(tmp_path, f"{below}[levers.lawa]\nevery = 40\n", scale)
    recipe = load_recipe(name, ["train.micro_batch_tokens=100"])
    assert (recipe.train.num_micro_batches, recipe.train.rewarm_steps) == (4, 5)
    assert recipe.levers["lawa"] == {"every": 4}
    assert recipe.train.micro_batch_tokens == 100
    # Again, on what the first factors left.
    twice = load_recipe(f"{name}+{tmp_path}/overlay.toml")
    assert (twice.train.num_micro_batches, twice.levers["lawa"]["every"]) == (2, 1)
    # A base is below too.
    (tmp_path / "based.toml").write_text('base = "baseline"\n[scale]\nbatch = 0.5\n')
    assert load_recipe(f"{tmp_path}/based.toml").train.num_micro_batches == 4


def test_an_uneven_number_of_micro_batches_keeps_its_number(tmp_path: Path) -> None:
    below = "[train]\nnum_micro_batches = 3\nmicro_batch_tokens = 12288\ncontext = 1024\n"
    recipe = load_recipe(stack(tmp_path, below, "[scale]\nbatch = 0.25\n"))
    assert (recipe.train.num_micro_batches, recipe.train.micro_batch_tokens) == (3, 3072)
    none = load_recipe(stack(tmp_path, below, "[scale]\nbatch = 0.001\n"))
    assert none.train.micro_batch_tokens == 1024


def test_no_steps_stay_none(tmp_path: Path) -> None:
    name = stack(tmp_path, "[train]\nrewarm_steps = 0\n", "[scale]\nsteps = 0.25\n")
    assert load_recipe(name).train.rewarm_steps == 0
    few = stack(tmp_path, "[train]\nrewarm_steps = 1\n", "[scale]\nsteps = 0.25\n")
    assert load_recipe(few).train.rewarm_steps == 1


def test_a_stored_recipe_is_plain(tmp_path: Path) -> None:
    recipe = load_recipe("pr2014+one-gpu")
    path = tmp_path / "recipe.toml"
    path.write_text(to_toml(recipe))
    assert "scale" not in to_tree(recipe)
    assert load_recipe(str(path)) == recipe
    assert scaled_values(str(path)) == {}


@pytest.mark.parametrize(
    ("overlay", "words"),
    [
        ("scale = 3\n", "scale = 3: expected a table"),
        ("[scale]\nbatch = 0\n", r"scale.batch = 0.0: expected above 0"),
        ("[scale]\nsteps = -1\n", r"scale.steps = -1.0: expected above 0"),
        ("[scale]\nsteps = nan\n", "scale.steps = nan: expected a finite"),
        ("[scale]\nbatch = 'half'\n", "scale.batch = 'half': expected float"),
        ("[scale]\nstep = 0.5\n", "scale.step; did you mean 'steps'"),
    ],
)
def test_mistakes_are_named(tmp_path: Path, overlay: str, words: str) -> None:
    with pytest.raises(RecipeError, match=words):
        load_recipe(stack(tmp_path, "", overlay))


def test_the_command_says_what_was_scaled() -> None:
    def shown(*words: str) -> str:
        result = CliRunner().invoke(app, ["recipe", "show", *words])
        assert result.exit_code == 0, result.output
        return result.stdout

    text = shown("pr2014+one-gpu")
    assert "# scaled: train.num_micro_batches = 2, from 8\n" in text
    assert json.loads(shown("pr2014+one-gpu", "--json"))["scaled"]["train.rewarm_steps"] == [32, 8]
    # What is set on top is not scaled.
    changed = shown("pr2014+one-gpu", "--set", "train.num_micro_batches=4")
    assert changed.count("# scaled") == text.count("# scaled") - 1
    assert "scaled" not in shown("pr2014") and "scaled" not in json.loads(shown("pr2014", "--json"))
