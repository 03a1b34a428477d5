"""The doctor's verdict: known figures, messages between ranks, what will run here."""

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

from underpar.core.runtime import Runtime
from underpar.stages import doctor

CPU = Runtime(torch.device("cpu"))
FACTS = {
    "matmul_gflops": 100.0,
    "threads": 2,
    "free_memory_gb": 8.0,
    "free_disk_gb": 100.0,
    "collective": "ok",
}


def verdict(runtime: Runtime = CPU, **facts: object) -> str:
    return "; ".join(doctor.judge_machine(runtime, FACTS | facts))


def test_two_ranks_add_up_their_numbers() -> None:
    assert doctor.try_collective(CPU).startswith("ok (2 ranks, gloo")


def test_ranks_that_cannot_talk_are_reported_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise RuntimeError("no interface\nand a trace")

    monkeypatch.setattr(dist, "ProcessGroupGloo", refuse)
    told = doctor.try_collective(CPU)
    assert told == "failed: no interface"
    assert "ranks cannot send messages" in verdict(collective=told)


def test_slow_cores_are_said_to_be_slow() -> None:
    assert verdict().startswith("as expected: 50 GFLOP/s per core")
    assert verdict(matmul_gflops=8.0).startswith("SLOW: 4 GFLOP/s per core")


def test_a_gpu_is_compared_with_its_data_sheet(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = replace(CPU, device=torch.device("cuda"), precision=torch.bfloat16)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "NVIDIA H200")
    fast = verdict(gpu, matmul_gflops=790e3, free_memory_gb=139.0)
    assert fast.startswith("fast: 80% of the 989 TFLOP/s") and "as they are" in fast
    slow = verdict(gpu, matmul_gflops=90e3, free_memory_gb=22.0, free_disk_gb=5.0)
    assert (
        slow.startswith("SLOW: 9%") and "smaller micro-batches" in slow and "5 GB of disk" in slow
    )
    assert "runs small recipes" in verdict(gpu, free_memory_gb=7.0)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "Some Other GPU")
    assert "no known figure" in verdict(gpu)
