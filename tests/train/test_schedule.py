"""Budgets and schedules as functions of progress."""

import pytest

from underpar.recipe import TrainPart
from underpar.train.schedule import lr_scale, momentum, progress

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


def test_momentum_rises_and_stays() -> None:
    assert momentum(PART, 0) == PART.momentum_start
    assert momentum(PART, PART.momentum_warmup / 2) == pytest.approx(0.945)
    assert momentum(PART, 0.9) == PART.momentum
