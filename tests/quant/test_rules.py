"""Ordered patterns: the first that fits decides, and every tensor must fit one."""

import math

import numpy as np
import pytest

from underpar.build.model import build_model, weight_shapes
from underpar.errors import RecipeError
from underpar.quant.calibration import sites_of
from underpar.quant.rules import CALIBRATED, check_rules, match_rules, quantize_model, refine
from underpar.recipe import Recipe, list_recipes, load_recipe
from underpar.schema import QuantPart

QUERY = "blocks.0.attn.q.weight"


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
    check_rules(shapes, recipe.quant.rules)


@pytest.mark.parametrize(("name", "num_steps"), [("pr2014", 88), ("h200-300s", 11)])
def test_gates_have_a_step_per_head_as_published_or_per_layer(name: str, num_steps: int) -> None:
    recipe = load_recipe(name)
    shapes, gate = weight_shapes(recipe), "levers.sparse_attn_gate.gate"
    scheme = match_rules([gate], recipe.quant.rules)[gate]
    assert shapes[gate] == (11, 8, 12)
    assert scheme.bits == 8 and scheme.num_halves(shapes[gate]) == num_steps


def test_control_tensors_of_pr_1894_have_8_bits_from_128_values_on() -> None:
    recipe = load_recipe("pr1894")
    shapes = weight_shapes(recipe)
    control = {name: shape for name, shape in shapes.items() if not CALIBRATED.fullmatch(name)}
    for name, scheme in match_rules(list(control), recipe.quant.rules).items():
        assert scheme.bits == (8 if math.prod(control[name]) >= 128 else 0), name
        # One step for each published tensor: a block's scales and mix, all skips together.
        published = 11 if control[name][0] == 11 else 1
        assert not scheme.bits or scheme.num_halves(control[name]) == published


def test_matrices_with_large_inputs_get_one_more_bit() -> None:
    names = [QUERY, "blocks.1.attn.q.weight", "blocks.2.attn.q.weight", "embedding.weight"]
    schemes = match_rules(names, ["blocks.* gptq5+clip", "* int8"])
    inputs = dict.fromkeys(names, 1.0) | {names[2]: 2.0}
    texts = [str(scheme) for scheme in refine(schemes, 2, inputs).values()]
    # Of equals, the first in the model.
    assert texts == ["gptq6+clip", "gptq5+clip", "gptq6+clip", "int8"]
    assert [s.bits for s in refine(schemes, 1).values()] == [6, 5, 5, 8]
    assert [s.bits for s in refine(schemes, 9).values()] == [6, 6, 6, 8]
    assert refine(schemes, 0, inputs) == schemes
    with pytest.raises(RecipeError, match=r"finer_matrices = 1 with '\* gptq8:20'.*gptq7 or less"):
        QuantPart(("* gptq8:20",), finer_matrices=1)


def test_pr_1219_has_31_matrices_of_31_levels_and_36_of_15() -> None:
    recipe = load_recipe("pr1219")
    shapes = weight_shapes(recipe)
    schemes = refine(match_rules(list(shapes), recipe.quant.rules), recipe.quant.finer_matrices)
    limits = [scheme.limit for scheme in schemes.values()]
    assert (limits.count(31), limits.count(15)) == (31, 36)


def test_tensors_come_in_name_order() -> None:
    weights = {name: np.ones((2, 2), np.float32) for name in ("b", "a")}
    assert list(quantize_model(weights, ["* int4"])) == ["a", "b"]


def test_calibrated_names_are_those_whose_inputs_are_summed(tiny_recipe: Recipe) -> None:
    model = build_model(tiny_recipe)
    summed = {name for names in sites_of(model).values() for name in names}
    assert {name for name in model.state_dict() if CALIBRATED.fullmatch(name)} == summed


@pytest.mark.parametrize("scheme", ["gptq6:12", "gptq7:14+awq", "grid8+columns"])
def test_schemes_that_need_inputs_are_for_calibrated_matrices(scheme: str) -> None:
    shapes: dict[str, tuple[int, ...]] = {QUERY: (4, 4), "blocks.0.gate.weight": (4, 4)}
    check_rules(shapes, [f"*.attn.* {scheme}", "* fp16"])
    with pytest.raises(RecipeError, match=r"'blocks\.0\.gate\.weight'.*not calib.*use intB:k") as e:
        check_rules(shapes, [f"* {scheme}"])
    assert scheme in str(e.value) and "\n" not in str(e.value)
    with pytest.raises(RecipeError, match=r"shape \(4,\).*expected a matrix"):
        check_rules({QUERY: (4,)}, [f"* {scheme}"])


def test_runs_must_fill_rows() -> None:
    shapes: dict[str, tuple[int, ...]] = {"a": (4, 6), "s": ()}
    check_rules(shapes, ["a ternary:3", "s ternary:1"])
    for name, row in (("a", 6), ("s", 1)):
        with pytest.raises(RecipeError, match=rf"ternary:4 for '{name}'.*a divisor of {row}"):
            check_rules({name: shapes[name]}, ["* ternary:4"])


def test_without_a_calibration_nothing_is_solved() -> None:
    weights = {QUERY: np.ones((2, 2), np.float32)}
    with pytest.raises(RecipeError, match=r"grid8 for 'blocks.*needs a calibration.*use intB:k"):
        quantize_model(weights, ["* grid8"])
