"""The script of a submission, train_gpt.py: trains, packs and scores a recipe on its own."""

from __future__ import annotations

from dataclasses import replace

from underpar.recipe import Recipe, to_toml
from underpar.schema import TrainPart
from underpar.submit.bundle import ENTRY, bundle

# The program of train_gpt.py, and where in the bundle it finds its recipe.
TRAIN_ENTRY, RECIPE_FILE = "underpar.stages.train_gpt", "underpar/stages/recipe.toml"


def without_seed(recipe: Recipe) -> Recipe:
    """The recipe with the default seed: equal for all runs that differ in nothing but the seed."""
    return replace(recipe, train=replace(recipe.train, seed=TrainPart().seed))


def train_script(recipe: Recipe) -> bytes:
    """The script for `recipe`; the same bytes for every seed.

    It also carries the program of score.py, which packing writes.
    """
    recipe = without_seed(recipe)
    return bundle(recipe, TRAIN_ENTRY, also=[ENTRY], files={RECIPE_FILE: to_toml(recipe)})
