"""The counted script of a run: score.py beside its artifact, with the code of all of its scores."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from underpar.artifact.budget import read_budget
from underpar.build.scoring import method_of
from underpar.core.fields import reading
from underpar.core.makers import again
from underpar.core.run_folder import RunFolder, write_atomic, write_json
from underpar.recipe import Recipe
from underpar.score.ledger import Score, score_from_dict
from underpar.submit.bundle import bundle


def counted_recipe(recipe: Recipe, scores: Iterable[Score]) -> Recipe:
    """The recipe with the levers of all scores added: the code of each of them is counted."""
    levers = dict(recipe.levers)
    for score in scores:
        levers |= method_of(score, recipe)[1].levers
    return replace(recipe, levers=levers)


def write_script(folder: RunFolder, recipe: Recipe, artifact_sha256: str) -> None:
    """Write the script that scores by every method whose score lies beside the artifact.

    The budget of the run then counts the bytes of this script.
    """
    scores = []
    for path in folder.score_files():
        tree = folder.read_json(path)
        if tree.get("artifact_sha256") == artifact_sha256:
            with reading(path, again(path)):
                scores.append(score_from_dict(tree))
    script = bundle(counted_recipe(recipe, scores))
    write_atomic(folder.script_file, script)
    if folder.budget_file.is_file():
        old = folder.read_fields(folder.budget_file)
        data, cap_bytes = folder.artifact_file.read_bytes(), old.count("cap_bytes")
        budget = read_budget(data, len(script), cap_bytes)
        write_json(folder.budget_file, {**old.values, **budget.as_dict()})
