"""The machine as the package sees it: device, ranks, seed, clock.

Only this file reads the environment.
"""

from __future__ import annotations

import importlib.util
import os
import random
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from underpar.errors import UnderparError

if TYPE_CHECKING:
    import torch

# Seconds for which a thread keeps the interpreter from others that wait. With the usual ones a
# thread that leaves it for an operation of torch may wait so long to come back: beside a busy one,
# tracing a model took 87 s instead of 9, and takes 21 with short turns. A step gains nothing.
SHORT_TURN, USUAL_TURN = 0.0005, 0.005

_IMPORTED = time.perf_counter()
_STAT = Path("/proc/self/stat")
# Cleared while the compiler's workers are about to start.
_workers_started = threading.Event()
_workers_started.set()


def guard_cpu() -> None:
    """Cap oneDNN's instruction set before its first op.

    On some virtual CPUs oneDNN trusts an AMX flag that the machine does not honour, and bf16
    products end in an illegal instruction. CPU work here is fp32, so the cap costs nothing.
    """
    os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE")


def keep_bytecode() -> None:
    """Where Python can keep no bytecode of torch beside its source, keep it with other caches.

    Containers often say PYTHONDONTWRITEBYTECODE, or hold packages that may not be written to. Then
    every start compiles thousands of modules again: torch's compiler and FlashAttention-4 took 20 s
    to import instead of 8. Processes that this one starts do the same.
    """
    torch = importlib.util.find_spec("torch")
    if torch is None or torch.origin is None:
        return
    folder = Path(torch.origin).parent
    may_write = not sys.dont_write_bytecode and os.access(folder, os.W_OK)
    if sys.pycache_prefix is None and (may_write or (folder / "__pycache__").is_dir()):
        return
    sys.pycache_prefix = sys.pycache_prefix or str(_caches() / "bytecode")
    sys.dont_write_bytecode = False
    os.environ["PYTHONPYCACHEPREFIX"] = sys.pycache_prefix
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)


def _caches() -> Path:
    return Path.home() / ".cache" / "underpar"


def keep_kernels() -> None:
    """Have FlashAttention-4 keep compiled kernels from one start to the next, as torch does."""
    folder = _caches() / "flash-attention-4"
    os.environ.setdefault("FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED", "1")
    os.environ.setdefault("FLASH_ATTENTION_CUTE_DSL_CACHE_DIR", str(folder))


@dataclass(frozen=True)
class Runtime:
    """Where this process computes and which share of the job is its own."""

    device: torch.device
    rank: int = 0
    world: int = 1
    compiled: bool = False
    """Whether training and adapting compile their graphs."""
    full_precision: bool = False
    """Whether products run in fp32 on a GPU too."""

    @property
    def is_main(self) -> bool:
        """True on the rank that writes files and prints."""
        return self.rank == 0

    @property
    def dtype(self) -> torch.dtype:
        """The precision that products run in."""
        import torch

        half = self.device.type == "cuda" and not self.full_precision
        return torch.bfloat16 if half else torch.float32

    @property
    def for_probes(self) -> Runtime:
        """The same where prices are compared: plain, and precise whatever shares a pass."""
        return replace(self, compiled=False, full_precision=True)

    def synchronize(self) -> None:
        """Wait for the device, so that a clock reads finished work."""
        import torch

        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


def open_runtime(device: str = "auto", compiled: bool | None = None) -> Runtime:
    """Runtime from torchrun's variables and the wanted device ('auto', 'cpu', 'cuda', 'mps').

    Unless said, a GPU compiles and nothing else does.
    """
    import torch

    rank = int(os.environ.get("RANK", "0"))
    world = int(os.environ.get("WORLD_SIZE", "1"))
    local = int(os.environ.get("LOCAL_RANK", "0"))
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    available = {
        "cpu": True,
        "cuda": torch.cuda.is_available(),
        "mps": torch.backends.mps.is_available(),
    }
    if not available.get(device, False):
        usable = ", ".join(name for name, there in available.items() if there)
        raise UnderparError(f"device {device!r} is not available here; choose from {usable}")
    if device == "cuda":
        keep_kernels()
        torch.cuda.set_device(local)
    where = f"cuda:{local}" if device == "cuda" else device
    compiled = device == "cuda" if compiled is None else compiled
    return Runtime(torch.device(where), rank, world, compiled)


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


@contextmanager
def threads(number: int) -> Iterator[None]:
    """Let torch use exactly this many CPU threads inside the block."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(number)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def num_cores() -> int:
    """Processor cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def process_age_seconds() -> float:
    """Seconds since this process began; where the system does not tell, since it imported this."""
    if not _STAT.exists():
        return time.perf_counter() - _IMPORTED
    # Field 22, proc(5): the start in ticks after the boot. The name before it may hold anything.
    ticks = int(_STAT.read_text().rpartition(")")[2].split()[19])
    # Not /proc/uptime, which may be that of a container.
    return time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")


def seed_everything(seed: int) -> None:
    """Seed Python, numpy and torch."""
    import numpy
    import torch

    random.seed(seed)
    numpy.random.seed(seed % 2**32)
    torch.manual_seed(seed)


class Clock:
    """A phase clock: every second since it was made belongs to exactly one named phase."""

    def __init__(self, first_phase: str = "start") -> None:
        self._phase = first_phase
        self._since = time.perf_counter()
        self._seconds: dict[str, float] = {}

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Charge the time inside the block to `name`, then return to the phase before."""
        before = self._switch(name)
        try:
            yield
        finally:
            self._switch(before)

    def _switch(self, name: str) -> str:
        now = time.perf_counter()
        before = self._phase
        self._seconds[before] = self._seconds.get(before, 0.0) + now - self._since
        self._phase, self._since = name, now
        return before

    def add(self, seconds: Mapping[str, float]) -> None:
        """Count what another clock read before this one was made, too."""
        for name, spent in seconds.items():
            self._seconds[name] = self._seconds.get(name, 0.0) + spent

    def read(self) -> dict[str, float]:
        """Seconds of each phase so far; their sum is the age of the clock."""
        self._switch(self._phase)
        return dict(self._seconds)
