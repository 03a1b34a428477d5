"""Clocks, power and throttling of the GPU while a block is timed, read by nvidia-smi."""

from __future__ import annotations

import shutil
import subprocess
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

_QUERY = "clocks.sm,clocks.mem,power.draw,temperature.gpu,clocks_throttle_reasons.active"
# Single readings of a power-limited clock vary by some percent, so a block needs many.
_PERIOD_MILLISECONDS = 50
_TIMEOUT_SECONDS = 30


@dataclass(frozen=True)
class ClockSample:
    """Means over the readings during one block; None if the GPU does not report the value.

    `throttle_flags` is the union of all clock event reasons (NVML bit mask).
    """

    num_readings: int
    sm_mhz: float | None
    memory_mhz: float | None
    power_watts: float | None
    temperature_celsius: float | None
    throttle_flags: int


def start_clock_sample() -> Callable[[], ClockSample | None]:
    """Start reading the current GPU; the returned function stops and gives the means.

    It gives None without a GPU in use, without nvidia-smi, or without a single reading.
    """
    process = _start_readings()
    return (lambda: None) if process is None else lambda: parse_clock_sample(_stop(process))


@contextmanager
def clock_log() -> Iterator[Callable[[], Callable[[], ClockSample | None]]]:
    """Inside, the GPU is read all the time; gives what takes the place of `start_clock_sample`.

    nvidia-smi takes longer to start than a short block lasts. Here it is started once.
    """
    process = _start_readings()
    if process is None or process.stdout is None:
        yield lambda: lambda: None
        return
    lines: list[str] = []
    thread = threading.Thread(target=lines.extend, args=(process.stdout,), daemon=True)
    thread.start()

    def start_sample() -> Callable[[], ClockSample | None]:
        first = len(lines)
        return lambda: parse_clock_sample("".join(lines[first:]))

    try:
        yield start_sample
    finally:
        process.terminate()
        process.wait(_TIMEOUT_SECONDS)
        thread.join(_TIMEOUT_SECONDS)


def _start_readings() -> subprocess.Popen[str] | None:
    """A process that prints readings until it is stopped; None if there is nothing to read."""
    program = shutil.which("nvidia-smi")
    # A process that does not use the GPU has nothing to measure there.
    if program is None or not torch.cuda.is_initialized():
        return None
    uuid = torch.cuda.get_device_properties(torch.cuda.current_device()).uuid
    return subprocess.Popen(
        [
            program,
            f"--id=GPU-{uuid}",
            f"--query-gpu={_QUERY}",
            "--format=csv,noheader,nounits",
            f"--loop-ms={_PERIOD_MILLISECONDS}",
        ],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )


def parse_clock_sample(output: str) -> ClockSample | None:
    """Means over the lines of the query's CSV, without a last line that is incomplete."""
    rows = [line.split(",") for line in output.splitlines(keepends=True) if line.endswith("\n")]
    rows = [row for row in rows if len(row) == 5]
    if not rows:
        return None
    sm, memory, power, temperature = (_mean([row[k] for row in rows]) for k in range(4))
    flags = 0
    for row in rows:
        flags |= _flags(row[4])
    return ClockSample(len(rows), sm, memory, power, temperature, flags)


def _stop(process: subprocess.Popen[str]) -> str:
    process.terminate()
    try:
        return process.communicate(timeout=_TIMEOUT_SECONDS)[0]
    except subprocess.TimeoutExpired:
        process.kill()
        return process.communicate()[0]


def _mean(fields: list[str]) -> float | None:
    try:
        return sum(float(field) for field in fields) / len(fields)
    except ValueError:
        return None


def _flags(field: str) -> int:
    try:
        return int(field, 16)
    except ValueError:
        return 0
