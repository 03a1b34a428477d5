"""All candidates together."""

from collections.abc import Callable
from importlib import import_module
from pathlib import Path

import pytest
import torch

from agreement import assert_trains_the_same
from underpar.errors import BenchError
from underpar.lab.candidates import Candidate

pytest.importorskip("triton")


def test_parts_that_fail_their_checks_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(device: torch.device) -> None:
        raise BenchError("output 0 differs")

    parts = [
        Candidate(Path("first.py"), check=wrong),
        Candidate(Path("second.py")),
        Candidate(Path("third.py"), check=wrong),
    ]
    together = import_module("benchmarks.fusion_study.together")
    monkeypatch.setattr(together, "PARTS", parts)
    with pytest.raises(BenchError, match=r"first: output 0 differs; third: output 0 differs$"):
        together.check(torch.device("cpu"))
    monkeypatch.setattr(together, "PARTS", parts[1:2])
    together.check(torch.device("cpu"))


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
