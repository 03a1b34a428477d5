"""The two scripts of a run: score.py scores its artifact, train_gpt.py trains, packs and scores."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from underpar.build.scoring import method_of
from underpar.core.run_folder import RunFolder, write_atomic
from underpar.recipe import Recipe, to_toml
from underpar.schema import TrainPart
from underpar.score.ledger import Score
from underpar.submit.bundle import ENTRY, bundle

# The program of train_gpt.py, and where in the bundle it finds its recipe.
TRAIN_ENTRY, RECIPE_FILE = "underpar.stages.train_gpt", "underpar/stages/recipe.toml"


def counted_recipe(recipe: Recipe, scores: Iterable[Score]) -> Recipe:
    """The recipe with the levers of all scores added: the code of each of them is counted."""
    levers = dict(recipe.levers)
    for score in scores:
        levers |= method_of(score, recipe)[1].levers
    return replace(recipe, levers=levers)


def write_script(folder: RunFolder, recipe: Recipe, scores: Iterable[Score] = ()) -> bytes:
    """Write the script that scores with the recipe's levers and with those of `scores`."""
    script = bundle(counted_recipe(recipe, scores))
    write_atomic(folder.script_file, script)
    return script


def without_seed(recipe: Recipe) -> Recipe:
    """The recipe with the default seed: equal for all runs that differ in nothing but the seed."""
    return replace(recipe, train=replace(recipe.train, seed=TrainPart().seed))


def train_script(recipe: Recipe) -> bytes:
    """train_gpt.py: trains, packs and scores `recipe`; the same bytes for every seed.

    It also carries the program of score.py, which packing writes.
    """
    recipe = without_seed(recipe)
    return bundle(recipe, TRAIN_ENTRY, also=[ENTRY], files={RECIPE_FILE: to_toml(recipe)})
