"""Every parameter in exactly one optimizer group."""

import torch

from underpar.build import build_model
from underpar.recipe import Recipe
from underpar.train.groups import GROUPS, group_parameters


def test_groups_cover_the_model_once(tiny_recipe: Recipe) -> None:
    model = build_model(tiny_recipe)
    groups = group_parameters(model)
    assert tuple(groups) == GROUPS
    counted = sum(p.numel() for members in groups.values() for p in members.values())
    assert counted == sum(p.numel() for p in model.parameters())
    assert set(groups["embed"]) == {"embedding.weight", "levers.bigram.table.weight"}
    assert all(p.ndim == 2 for p in groups["matrix"].values())
    assert "levers.qk_gain.gain" in groups["scalar"]
    assert "softcap" in groups["scalar"]


def test_frozen_parameters_are_left_alone(tiny_recipe: Recipe) -> None:
    model = build_model(tiny_recipe)
    model.softcap.requires_grad_(False)
    assert "softcap" not in group_parameters(model)["scalar"]
    assert isinstance(model.softcap, torch.nn.Parameter)
