"""Device, ranks, seeds, clock and environment variables.

Only this file reads and writes environment variables.
"""

from __future__ import annotations

import importlib.util
import math
import os
import random
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from underpar.errors import UnderparError

if TYPE_CHECKING:
    import torch


_IMPORTED = time.perf_counter()


_STAT, _MEMORY, _LOAD = (Path(f"/proc/{name}") for name in ("self/stat", "meminfo", "loadavg"))


def guard_cpu() -> None:
    """Settings of oneDNN and OpenMP that are read only once: call this before torch is imported.

    Some virtual CPUs announce AMX and do not run it: a bf16 product then ends the process with an
    illegal instruction. CPU work here is fp32, so the limit costs no speed.
    """
    os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE")
    if not {"OMP_WAIT_POLICY", "GOMP_SPINCOUNT"} & os.environ.keys() and is_machine_busy():
        os.environ["OMP_WAIT_POLICY"] = "passive"


def is_machine_busy(load: Path = _LOAD, samples: int = 3) -> bool:
    """True if other processes leave fewer idle cores than this process may use.

    OpenMP's threads wait for each other by spinning. That is the faster way on idle cores, and many
    times slower where another process needs the core that a spinning thread holds.
    """
    for _ in range(samples):
        try:
            num_running = int(load.read_text().split()[3].partition("/")[0])
        except (OSError, ValueError, IndexError):
            return False
        # This process is one of those that run.
        if (os.cpu_count() or 1) - (num_running - 1) >= num_cores():
            return False
        # A short wait, because many processes run for a moment only.
        time.sleep(0.003)
    return True


def keep_bytecode() -> None:
    """Store bytecode in the user's cache folder if Python cannot store it beside torch's source.

    In containers PYTHONDONTWRITEBYTECODE is often set, or packages are read-only. Every start then
    compiles thousands of modules: importing torch's compiler and FlashAttention-4 took 20 s
    instead of 8 s. The setting is passed on to the processes that this process starts.
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
    """Store the compiled kernels of FlashAttention-4 for the next start, as torch does."""
    folder = _caches() / "flash-attention-4"
    os.environ.setdefault("FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED", "1")
    os.environ.setdefault("FLASH_ATTENTION_CUTE_DSL_CACHE_DIR", str(folder))


def fix_matmul_workspace() -> None:
    """Let cuBLAS give the same bits in every process, as torch demands: before the first product.

    A process that has multiplied before keeps the workspace that it has.
    """
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")


def variable(name: str, default: str) -> str:
    """An environment variable: the contest's scripts take their paths and their seed from these."""
    return os.environ.get(name, default)


@dataclass(frozen=True)
class Runtime:
    """The device of this process, and which of the job's ranks it is."""

    device: torch.device
    rank: int = 0
    world: int = 1
    # Whether training and adaptation are compiled.
    compiled: bool = False
    # The precision of matrix products; by default bf16 on a CUDA GPU that has it, else fp32.
    precision: torch.dtype | None = None
    # What carries messages between ranks: an object with the collectives that `core/dist.py` calls.
    # None is torch.distributed.
    transport: Any = None

    @property
    def is_main(self) -> bool:
        """True on the rank that writes files and prints."""
        return self.rank == 0

    @property
    def dtype(self) -> torch.dtype:
        """The precision of matrix products."""
        import torch

        # Older GPUs (T4) only emulate bf16, slower than fp32. Their fp16 would need scaled losses.
        has_bf16 = self.device.type == "cuda" and torch.cuda.is_bf16_supported(
            including_emulation=False
        )
        return self.precision or (torch.bfloat16 if has_bf16 else torch.float32)

    @property
    def for_float64(self) -> Runtime:
        """The same device, or the CPU in place of one that lacks float64: packing needs it."""
        import torch

        return replace(self, device=torch.device("cpu")) if self.device.type == "mps" else self

    @property
    def for_probes(self) -> Runtime:
        """The same device for the audit's probes: not compiled, in fp32.

        A price then does not depend on the other tokens of its forward pass.
        """
        import torch

        return replace(self, compiled=False, precision=torch.float32)

    def synchronize(self) -> None:
        """Wait until the device has finished its work, so that a clock can be read."""
        import torch

        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


def open_runtime(device: str = "auto", compiled: bool | None = None) -> Runtime:
    """The runtime for a device ('auto', 'cpu', 'cuda', 'mps') and torchrun's variables.

    By default, `compiled` is true on a CUDA GPU only.
    """
    import torch

    rank = int(os.environ.get("RANK", "0"))
    world = int(os.environ.get("WORLD_SIZE", "1"))
    local = int(os.environ.get("LOCAL_RANK", "0"))
    available = {
        "cuda": torch.cuda.is_available(),
        "mps": torch.backends.mps.is_available(),
        "cpu": True,
    }
    if device == "auto":
        device = next(name for name, there in available.items() if there)
    if not available.get(device, False):
        usable = ", ".join(name for name, there in available.items() if there)
        raise UnderparError(f"device {device!r} is not available here; choose from {usable}")
    if device == "cuda":
        keep_kernels()
        torch.cuda.set_device(local)
    where = f"cuda:{local}" if device == "cuda" else device
    compiled = device == "cuda" if compiled is None else compiled
    return Runtime(torch.device(where), rank, world, compiled)


@contextmanager
def threads(number: int) -> Iterator[None]:
    """Set the number of torch's CPU threads inside the block."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(number)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def num_cores() -> int:
    """Processor cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def free_memory_bytes(device: torch.device) -> float:
    """Memory that a device can still give: of a GPU, or of this machine; infinity if unknown.

    Memory that torch keeps for its next tensors counts as free.
    """
    import torch

    if device.type == "cuda":
        kept = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return torch.cuda.mem_get_info(device)[0] + kept
    try:
        lines = _MEMORY.read_text().splitlines()
        return next(1024.0 * int(line.split()[1]) for line in lines if "MemAvailable" in line)
    except (OSError, StopIteration, ValueError, IndexError):
        return math.inf


def process_age_seconds() -> float:
    """Seconds since this process started; without /proc, since it imported this module."""
    if not _STAT.exists():
        return time.perf_counter() - _IMPORTED
    # Field 22 of proc(5) is the start in clock ticks after boot. The process name, field 2, is in
    # parentheses and may contain spaces, so fields are counted from the last ")".
    ticks = int(_STAT.read_text().rpartition(")")[2].split()[19])
    # Not /proc/uptime: in a container it may be the uptime of the container.
    return time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")


def seed_everything(seed: int) -> None:
    """Seed Python, numpy and torch."""
    import numpy
    import torch

    random.seed(seed)
    numpy.random.seed(seed % 2**32)
    torch.manual_seed(seed)


class Clock:
    """A clock with named phases: every second since its creation belongs to exactly one phase."""

    def __init__(self, first_phase: str = "start") -> None:
        self._phase = first_phase
        self._since = time.perf_counter()
        self._seconds: dict[str, float] = {}

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Count the time inside the block for phase `name`, then return to the phase before."""
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
        """Add the seconds of an earlier clock, such as that of a stopped run."""
        for name, spent in seconds.items():
            self._seconds[name] = self._seconds.get(name, 0.0) + spent

    def read(self) -> dict[str, float]:
        """Seconds of each phase so far. Without `add`, their sum is the age of the clock."""
        self._switch(self._phase)
        return dict(self._seconds)
