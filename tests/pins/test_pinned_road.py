"""Losses, scores, JSON keys, names of files and the Python interface are those that are pinned."""

from pathlib import Path

import pytest
from pinned import TOLERANCE, differences, read_pinned
from road import Observed, observe_road, observe_slow

PINNED, PINNED_SLOW = read_pinned()["road"], read_pinned()["slow"]


@pytest.fixture(scope="module")
def road(tmp_path_factory: pytest.TempPathFactory) -> Observed:
    return observe_road(tmp_path_factory.mktemp("road"))


def test_losses_and_scores_are_the_pinned_ones(road: Observed) -> None:
    assert differences(PINNED["numbers"], road.numbers, TOLERANCE) == []


def test_commands_print_the_pinned_keys(road: Observed) -> None:
    assert differences(PINNED["keys"], road.keys) == []


def test_folders_hold_the_pinned_files(road: Observed) -> None:
    assert differences(PINNED["files"], road.files) == []


def test_the_python_interface_is_the_pinned_one(road: Observed) -> None:
    assert differences(PINNED["api"], road.api) == []


@pytest.mark.slow
def test_the_longer_commands_do_as_pinned(tmp_path: Path) -> None:
    observed = observe_slow(tmp_path)
    assert differences(PINNED_SLOW["numbers"], observed.numbers, TOLERANCE) == []
    assert differences(PINNED_SLOW["keys"], observed.keys) == []
    assert differences(PINNED_SLOW["files"], observed.files) == []
