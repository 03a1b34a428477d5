"""Deviations of recipes from published systems: every entry agrees with its recipe."""

import json

import pytest
from typer.testing import CliRunner

from underpar.build.levers import resolve_levers
from underpar.cli import app
from underpar.errors import RecipeError
from underpar.lab.deviations import (
    STACKED,
    Deviation,
    deviations_of,
    published_name,
    read_deviations,
    says,
    value_at,
)
from underpar.recipe import list_recipes, load_recipe, to_tree

DEVIATIONS = read_deviations()
TREES = {name: to_tree(resolve_levers(load_recipe(name)), complete=True) for name in DEVIATIONS}


def shown(*words: str) -> str:
    result = CliRunner().invoke(app, ["recipe", "show", *words, "--against-published"])
    assert result.exit_code == 0, result.output
    return result.stdout


def test_every_published_recipe_has_a_section() -> None:
    assert set(DEVIATIONS) == {name for name in list_recipes() if name.startswith("pr")}


@pytest.mark.parametrize("name", DEVIATIONS)
def test_entries_agree_with_the_recipe(name: str) -> None:
    for row in DEVIATIONS[name]:
        assert row.what and row.why, row
        assert row.published != row.here, row
        assert not row.key or says(TREES[name], row), row


def test_a_wrong_entry_is_noticed() -> None:
    tree = TREES["pr2014"]
    start = Deviation("", 0.5, 0.35, "", "levers.loop.start")
    assert says(tree, start)
    assert not says(tree, Deviation("", 0.35, 0.5, "", "levers.loop.start"))
    # One element of a list, a lever that is there, one that is not, a default of a lever.
    assert says(tree, Deviation("", "", "* fp16", "", "quant.rules"))
    assert says(tree, Deviation("", False, True, "", "levers.xsa"))
    assert says(tree, Deviation("", True, False, "", "levers.bigram"))
    assert value_at(tree, "levers.loop.first") == 3
    for key in ("train.lr", "levers.loop.begin", "quant.rules.first", "score"):
        with pytest.raises(RecipeError, match=f"no key '{key}'"):
            value_at({k: v for k, v in tree.items() if k != "score"}, key)


def test_values_set_on_top_are_shown_too() -> None:
    recipe = resolve_levers(load_recipe("pr2014+cpu", ["levers.xsa=false", "quant.fit=false"]))
    rows = {row.key: row for row in deviations_of("pr2014+cpu", recipe)}
    assert (rows["levers.xsa"].published, rows["levers.xsa"].here) == (True, False)
    assert (rows["model.dim"].published, rows["model.dim"].here) == (512, 96)
    assert rows["model.dim"].why == STACKED
    # A listed one keeps what is published and its reason.
    fit = rows["quant.fit"]
    assert fit.here is False and "73 kB" in fit.why and fit.why.endswith(STACKED)
    plain = deviations_of("pr2014", resolve_levers(load_recipe("pr2014")))
    assert tuple(plain) == DEVIATIONS["pr2014"]


def test_recipes_stand_on_published_ones() -> None:
    assert published_name("h200-300s") == "pr2014"
    # A published recipe on another one is itself.
    assert published_name("pr2135+cpu") == "pr2135"
    with pytest.raises(RecipeError, match="'demo' stands on no published system; choose from"):
        published_name("demo")


def test_the_command_prints_what_and_why() -> None:
    text = " ".join(shown("pr2014").split())
    assert "lrzip by groups" in text and "73 kB" in text
    rows = json.loads(shown("pr2014", "--json"))
    assert [row["what"] for row in rows] == [row.what for row in DEVIATIONS["pr2014"]]
