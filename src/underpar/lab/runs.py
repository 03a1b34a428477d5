"""Training runs as processes of their own: start several at a time, read what they left.

Each run is `underpar train` in a folder of its own, with its output in a log file in that folder.
"""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from underpar.core.run_folder import RunFolder

LOG = "train.log"
# What a result depends on beside the recipe. People may add a remark by hand.
CONDITIONS = ("data_identity", "train_tokens", "device", "versions", "remark")
# How often running processes are asked whether they have ended.
POLL_SECONDS = 0.2


@dataclass(frozen=True)
class Job:
    """One run: its folder's name, the changes to the recipe, the hash of the changed recipe."""

    name: str
    overrides: tuple[str, ...]
    recipe_hash: str
    options: tuple[str, ...] = ()
    """More options of `underpar train`."""


def token_budget(num_tokens: int) -> tuple[str, ...]:
    """Changes of a recipe with which it trains on so many tokens, whatever its budget was."""
    others = ("budget_seconds=0", "reserve_seconds=0", "budget_steps=0", "budget_flops=0")
    return (f"train.budget_tokens={num_tokens}", *(f"train.{other}" for other in others))


Launch = Callable[[Job], "subprocess.Popen[bytes]"]
"""Starts a run."""


def train_words(job: Job, recipe: str, data: Path, out: Path, device: str) -> list[str]:
    """The words of the command that trains a job, in the job's folder below `out`."""
    words = ["train", recipe, "--data", str(data), "--out", str(out / job.name)]
    words += ["--device", device, *job.options]
    return words + [word for override in job.overrides for word in ("--set", override)]


def launcher(recipe: str, data: Path, out: Path, device: str) -> Launch:
    """A function that starts `underpar train` for a job, as a process with a log."""
    return lambda job: start(train_words(job, recipe, data, out, device), out / job.name)


def start(words: Sequence[str], folder: Path) -> subprocess.Popen[bytes]:
    """Start `underpar` with these words; its output is appended to a log in `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / LOG).open("ab") as log:
        return subprocess.Popen(
            [sys.executable, "-m", "underpar", *words],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
        )


def run_jobs(
    jobs: Sequence[Job],
    launch: Launch,
    num_at_once: int,
    on_end: Callable[[Job, int], None],
    may_start: Callable[[Job], bool] = lambda job: True,
) -> None:
    """Run jobs in their order, `num_at_once` at a time; `on_end` gets each job's exit code.

    A job that `may_start` refuses when its turn comes is left out. An error or a signal ends the
    runs that are still going. They can be continued later.
    """
    waiting, running = deque(jobs), dict[Job, "subprocess.Popen[bytes]"]()
    # Without a handler, SIGTERM would end this process and leave its runs on the device.
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        while waiting or running:
            while waiting and len(running) < num_at_once:
                job = waiting.popleft()
                if may_start(job):
                    running[job] = launch(job)
            ended = {job: process.poll() for job, process in running.items()}
            for job, code in ended.items():
                if code is not None:
                    del running[job]
                    on_end(job, code)
            if all(code is None for code in ended.values()):
                time.sleep(POLL_SECONDS)
    finally:
        for process in running.values():
            process.terminate()
        for process in running.values():
            process.wait()
        signal.signal(signal.SIGTERM, before)


def read_tail(folder: Path, num_lines: int = 8) -> str:
    """The last lines of a run's log."""
    path = folder / LOG
    text = path.read_text(errors="replace") if path.exists() else ""
    return "\n".join(text.splitlines()[-num_lines:])


def read_conditions(folder: RunFolder) -> dict[str, Any]:
    """The data, device and versions that a run was made with."""
    about = folder.read_json(folder.about_file)
    return {key: about.get(key) for key in CONDITIONS}
