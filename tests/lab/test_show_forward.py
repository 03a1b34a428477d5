"""The printed forward pass: complete, in order, and about every shipped recipe."""

import json
import math

import pytest
from typer.testing import CliRunner

from underpar.build.levers import find_lever, resolve_levers
from underpar.build.model import build_model, weight_shapes
from underpar.cli import app
from underpar.errors import RecipeError
from underpar.lab.show_forward import Forward, Line, observe_forward
from underpar.recipe import Recipe, list_recipes, load_recipe

# Tiny dimensions, with the recipe's levers and plan.
NAMES = [name if name == "cpu" else f"{name}+cpu" for name in list_recipes()]
# Another network is refused, see below.
SHOWN = [name for name in NAMES if load_recipe(name).hnet is None]


def load(name: str, *sets: str) -> Recipe:
    return resolve_levers(load_recipe(name, sets))


def calls(observed: Forward) -> list[Line]:
    return [*observed.built, *(line for part in observed.parts for line in part.lines)]


@pytest.mark.parametrize("name", SHOWN)
def test_every_recipe_is_shown_whole(name: str) -> None:
    recipe = load(name)
    observed = observe_forward(recipe)
    assert observed.plan == tuple(visit.layer for visit in build_model(recipe).plan)
    titles = [part.title for part in observed.parts]
    assert (titles[0], titles[-1]) == ("embed", "head")
    visits = [part for part in observed.parts if part.title.startswith("visit ")]
    for slot, (layer, visit) in enumerate(zip(observed.plan, visits, strict=True)):
        assert visit.title.startswith(f"visit {slot}: block {layer}")
        assert [line.what for line in visit.lines].count("attention") == 1
    # Each lever acts in the forward pass, when the model is built, or elsewhere.
    acting = {line.lever for line in calls(observed)} - {""}
    stages = {name: find_lever(name).STAGE for name in recipe.levers}
    assert acting == {name for name, stage in stages.items() if stage == "model"}
    assert observed.elsewhere == {n: stage for n, stage in stages.items() if stage != "model"}
    num_weights = sum(math.prod(shape) for shape in weight_shapes(recipe).values())
    assert sum(weights.num_parameters for weights in observed.weights) == num_weights
    assert all(weights.num_bytes > 0 for weights in observed.weights)
    assert json.loads(json.dumps(observed.as_dict()))["recipe_hash"] == recipe.hash


def test_only_a_gpt_is_shown() -> None:
    others = [name for name in NAMES if name not in SHOWN]
    assert "hnet-m1+cpu" in others
    for name in others:
        with pytest.raises(RecipeError, match=r"model\.network = 'hnet'"):
            observe_forward(load(name))


def test_the_baseline_has_its_own_calls_alone() -> None:
    recipe = load("cpu", "model.num_layers=2")
    spec = recipe.model
    observed = observe_forward(recipe)
    assert not any(line.lever for line in calls(observed))
    first, second = (part for part in observed.parts if part.title.startswith("visit"))
    names = ["attn.q", "attn.k", "attn.v", "attention", "attn.o", "mlp.up", "mlp.down"]
    assert [line.what for line in first.lines] == names
    up = first.lines[5]
    assert (up.reads, up.gives) == (f"(N, {spec.dim})", f"(N, {spec.mlp_dim})")
    assert (first.same_as, second.same_as) == (None, "visit 0")
    assert observed.parts[-1].lines[-1].gives == f"(N, {spec.vocab_size})"


def test_hooks_stand_where_they_act_with_settings_and_shapes() -> None:
    sets = ("model.num_layers=4", "levers.smear.width=8", "levers.loop={first=1, last=2}")
    recipe = load("cpu", *sets, "levers.x0_mix=true", "levers.window={layers=[0], size=16}")
    observed = observe_forward(recipe)
    embed, first, second = observed.parts[:3]
    smear = next(line for line in embed.lines if line.lever == "smear")
    assert "width = 8" in smear.settings
    assert smear.gives == f"(N, {recipe.model.dim})"
    assert [line.what for line in first.lines].index("mix") == 0
    assert first.lines[0].lever == "x0_mix"
    reach = {line.lever: (line.reads, line.gives) for line in observed.built}
    assert reach["window"] == ("layer 0", "16")
    windows = [line.reads for part in (first, second) for line in part.lines]
    assert sum("window 16" in reads for reads in windows) == 1
    assert len(observed.plan) > 4 and observed.plan.count(1) > 1


def test_a_lever_that_rewires_blocks_stands_above_what_it_calls() -> None:
    recipe = load("cpu", "model.num_layers=2", "levers.lanes.start=1", "levers.norm_scale=true")
    observed = observe_forward(recipe)
    visit = next(part for part in observed.parts if part.title.startswith("visit 1"))
    names = [line.what for line in visit.lines]
    assert names.index("wire") < names.index("normed") < names.index("attn.q")


def test_the_command_prints_it() -> None:
    words = ["recipe", "show", "pr2014+cpu", "--forward"]
    text = CliRunner().invoke(app, words, catch_exceptions=False).stdout
    assert "visit 0: block 0" in text and "lever smear" in text and "as visit " in text
    observed = json.loads(CliRunner().invoke(app, [*words, "--json"]).stdout)
    assert len(observed["plan"]) == text.count("\nvisit ")
