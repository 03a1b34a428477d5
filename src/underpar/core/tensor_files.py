"""Tensors with a description in a safetensors file, which runs no code when it is read.

A file holds a SHA-256 of its description and of every tensor's name, type, shape and bytes. It is
compared each time the file is read, so that a damaged file never becomes another model.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from underpar.core.fields import reading
from underpar.core.makers import again
from underpar.core.run_folder import write_atomic
from underpar.errors import RunError

# Metadata is one text, because safetensors writes several in any order. Files without a checksum,
# of older versions, have the description under another key.
CHECKED, UNCHECKED = "checked", "about"


def save_tensors(path: Path, tensors: Mapping[str, Tensor], about: Mapping[str, object]) -> None:
    """Write tensors and a description for JSON, whole or not at all."""
    plain = {name: t.detach().cpu().contiguous() for name, t in tensors.items()}
    description = json.loads(json.dumps(dict(about)))
    text = json.dumps({"sha256": _digest(plain, description), "about": description})
    write_atomic(path, save(plain, metadata={CHECKED: text}))


def read_tensors(
    path: Path, may_lack_checksum: bool = False
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The tensors and the description that `save_tensors` wrote; other values are refused.

    With `may_lack_checksum`, files of versions that stored none are read too.
    """
    remedy = f"{again(path)} or restore it"
    with reading(path, remedy, SafetensorError):
        with safe_open(str(path), framework="pt") as file:
            metadata = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        if CHECKED in metadata:
            stored = json.loads(metadata[CHECKED])
            if stored["sha256"] != _digest(tensors, stored["about"]):
                raise RunError(f"{path} is damaged: its checksum is wrong; {remedy}")
            about = stored["about"]
        elif may_lack_checksum:
            about = json.loads(metadata[UNCHECKED])
        elif UNCHECKED in metadata:
            raise RunError(f"{path} has no checksum: an older version wrote it; {remedy}")
        else:
            raise RunError(f"{path} was not written by underpar: it has no description; {remedy}")
        if not isinstance(about, dict):
            raise TypeError("its description is no JSON object")
        for name, tensor in tensors.items():
            if _is_exotic(tensor.dtype):
                raise RunError(
                    f"{path}: {name!r:.80} is {tensor.dtype}, which no stage writes; {remedy}"
                )
    return tensors, about


def _is_exotic(dtype: torch.dtype) -> bool:
    """Complex numbers and floats of 8 bits or fewer: torch has no arithmetic for some of them."""
    return dtype.is_complex or (dtype.is_floating_point and dtype.itemsize < 2)


def read_about(path: Path, may_lack_checksum: bool = False) -> dict[str, Any]:
    """Only the description that `save_tensors` wrote; the whole file is checked all the same."""
    return read_tensors(path, may_lack_checksum)[1]


def require_shapes(
    path: Path, tensors: Mapping[str, Tensor], shapes: Mapping[str, Sequence[int]], remedy: str
) -> None:
    """Refuse tensors other than finite floating-point ones of these names and shapes."""
    if names := sorted(tensors.keys() ^ shapes.keys()):
        problem = "lacks" if names[0] in shapes else "has an unknown"
        raise RunError(f"{path} {problem} tensor {names[0]!r:.80}; {remedy}")
    for name, shape in shapes.items():
        tensor = tensors[name]
        if tensor.shape != torch.Size(shape) or not tensor.is_floating_point():
            kind = f"{tensor.dtype} of shape {tuple(tensor.shape)}"
            raise RunError(f"{path}: {name} is {kind}, expected floats {tuple(shape)}; {remedy}")
        # In fp32, because the smallest floating-point types have no test of their own.
        if not tensor.float().isfinite().all():
            raise RunError(f"{path}: {name} holds a value that is not finite; {remedy}")


def _digest(tensors: Mapping[str, Tensor], about: object) -> str:
    """SHA-256 of values as JSON has them, and of tensors in the order of their names."""
    digest = hashlib.sha256(json.dumps(about).encode())
    for name, tensor in sorted(tensors.items()):
        digest.update(f"\n{name!r} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        digest.update(raw_bytes(tensor))
    return digest.hexdigest()


def raw_bytes(tensor: Tensor) -> memoryview:
    """The values of a tensor as they lie in memory, in the order of its indices."""
    # A view as bytes needs a stride of 1, and a contiguous tensor of one number may have any.
    flat = tensor.detach().cpu().contiguous().as_strided((tensor.numel(),), (1,))
    return flat.view(torch.uint8).numpy().data
