"""The counted script of a run: score.py beside its artifact, with the code of all of its scores."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from underpar.build.scoring import method_of
from underpar.core.run_folder import RunFolder, write_atomic
from underpar.recipe import Recipe
from underpar.score.ledger import Score
from underpar.submit.bundle import bundle


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
