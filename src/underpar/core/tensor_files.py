"""Tensors with a description in a safetensors file, which runs no code when it is read."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from underpar.core.run_folder import write_atomic
from underpar.errors import RunError


def save_tensors(path: Path, tensors: Mapping[str, Tensor], about: Mapping[str, object]) -> None:
    """Write tensors and a description for JSON, whole or not at all."""
    plain = {name: t.detach().cpu().contiguous() for name, t in tensors.items()}
    write_atomic(path, save(plain, metadata={"about": json.dumps(dict(about))}))


def read_tensors(path: Path) -> tuple[dict[str, Tensor], dict[str, object]]:
    """The tensors and the description that `save_tensors` wrote."""
    try:
        with safe_open(str(path), framework="pt") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            about = json.loads((file.metadata() or {})["about"])
    except (SafetensorError, KeyError, ValueError, OSError) as error:
        raise RunError(f"{path} cannot be read ({error}); train again or restore it") from error
    return tensors, about


def read_about(path: Path) -> dict[str, object]:
    """Only the description that `save_tensors` wrote."""
    try:
        with safe_open(str(path), framework="pt") as file:
            about: dict[str, object] = json.loads((file.metadata() or {})["about"])
    except (SafetensorError, KeyError, ValueError, OSError) as error:
        raise RunError(f"{path} cannot be read ({error}); make it again or restore it") from error
    return about
