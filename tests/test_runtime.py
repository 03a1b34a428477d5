"""Runtime: the CPU guard, devices, seeds, and a clock whose phases add up."""

import os
import subprocess
import sys
import time

import pytest
import torch

from underpar.errors import UnderparError
from underpar.runtime import Clock, open_runtime, seed_everything


def test_the_guard_is_set_on_import() -> None:
    environment = {k: v for k, v in os.environ.items() if k != "ONEDNN_MAX_CPU_ISA"}
    code = (
        "import underpar, torch, os; a = torch.ones(64, 64, dtype=torch.bfloat16);"
        "print(os.environ['ONEDNN_MAX_CPU_ISA'], float((a @ a)[0, 0]))"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True
    )
    assert result.stdout.split() == ["AVX512_CORE", "64.0"]


def test_an_unknown_device_is_refused_with_the_choices() -> None:
    with pytest.raises(UnderparError, match=r"'tpu'.*cpu"):
        open_runtime("tpu")


def test_ranks_come_from_torchrun(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setenv("WORLD_SIZE", "4")
    runtime = open_runtime("cpu")
    assert (runtime.rank, runtime.world, runtime.is_main) == (3, 4, False)


def test_seeds_repeat() -> None:
    seed_everything(5)
    first = torch.rand(3)
    seed_everything(5)
    assert torch.equal(first, torch.rand(3))


def test_every_second_has_a_name() -> None:
    before = time.perf_counter()
    clock = Clock("start")
    with clock.phase("a"), clock.phase("b"):
        time.sleep(0.01)
    with pytest.raises(KeyError), clock.phase("a"):
        raise KeyError
    seconds = clock.read()
    after = time.perf_counter()
    assert set(seconds) == {"start", "a", "b"}
    assert seconds["b"] >= 0.01
    assert sum(seconds.values()) <= after - before
