"""The recipe that a user asks for, and changes of it, checked before any work begins."""

from __future__ import annotations

from collections.abc import Sequence

from underpar.build.levers import resolve_levers
from underpar.build.model import weight_shapes
from underpar.core.run_folder import RunFolder
from underpar.errors import RecipeError
from underpar.quant.rules import check_rules
from underpar.recipe import Recipe, from_tree, load_recipe, merge, parse_override, to_tree
from underpar.schema import QuantPart


def load_checked(name: str, overrides: Sequence[str] = ()) -> Recipe:
    """The resolved recipe; its levers, their settings and its quantization rules are checked."""
    recipe = resolve_levers(load_recipe(name, overrides))
    check_rules(weight_shapes(recipe), recipe.quant.rules)
    return recipe


def quant_part(folder: RunFolder, overrides: Sequence[str]) -> QuantPart | None:
    """The [quant] section of a run with the changes of --set; None without changes."""
    recipe = folder.read_recipe()
    tree = to_tree(recipe)
    for override in overrides:
        if not override.startswith("quant."):
            raise RecipeError(f"--set {override!r}: the run is trained; only quant.* can change")
        tree = merge(tree, parse_override(override))
    part = from_tree(tree).quant
    check_rules(weight_shapes(recipe), part.rules)
    return part if overrides else None
