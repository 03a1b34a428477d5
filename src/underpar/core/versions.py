"""What numbers were made with: versions and the device, in words."""

from __future__ import annotations

import platform

import torch

from underpar import __version__


def versions() -> dict[str, str]:
    """What the numbers were made with."""
    return {
        "underpar": __version__,
        "python": platform.python_version(),
        "torch": str(torch.__version__),
    }


def device_name(device: torch.device) -> str:
    """The device in words."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{device.type}, {torch.get_num_threads()} threads"
