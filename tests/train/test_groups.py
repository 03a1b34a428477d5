"""Every parameter in exactly one optimizer group."""

from underpar.build.model import build_model
from underpar.recipe import Recipe
from underpar.schema import GROUPS
from underpar.train.groups import group_parameters


def test_groups_cover_the_model_once(tiny_recipe: Recipe) -> None:
    model = build_model(tiny_recipe)
    groups = group_parameters(model)
    assert tuple(groups) == GROUPS
    counted = sum(p.numel() for members in groups.values() for p in members.values())
    assert counted == sum(p.numel() for p in model.parameters())
    assert set(groups["embed"]) == {"embedding.weight", "levers.bigram.table.weight"}
    assert all(p.ndim == 2 for p in groups["matrix"].values())
    assert "levers.qk_gain.gain" in groups["scalar"]
    assert "levers.softcap.cap_both" in groups["scalar"]


def test_frozen_parameters_are_left_alone(tiny_recipe: Recipe) -> None:
    model = build_model(tiny_recipe)
    cap = model.get_parameter("levers.softcap.cap_both")
    cap.requires_grad_(False)
    assert all(p is not cap for group in group_parameters(model).values() for p in group.values())
