"""Ordered patterns: the first that fits decides, and every tensor must fit one."""

import numpy as np
import pytest

from underpar.build import weight_shapes
from underpar.errors import RecipeError
from underpar.quant.rules import match_rules, quantize_model
from underpar.recipe import list_recipes, load_recipe


def test_the_first_fitting_rule_decides() -> None:
    schemes = match_rules(["a.weight", "b.weight"], ["a.* int8", "*.weight int6", "* fp16"])
    assert [str(s) for s in schemes.values()] == ["int8", "int6"]


def test_a_tensor_without_a_rule_is_named() -> None:
    with pytest.raises(RecipeError, match=r"'b\.weight'.*\* fp16"):
        match_rules(["b.weight"], ["a.* int8"])


@pytest.mark.parametrize("name", list(list_recipes()))
def test_shipped_rules_cover_every_tensor(name: str) -> None:
    recipe = load_recipe(name)
    shapes = weight_shapes(recipe)
    assert set(match_rules(list(shapes), recipe.quant.rules)) == set(shapes)


def test_tensors_come_in_name_order() -> None:
    weights = {name: np.ones((2, 2), np.float32) for name in ("b", "a")}
    assert list(quantize_model(weights, ["* int4"])) == ["a", "b"]
