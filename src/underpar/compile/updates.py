"""Functions that change their arguments in place, compiled to few kernels."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


def compile_in_place(function: Callable[..., None]) -> Callable[..., None]:
    """The function, compiled as one graph without tuning.

    Tuning tries several kernels. Each trial of a kernel that writes to its inputs begins with a
    copy of them: gigabytes for the adapters of all lanes.
    """
    options: dict[str, Any] = {"triton.autotune_pointwise": False}
    compiled: Callable[..., None] = torch.compile(function, fullgraph=True, options=options)
    return compiled
