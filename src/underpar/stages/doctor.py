"""What this machine can do: versions, device, attention, speeds, messages between ranks, a verdict.

The speeds are compared with known ones: of GPUs with the makers' data sheets, of CPUs with what
cores of the last ten years reach.
"""

from __future__ import annotations

import platform
import shutil
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.cuda import comm

from underpar.core.runtime import Runtime, free_memory_bytes, is_machine_busy
from underpar.core.versions import device_name, version_of, versions
from underpar.kernels.attention import available
from underpar.train.meter import best_seconds, matmul_flops, peak_flops

# Products of 1024 x 1024 matrices in fp32 on one core, GFLOP/s: from old laptops to AVX-512.
CORE_GFLOPS = (15.0, 200.0)
# The share of its data sheet that a GPU in order reaches in products of 8192 x 8192 matrices.
GOOD_SHARE = 0.6
# What full-size recipes take: PR 2014's script has 42 GB allocated at 98,304 tokens a micro-batch.
FULL_SIZE_BYTES, HALF_SIZE_BYTES = 46e9, 14e9
# A data folder, checkpoints and weights of a full-size run.
FULL_SIZE_DISK_BYTES = 20e9

OPTIONAL = {
    "scipy": "comparing seeds",
    "zstandard": "reading .zst text",
    "constriction": "cross-checking the coders in tests",
    "flash_attn_4": "faster attention on Hopper",
    "triton": "GPU kernels",
    "pytest": "running the tests",
}


def diagnose(runtime: Runtime) -> dict[str, Any]:
    """All facts as plain values for JSON."""
    device, gflops = runtime.device, matmul_flops(runtime) / 1e9
    facts = {
        **versions("python"),
        "system": f"{platform.system()} {platform.machine()}",
        "packages": versions("torch", "numpy", "sentencepiece"),
        "optional": {name: f"{version_of(name)} ({use})" for name, use in OPTIONAL.items()},
        "device": _describe_device(device),
        "ranks": runtime.world,
        "threads": torch.get_num_threads(),
        "attention": available(device, runtime.dtype),
        "matmul_gflops": round(gflops, 1),
        "copy_gb_per_second": round(copy_speed(runtime), 1),
        "free_memory_gb": round(free_memory_bytes(device) / 1e9, 1),
        "free_disk_gb": round(shutil.disk_usage(Path.cwd()).free / 1e9, 1),
        "collective": try_collective(runtime),
    }
    return facts | {"verdict": judge_machine(runtime, facts)}


def judge_machine(runtime: Runtime, facts: dict[str, Any]) -> list[str]:
    """What the facts mean: what can run here, and what is not as it should be."""
    is_gpu = runtime.device.type == "cuda"
    lines = [_judge_gpu_speed(runtime, facts) if is_gpu else _judge_core_speed(facts)]
    if not is_gpu and is_machine_busy():
        lines.append("other processes use this machine: budgets in seconds buy fewer steps")
    free, disk = 1e9 * facts["free_memory_gb"], 1e9 * facts["free_disk_gb"]
    if not is_gpu:
        lines.append("runs the demo and small recipes; full-size recipes need a GPU")
    elif free >= FULL_SIZE_BYTES:
        lines.append("runs the full-size recipes as they are")
    elif free >= HALF_SIZE_BYTES:
        lines.append("runs the full-size recipes with smaller micro-batches, which train finds")
    else:
        lines.append(f"runs small recipes: {free / 1e9:.0f} GB free are too few for full-size ones")
    if disk < FULL_SIZE_DISK_BYTES:
        lines.append(f"{disk / 1e9:.0f} GB of disk are free: a full-size run may take 20 GB")
    if not facts["collective"].startswith("ok"):
        lines.append("ranks cannot send messages: train with one process")
    return lines


def _judge_gpu_speed(runtime: Runtime, facts: dict[str, Any]) -> str:
    peak = peak_flops(runtime.device)
    if peak is None or runtime.dtype != torch.bfloat16:
        return f"{facts['matmul_gflops']:,.0f} GFLOP/s; no known figure to compare with"
    share = 1e9 * facts["matmul_gflops"] / peak
    told = f"{share:.0%} of the {peak / 1e12:.0f} TFLOP/s of its data sheet"
    return f"fast: {told}" if share >= GOOD_SHARE else f"SLOW: {told}; is it shared, or too hot?"


def _judge_core_speed(facts: dict[str, Any]) -> str:
    per_core, (low, high) = facts["matmul_gflops"] / facts["threads"], CORE_GFLOPS
    told = f"{per_core:.0f} GFLOP/s per core, usual are {low:.0f} to {high:.0f}"
    return f"as expected: {told}" if per_core >= low else f"SLOW: {told}; is another process busy?"


def try_collective(runtime: Runtime) -> str:
    """Whether ranks on this machine can add up numbers: two over gloo, or all of several GPUs."""
    num_gpus = torch.cuda.device_count() if runtime.device.type == "cuda" else 0
    started = time.perf_counter()
    try:
        if num_gpus > 1:
            ones = [torch.ones(1024, device=f"cuda:{i}") for i in range(num_gpus)]
            total, want, ranks = comm.reduce_add(ones), num_gpus, f"{num_gpus} GPUs"
        else:
            total, want, ranks = _add_over_gloo(), 2, "2 ranks, gloo"
    except (RuntimeError, AttributeError) as error:
        return f"failed: {str(error).splitlines()[0]:.200}"
    if not bool((total == want).all()):
        return f"failed: the sum over {ranks} is wrong"
    return f"ok ({ranks}, {1000 * (time.perf_counter() - started):.0f} ms)"


def _add_over_gloo() -> torch.Tensor:
    """The sum of a one from each of two ranks, which are threads of this process."""
    store = dist.HashStore()

    def rank(number: int) -> torch.Tensor:
        group: Any = dist.ProcessGroupGloo(store, number, 2, timedelta(seconds=20))
        ones = torch.ones(1024)
        group.allreduce([ones]).wait()
        return ones

    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(rank, range(2)))[1]


def _describe_device(device: torch.device) -> str:
    """The device's name with its memory, or with the vector instructions that torch uses."""
    if device.type == "cuda":
        memory = torch.cuda.get_device_properties(device).total_memory / 1e9
        return f"{device_name(device)}, {memory:.0f} GB"
    return f"{device.type} ({torch.backends.cpu.get_cpu_capability()})"


def copy_speed(runtime: Runtime) -> float:
    """GB/s, read plus written, of a copy on the device."""
    size = 1 << (30 if runtime.device.type == "cuda" else 26)
    # Zeros may move faster than data.
    a = torch.rand(size // 4, device=runtime.device)
    b = torch.empty_like(a)
    return 2 * size / best_seconds(lambda: b.copy_(a), runtime) / 1e9
