"""State of the accelerator while a block is timed, by read-only nvidia-smi queries."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable
from dataclasses import dataclass

import torch

_QUERY = "clocks.sm,clocks.mem,power.draw,temperature.gpu,clocks_throttle_reasons.active"
# One reading of a power-limited clock swings by some percent; a block needs the mean of many.
_PERIOD_MILLISECONDS = 50
_TIMEOUT_SECONDS = 30


@dataclass(frozen=True)
class ClockSample:
    """Means over the readings inside one block, None where the accelerator reports no number.

    throttle_flags is the union of the clocks event reasons seen (NVML bit mask).
    """

    num_readings: int
    sm_mhz: float | None
    memory_mhz: float | None
    power_watts: float | None
    temperature_celsius: float | None
    throttle_flags: int


def start_clock_sample() -> Callable[[], ClockSample | None]:
    """Start reading the current accelerator; the returned function stops and sums up.

    It gives None if no accelerator is in use, without nvidia-smi, or if nothing was read.
    """
    program = shutil.which("nvidia-smi")
    # Only a process that already uses the accelerator has something to watch on it.
    if program is None or not torch.cuda.is_initialized():
        return lambda: None
    uuid = torch.cuda.get_device_properties(torch.cuda.current_device()).uuid
    process = subprocess.Popen(
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
    return lambda: parse_clock_sample(_stop(process))


def parse_clock_sample(output: str) -> ClockSample | None:
    """Sum up lines of the query's CSV; a line cut short by the stop is left out."""
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
