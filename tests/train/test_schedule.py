"""Budgets and schedules as functions of progress."""

from dataclasses import replace
from typing import Any

import pytest

from underpar.errors import RecipeError
from underpar.recipe import TrainPart
from underpar.schema import GROUPS
from underpar.train.schedule import (
    context_at,
    decay_scales,
    lr_scale,
    momentum,
    progress,
    rewarm,
)

PART = TrainPart(budget_seconds=100, budget_steps=50, budget_tokens=0)


def test_the_tightest_budget_decides() -> None:
    assert progress(PART, 10.0, 0, 0) == pytest.approx(0.1)
    assert progress(PART, 10.0, 25, 10**9) == pytest.approx(0.5)
    assert progress(TrainPart(budget_seconds=0, budget_tokens=10), 1e9, 9, 5) == pytest.approx(0.5)


@pytest.mark.parametrize(
    ("p", "scale"),
    [(0, 1), (0.15, 1), (0.25, 0.882), (0.35, 0.765), (0.5, 0.588), (0.85, 0.176), (0.99, 0.1)],
)
def test_warm_down_as_published(p: float, scale: float) -> None:
    assert lr_scale(PART, p) == pytest.approx(scale, abs=5e-4)


STAGED = TrainPart(stages=("1024@0.1", "2048@0.7", "3072@1"))


@pytest.mark.parametrize(
    ("p", "context"),
    [(0, 1024), (0.1, 1024), (0.1001, 2048), (0.7, 2048), (0.7001, 3072), (1, 3072)],
)
def test_09_a_stage_lasts_up_to_its_share(p: float, context: int) -> None:
    assert context_at(STAGED, p) == context
    assert context_at(PART, p) is None


def test_08_rates_rise_again_in_exactly_32_steps() -> None:
    assert [rewarm(STAGED, k) for k in range(31)] == [(k + 1) / 32 for k in range(31)]
    assert rewarm(STAGED, 31) == rewarm(STAGED, 32) == rewarm(STAGED, 10**6) == 1
    assert rewarm(TrainPart(rewarm_steps=0), 0) == 1


def test_decay_follows_its_points() -> None:
    part = TrainPart(decay_curve=("1@0.7", "0.5@1"))
    for group in GROUPS:
        assert [decay_scales(part, p)[group] for p in (0, 0.5, 0.7)] == [1, 1, 1]
        assert decay_scales(part, 0.85)[group] == pytest.approx(0.75)
        assert decay_scales(part, 1.0)[group] == decay_scales(part, 1.2)[group] == 0.5
        assert decay_scales(PART, 0.3)[group] == 1


def test_a_group_may_have_a_decay_of_its_own() -> None:
    part = TrainPart(
        matrix_decay=0.02,
        matrix_decay_curve=("1@0.28", "4@1"),
        embed_decay_curve=("1@0.5", "0@1"),
        decay_curve=("2@1",),
        warmdown=0.72,
        lr_floor=0.0,
    )
    for p in (0.0, 0.28, 0.5, 0.64, 0.9, 1.0):
        scales = decay_scales(part, p)
        # The ramp of the earlier run in the tree of PR 1894.
        ramp = 0.02 + 0.06 * (1 - lr_scale(part, p))
        assert part.matrix_decay * scales["matrix"] == pytest.approx(ramp)
        assert scales["embed"] == pytest.approx(min(1.0, 2 - 2 * p)) and scales["scalar"] == 2


def test_a_reserve_and_operations_are_budgets_too() -> None:
    assert progress(TrainPart(budget_seconds=100, reserve_seconds=20), 40, 0, 0) == 0.5
    assert progress(TrainPart(budget_seconds=0, budget_flops=1e12), 1e9, 0, 0, 2.5e11) == 0.25


@pytest.mark.parametrize(
    ("fields", "word"),
    [
        ({"stages": ("1024",)}, "value@progress"),
        ({"stages": ("1024@0.5", "2048@0.4")}, "rise"),
        ({"stages": ("1024@0.5",)}, "reach 1"),
        ({"stages": ("1024@1",), "contexts": (8,)}, "contexts must be empty"),
        ({"stages": ("0.5@1",)}, "positive number of tokens"),
        ({"decay_curve": ("x@1",)}, "value@progress"),
        ({"matrix_decay_curve": ("1@0.5", "2@0.4")}, "matrix_decay_curve: progress must rise"),
        ({"newton_schulz": "cubic"}, "cubic"),
        ({"reserve_seconds": 700.0}, "reserve_seconds"),
        ({"momentum_warmup_steps": -1}, "momentum_warmup_steps = -1: expected 0 or more"),
        ({"rewarm_steps": -1}, "rewarm_steps = -1: expected 0 or more"),
    ],
)
def test_schedules_that_make_no_sense_are_refused(fields: dict[str, Any], word: str) -> None:
    with pytest.raises(RecipeError, match=word):
        TrainPart(**fields)


def test_momentum_rises_and_stays() -> None:
    assert momentum(PART, 0, 0) == PART.momentum_start
    assert momentum(PART, PART.momentum_warmup / 2, 1) == pytest.approx(0.945)
    assert momentum(PART, 0.9, 1) == PART.momentum


def test_momentum_falls_back_in_its_cool_down() -> None:
    part = replace(PART, momentum_cooldown=0.1)
    for p, expected in ((0.2, momentum(PART, 0.2, 1)), (0.9, 0.97), (0.95, 0.945), (1.0, 0.92)):
        assert momentum(part, p, 1) == pytest.approx(expected)
    by_steps = replace(part, momentum_warmup_steps=10)
    assert momentum(by_steps, 0.5, 5) == pytest.approx(0.945)
    assert momentum(by_steps, 0.95, 500) == pytest.approx(0.945)


def test_rates_fall_with_a_power_of_what_is_left() -> None:
    part = replace(PART, warmdown=0.8, warmdown_power=1.5, lr_floor=0.01)
    for p, left in ((0.0, 1.0), (0.2, 1.0), (0.6, 0.5), (0.8, 0.25)):
        assert lr_scale(part, p) == pytest.approx(left**1.5)
    assert lr_scale(part, 1.0) == 0.01
    # A step may begin a little after the end of the budget.
    assert lr_scale(part, 1.001) == 0.01
