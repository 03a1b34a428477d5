"""Start-up while torch compiles: the compiler's worker processes, and the GIL."""

from __future__ import annotations

import sys
import threading
from contextlib import suppress

from underpar.core.runtime import Runtime

# sys.setswitchinterval, in seconds, while torch compiles and otherwise. Every torch call releases
# the GIL. With the default of 5 ms, getting the GIL back from a busy thread dominates tracing: 9 s
# alone, 87 s beside a busy thread, 21 s with 0.5 ms. Step time does not change.
WARM_UP_INTERVAL, DEFAULT_INTERVAL = 0.0005, 0.005

# Cleared from `warm_compiler` until the compiler's workers have started.
_workers_started = threading.Event()
_workers_started.set()


def warm_compiler(runtime: Runtime) -> None:
    """If training compiles for a GPU, load the compiler and start its workers in a thread.

    torch's own backend does so. Another backend, such as ours, would start them at its first
    kernel, too late. From here to `end_warm_up` threads switch ten times as often.
    """
    if not runtime.compiled or runtime.device.type != "cuda":
        return
    sys.setswitchinterval(WARM_UP_INTERVAL)
    _workers_started.clear()

    def load() -> None:
        try:
            _start_workers()
        finally:
            _workers_started.set()
        # After the workers: they take longer to start than the compiler takes to load.
        _load_compiler()

    threading.Thread(target=load, name="warm compiler", daemon=True).start()


def _start_workers() -> None:
    from torch._inductor import async_compile

    # Not in every version.
    warm = getattr(async_compile, "maybe_warm_pool", None)
    if warm is not None:
        warm()


def _load_compiler() -> None:
    # First what the main thread would otherwise do itself at the same time: the key of all caches,
    # and Triton's driver, which a C compiler builds.
    from torch._inductor import codecache
    from torch._inductor.runtime import compile_tasks
    from torch.utils import _triton

    # Workers use torch's own assembler if there is one, and its version is part of a kernel's key.
    # Chosen here before the first key is made: this process then finds what workers compiled.
    same_assembler = getattr(compile_tasks, "_set_triton_ptxas_path", None)
    if same_assembler is not None:
        same_assembler()
    if hasattr(codecache, "CacheBase"):
        codecache.CacheBase.get_system()
    # Without a driver, the first kernel reports the error.
    with suppress(ImportError, RuntimeError):
        _triton.triton_hash_with_backend()
    from torch._inductor import compile_fx  # noqa: F401


def wait_for_workers() -> None:
    """If the compiler's workers are about to start, wait until they have.

    To start them torch reads all of its source, thousands of small files. A busy thread takes the
    GIL after each file: 13.5 s beside the first compilation of FlashAttention-4, at most 2.9 s
    without it.
    """
    _workers_started.wait()


def end_warm_up() -> None:
    """Everything is compiled: threads switch at the default interval again."""
    sys.setswitchinterval(DEFAULT_INTERVAL)
