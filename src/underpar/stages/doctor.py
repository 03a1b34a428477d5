"""What this machine can do: versions, device, attention backends, two speeds."""

from __future__ import annotations

import platform
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from underpar.core.runtime import Runtime
from underpar.core.versions import device_name, version_of, versions
from underpar.kernels.attention import available

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
    device = runtime.device
    return {
        **versions("python"),
        "system": f"{platform.system()} {platform.machine()}",
        "packages": versions("torch", "numpy", "sentencepiece"),
        "optional": {name: f"{version_of(name)} ({use})" for name, use in OPTIONAL.items()},
        "device": _describe_device(device),
        "ranks": runtime.world,
        "threads": torch.get_num_threads(),
        "attention": available(device, runtime.dtype),
        "matmul_gflops": round(matmul_speed(runtime), 1),
        "copy_gb_per_second": round(copy_speed(runtime), 1),
        "free_disk_gb": round(shutil.disk_usage(Path.cwd()).free / 1e9, 1),
    }


def _describe_device(device: torch.device) -> str:
    """The device's name with its memory, or with the vector instructions that torch uses."""
    if device.type == "cuda":
        memory = torch.cuda.get_device_properties(device).total_memory / 1e9
        return f"{device_name(device)}, {memory:.0f} GB"
    return f"{device.type} ({torch.backends.cpu.get_cpu_capability()})"


def matmul_speed(runtime: Runtime) -> float:
    """GFLOP/s of one product of square matrices, in the precision of training."""
    size = 8192 if runtime.device.type == "cuda" else 1024
    a = torch.randn(size, size, dtype=runtime.dtype, device=runtime.device)
    return 2 * size**3 / _best_seconds(lambda: a @ a, runtime) / 1e9


def copy_speed(runtime: Runtime) -> float:
    """GB/s, read plus written, of a copy on the device."""
    size = 1 << (30 if runtime.device.type == "cuda" else 26)
    a = torch.zeros(size // 4, device=runtime.device)
    b = torch.empty_like(a)
    return 2 * size / _best_seconds(lambda: b.copy_(a), runtime) / 1e9


def _best_seconds(work: Callable[[], object], runtime: Runtime) -> float:
    best = float("inf")
    for _ in range(5):
        runtime.synchronize()
        started = time.perf_counter()
        work()
        runtime.synchronize()
        best = min(best, time.perf_counter() - started)
    return best
