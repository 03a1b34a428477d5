"""All candidates together."""

from collections.abc import Callable
from importlib import import_module

import pytest

from agreement import assert_trains_the_same

pytest.importorskip("triton")


@pytest.mark.slow
def test_a_network_of_all_candidates_trains_the_same() -> None:
    assert_trains_the_same(import_module("benchmarks.fusion_study.together"))


@pytest.mark.slow
def test_a_network_of_all_kernels_trains_the_same(interpreted: Callable[..., None]) -> None:
    interpreted(_train_interpreted)


def _train_interpreted() -> None:
    # Tiles have powers of two: heads of 16 channels.
    few = ("model.num_layers=3", "model.dim=64", "levers.loop=false", "levers.lanes=false")
    assert_trains_the_same(import_module("benchmarks.fusion_study.together"), overrides=few)
