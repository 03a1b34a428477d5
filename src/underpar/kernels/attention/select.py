"""Chooses the backend of attention by trying each on a small pack; an import proves nothing."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import cache
from itertools import accumulate

import torch
from torch import Tensor

from underpar.errors import UnderparError
from underpar.kernels.attention.backend import Backend, Pieces, Saved
from underpar.kernels.attention.fa4 import compiler_errors
from underpar.kernels.attention.grids import SDPA
from underpar.kernels.attention.reference import REFERENCE
from underpar.kernels.attention.table import BACKENDS, find_backend

# What a backend may raise if it cannot be used: no package, no library, a kernel for other devices,
# a release that takes other arguments.
EXPECTED: tuple[type[Exception], ...] = (
    ImportError,
    OSError,
    RuntimeError,
    TypeError,
    ValueError,
    AttributeError,
    AssertionError,
)

# Lengths of pieces: one token, none, several blocks of a kernel, a part of a block.
PROBE_LENGTHS = (1, 0, 300, 37)
PROBE_WINDOWS = (0, 5)
HEAD_DIM = 64
# A relative error: rounding stays below it, and any wrong mask is above it.
TOLERANCE = 0.02

# Held while backends are tried; another thread that needs the choice waits.
_trial = threading.RLock()
# What was asked for, and the backend that was chosen, with and without windows, by the width of a
# head: not every backend has kernels for every width.
_wishes: dict[tuple[torch.device, torch.dtype], str] = {}
_choices: dict[tuple[torch.device, torch.dtype, bool, int], str] = {}


def available(device: torch.device, dtype: torch.dtype) -> dict[str, str]:
    """Each backend, with "yes" or one line that says why not. Kernels may compile for seconds."""
    return {name: _probe(name, _placed(device), dtype, windowed=True) for name in BACKENDS}


def choose(
    name: str,
    device: torch.device,
    dtype: torch.dtype,
    windowed: bool = False,
    head_dim: int = HEAD_DIM,
) -> str:
    """The backend called `name`; for "auto" the first of the table that works.

    Windows are only tried if `windowed`: they have kernels of their own, which compile for seconds.
    """
    device = _placed(device)
    if name == "auto":
        return next(n for n in BACKENDS if _is_first(n, device, dtype, windowed, head_dim))
    answer = _probe(find_backend(name).name, device, dtype, windowed, head_dim)
    if answer == "yes":
        return name
    usable = [other for other, text in available(device, dtype).items() if text == "yes"]
    raise UnderparError(
        f"attention backend {name!r} does not work on {device} in {dtype} ({answer}); "
        f"use one of {', '.join(['auto', *usable])}"
    )


def _is_first(
    name: str, device: torch.device, dtype: torch.dtype, windowed: bool, head_dim: int
) -> bool:
    # Part of torch, on every device: nothing to try, nothing to wait for.
    if name == SDPA.name:
        return True
    return not BACKENDS[name].by_name and _probe(name, device, dtype, windowed, head_dim) == "yes"


def set_backend(name: str, device: torch.device, dtype: torch.dtype) -> str:
    """Choose the backend of this device and precision for the rest of the process; returns it.

    Do not call this between a forward pass and its backward pass.
    """
    place = _placed(device), dtype
    with _trial:
        chosen = choose(name, device, dtype)
        _wishes[place] = name
        for key in [key for key in _choices if key[:2] == place]:
            del _choices[key]
        _choices[*place, False, HEAD_DIM] = chosen
    return chosen


def set_backend_aside(
    device: torch.device, dtype: torch.dtype, first: Callable[[], None] = lambda: None
) -> None:
    """Choose "auto" in a thread, because trying backends on a GPU compiles for seconds.

    The thread calls `first` before it begins. If attention runs earlier, the choice is made then.
    """
    if device.type != "cuda":
        set_backend("auto", device, dtype)
        return

    def choose_there() -> None:
        first()
        # Each thread has its own current device.
        with torch.cuda.device(device):
            set_backend("auto", device, dtype)

    # Not a daemon: a process that ends while kernels compile might crash.
    threading.Thread(target=choose_there, name="trial of attention").start()


def backend_of(
    device: torch.device, dtype: torch.dtype, windowed: bool = False, head_dim: int = HEAD_DIM
) -> str:
    """The chosen backend of a device and precision; chosen now if it was not chosen before."""
    # A meta tensor has no values, so no backend can be tried.
    if device.type == "meta":
        return REFERENCE.name
    place = _placed(device), dtype
    key = (*place, windowed, head_dim)
    if key not in _choices:
        with _trial:
            _choices[key] = choose(_wishes.get(place, "auto"), *key)
    return _choices[key]


def _placed(device: torch.device) -> torch.device:
    if device.type == "cuda" and device.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return device


@cache
def _probe(
    name: str, device: torch.device, dtype: torch.dtype, windowed: bool, head_dim: int = HEAD_DIM
) -> str:
    backend = find_backend(name)
    if reason := backend.refuse(device, dtype):
        return reason
    expected = EXPECTED + compiler_errors()
    try:
        # The caller may be in inference mode, whose tensors cannot have gradients.
        with torch.inference_mode(False):
            windows = PROBE_WINDOWS if windowed else PROBE_WINDOWS[:1]
            return _try(backend, device, dtype, windows, head_dim)
    except expected as error:
        first = str(error).strip().partition("\n")[0]
        return f"{type(error).__name__}: {first[:160]}"


def _try(
    backend: Backend,
    device: torch.device,
    dtype: torch.dtype,
    windows: tuple[int, ...],
    head_dim: int,
) -> str:
    cu = torch.tensor([0, *accumulate(PROBE_LENGTHS)], dtype=torch.int32, device=device)
    # Its own generator, so that the global random numbers stay the same.
    source = torch.Generator().manual_seed(0)
    num = sum(PROBE_LENGTHS)
    grad, q, k, v = (
        torch.randn(num, heads, head_dim, generator=source).to(device, dtype)
        for heads in (4, 4, 2, 2)
    )
    for window in windows:
        pieces = Pieces(cu, max(PROBE_LENGTHS), window)
        expected = _run(REFERENCE, (grad, q, k, v), pieces)
        for got, want in zip(_run(backend, (grad, q, k, v), pieces), expected, strict=True):
            wrong = got.cpu().double() - want.cpu().double()
            error = float(wrong.norm() / want.cpu().double().norm())
            # Not "error > TOLERANCE", which is false for NaN.
            if not error <= TOLERANCE:
                return f"wrong results: relative error {error:.2g} with a window of {window}"
    return "yes"


def _run(
    backend: Backend, tensors: tuple[Tensor, Tensor, Tensor, Tensor], pieces: Pieces
) -> list[Tensor]:
    grad, q, k, v = tensors
    # In the modes in which the operator calls a backend.
    with torch.no_grad(), torch.autocast(grad.device.type, enabled=False):
        out, lse = backend.forward(q, k, v, pieces)
        return [out, *backend.backward(grad, Saved(q, k, v, out, lse), pieces)]
