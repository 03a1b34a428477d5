"""Recipes: bases, overlays, overrides, refusals, and the way back to TOML."""

from pathlib import Path

import pytest

from underpar.build.levers import plug_levers, resolve_levers
from underpar.errors import RecipeError
from underpar.recipe import Recipe, list_recipes, load_recipe, merge, parse_override, to_toml


@pytest.mark.parametrize("name", list(list_recipes()))
def test_shipped_recipes_survive_toml(name: str, tmp_path: Path) -> None:
    recipe = load_recipe(name)
    path = tmp_path / "again.toml"
    path.write_text(to_toml(recipe))
    again = load_recipe(str(path))
    assert again == recipe
    assert again.hash == recipe.hash


def test_every_shipped_recipe_says_what_it_is() -> None:
    assert all(len(line) > 20 for line in list_recipes().values())


def test_a_base_gives_what_the_file_does_not(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text('base = "baseline"\n[model]\nnum_layers = 3\n')
    mine, base = load_recipe(str(path)), load_recipe("baseline")
    assert mine.model.num_layers == 3
    assert mine.model.dim == base.model.dim
    assert mine.levers == base.levers


def test_overlays_stack_and_overrides_come_last() -> None:
    recipe = load_recipe("baseline+cpu", ["model.dim=96", "train.seed=7"])
    assert (recipe.model.dim, recipe.train.seed) == (96, 7)
    assert recipe.model.num_layers == load_recipe("cpu").model.num_layers
    assert recipe.levers == load_recipe("baseline").levers


def test_a_lever_can_be_switched_on_and_off() -> None:
    assert "ema" not in load_recipe("baseline", ["levers.ema=false"]).levers
    assert load_recipe("baseline", ["levers.qk_gain=true"]).levers["qk_gain"] == {}
    with_setting = load_recipe("baseline", ["levers.qk_gain.init=2"])
    assert plug_levers(with_setting, "model")["qk_gain"].gain.unique().tolist() == [2.0]


def test_the_hash_names_the_content() -> None:
    assert load_recipe("demo").hash == load_recipe("demo").hash
    assert load_recipe("demo").hash != load_recipe("demo", ["train.seed=1"]).hash


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("train.matrx_lr=1", ("train.matrx_lr", "'matrix_lr'")),
        ("modle.dim=1", ("modle", "'model'")),
        ("model.dim=big", ("model.dim", "'big'", "int")),
        ("model.dim=1.5", ("model.dim", "1.5")),
        ("model.dim=true", ("model.dim", "True")),
        ("model.dim=101", ("101", "divide")),
        ("model.dim=10", ("head of 5", "even")),
        ("train.budget_seconds=0", ("budget_seconds", "above 0")),
        ("train.warmdown=2", ("warmdown", "2")),
        ("data.holdout=1.0", ("holdout", "1.0")),
        ("quant.rules=['a b c']", ("a b c", "pattern scheme")),
        ("train.adam_betas=0.9", ("adam_betas", "list")),
        ("train.adam_betas=[0.9]", ("adam_betas", "2 values")),
        ("train.clip=inf", ("train.clip", "finite")),
        ("model.num_layers=1000", ("num_layers", "256")),
        ("model.mlp_dim=[64, 96]", ("mlp_dim", "2 widths", "num_layers = 4", "each")),
        ("model.mlp_dim=[]", ("mlp_dim", "0 widths")),
        ("model.mlp_dim=[64, 96, 0, 64]", ("mlp_dim = 0", "1 to 65536")),
        ("model.mlp_dim=[64, 96, 1.5, 64]", ("mlp_dim = 1.5", "int")),
        ("model.mlp_dim=[[64], 96, 64, 64]", ("mlp_dim = [64]", "int")),
        ("model.mlp_dim=wide", ("mlp_dim = 'wide'", "int")),
        ("levers.ema=3", ("levers.ema", "3")),
        ("model=3", ("model", "table")),
        ("nonsense", ("nonsense", "section.key=value")),
    ],
)
def test_mistakes_are_named(override: str, words: tuple[str, ...]) -> None:
    with pytest.raises(RecipeError) as caught:
        load_recipe("demo", [override])
    assert all(word in str(caught.value) for word in words)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("override", "word"),
    [
        ("levers.emma=true", "'ema'"),
        ("levers.ema.horzon=1", "'horizon'"),
        ("levers.ema.horizon=-1.0", "more than 0"),
        ("levers.ema.decay=1.0", "decay = 1.0: expected 0 up to 1"),
        ("levers.bigram.buckets=1", "at least 2"),
    ],
)
def test_levers_are_checked_where_they_are_known(override: str, word: str) -> None:
    with pytest.raises(RecipeError, match=word):
        plug_levers(load_recipe("demo", [override]), "infer")


def test_missing_and_broken_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match=r"basline.*'baseline'"):
        load_recipe("basline")
    with pytest.raises(RecipeError, match=r"nowhere\.toml"):
        load_recipe(str(tmp_path / "nowhere.toml"))
    broken = tmp_path / "broken.toml"
    broken.write_text("[model\n")
    with pytest.raises(RecipeError, match="not valid TOML"):
        load_recipe(str(broken))


def test_a_base_that_leads_back_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "loop.toml"
    path.write_text(f'base = "{path}"\n')
    with pytest.raises(RecipeError, match="leads back"):
        load_recipe(str(path))


def test_merge_leaves_its_inputs_alone() -> None:
    base = {"a": {"x": 1}}
    assert merge(base, {"a": {"y": 2}}) == {"a": {"x": 1, "y": 2}}
    assert base == {"a": {"x": 1}}


def test_override_values_are_toml() -> None:
    assert parse_override("a.b=[1, 2]") == {"a": {"b": [1, 2]}}
    assert parse_override("a.b='x'") == {"a": {"b": "x"}}
    assert parse_override("a.b=x y") == {"a": {"b": "x y"}}


def test_widths_by_layer_survive_toml_and_one_width_keeps_its_hash(tmp_path: Path) -> None:
    widths = load_recipe("demo", ["model.mlp_dim=[64, 96, 128, 64]"])
    assert widths.model.mlp_dims == (64, 96, 128, 64)
    path = tmp_path / "again.toml"
    path.write_text(to_toml(widths))
    assert load_recipe(str(path)).hash == widths.hash
    plain = load_recipe("demo", ["model.mlp_dim=64"])
    assert plain.model.mlp_dims == (64,) * plain.model.num_layers
    assert plain.hash != load_recipe("demo", ["model.mlp_dim=[64, 64, 64, 64]"]).hash


def test_defaults_are_a_valid_recipe() -> None:
    assert Recipe().hash == Recipe().hash


def test_a_setting_that_old_recipes_lack_changes_their_hash_only_if_it_is_set() -> None:
    recipe = load_recipe("baseline")
    assert "piece_tokens" not in to_toml(recipe)
    assert "piece_tokens = 0" in to_toml(recipe, complete=True)
    changed = load_recipe("baseline", ["train.piece_tokens=64"])
    assert "piece_tokens = 64" in to_toml(changed) and changed.hash != recipe.hash
    lever = resolve_levers(load_recipe("baseline", ["levers.ema.decay=0.0"]))
    assert lever == resolve_levers(load_recipe("baseline", ["levers.ema=true"]))
    assert "decay" not in lever.levers["ema"]
    with pytest.raises(RecipeError, match=r"train.piece_tokens = -1: expected 0 or more"):
        load_recipe("baseline", ["train.piece_tokens=-1"])
