"""What numbers were made with: versions of packages, and the device in words."""

from __future__ import annotations

import platform
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

from underpar import __version__


def versions(*names: str) -> dict[str, str]:
    """Versions of this package, Python and torch, or of the packages that are named."""
    return {name: version_of(name) for name in names or ("underpar", "python", "torch")}


def version_of(name: str) -> str:
    """The version of one package."""
    if name == "python":
        return platform.python_version()
    if name == "underpar":
        return __version__
    if name == "torch":
        return str(torch.__version__)
    try:
        return version(name.replace("_", "-"))
    except PackageNotFoundError:
        return "not installed"


def device_name(device: torch.device) -> str:
    """The device in words."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{device.type}, {torch.get_num_threads()} threads"


def processor_name() -> str:
    """The model of the processor, and the instructions that torch uses on it."""
    file = Path("/proc/cpuinfo")
    lines = file.read_text().splitlines() if file.exists() else []
    models = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    model = next(models, platform.processor() or platform.machine())
    return f"{model}, {torch.backends.cpu.get_cpu_capability()}"
