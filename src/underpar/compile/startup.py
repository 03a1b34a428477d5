"""Start-up while torch compiles: the compiler's workers, and turns of threads."""

from __future__ import annotations

import sys
import threading
from contextlib import suppress
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    pass


from underpar.core.runtime import Runtime

# Seconds for which a thread keeps the interpreter from others that wait. With the usual ones a
# thread that leaves it for an operation of torch may wait so long to come back: beside a busy one,
# tracing a model took 87 s instead of 9, and takes 21 with short turns. A step gains nothing.
SHORT_TURN, USUAL_TURN = 0.0005, 0.005


# Cleared while the compiler's workers are about to start.
_workers_started = threading.Event()
_workers_started.set()


def warm_compiler(runtime: Runtime) -> None:
    """Where training compiles for a GPU, load the compiler and start its workers on the side.

    torch's own backend does so; another's would first miss them at its first kernel. Threads take
    short turns from here to `end_warm_up`.
    """
    if not runtime.compiled or runtime.device.type != "cuda":
        return
    sys.setswitchinterval(SHORT_TURN)
    _workers_started.clear()

    def load() -> None:
        try:
            _start_workers()
        finally:
            _workers_started.set()
        # Later: workers take longer to start than this to load.
        _load_compiler()

    threading.Thread(target=load, name="warm compiler", daemon=True).start()


def _start_workers() -> None:
    from torch._inductor import async_compile

    # Not in every version.
    warm = getattr(async_compile, "maybe_warm_pool", None)
    if warm is not None:
        warm()


def _load_compiler() -> None:
    # First what the main thread would not wait for but do too: the key of all caches, and Triton's
    # driver, which a C compiler builds.
    from torch._inductor import codecache
    from torch._inductor.runtime import compile_tasks
    from torch.utils import _triton

    # Workers use torch's own assembler, if there is one, and its version is part of a kernel's key:
    # chosen here too before the first key, so that what one compiles the other finds.
    same_assembler = getattr(compile_tasks, "_set_triton_ptxas_path", None)
    if same_assembler is not None:
        same_assembler()
    if hasattr(codecache, "CacheBase"):
        codecache.CacheBase.get_system()
    # Where there is no driver, the first kernel says so.
    with suppress(ImportError, RuntimeError):
        _triton.triton_hash_with_backend()
    from torch._inductor import compile_fx  # noqa: F401


def wait_for_workers() -> None:
    """Where the compiler's workers are about to start, wait until they do.

    Before that torch reads all of its source, thousands of small files, and a busy thread takes its
    turn after each: 13.5 s beside the first compilation of FlashAttention-4, at most 2.9 without.
    """
    _workers_started.wait()


def end_warm_up() -> None:
    """All is compiled: threads take their usual turns again."""
    sys.setswitchinterval(USUAL_TURN)
