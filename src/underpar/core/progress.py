"""How a stage reports progress, without knowing who watches.

A stage takes a `progress` argument and reports to it. The command line passes an implementation
that draws bars, the Python interface one that prints lines; who passes nothing gets `SILENT`.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Protocol


class Task(Protocol):
    """One piece of work with a known size."""

    def update(self, completed: float, remark: str = "") -> None:
        """Say how much of the task's total is done, with a short remark."""


class Progress(Protocol):
    """Where a stage reports what it does."""

    def task(self, name: str, total: float) -> AbstractContextManager[Task]:
        """Begin a task that is done when `completed` reaches `total`."""

    def note(self, line: str) -> None:
        """Say one line that stays on the screen."""


class Silent:
    """Progress that nobody watches."""

    @contextmanager
    def task(self, name: str, total: float) -> Iterator[Task]:
        """A task whose updates go nowhere."""
        yield self

    def update(self, completed: float, remark: str = "") -> None:
        """Ignore an update."""

    def note(self, line: str) -> None:
        """Ignore a line."""


SILENT = Silent()


class Lines:
    """Progress as printed lines, for notebooks and logs: one every few seconds at most."""

    def __init__(self, seconds: float = 5.0) -> None:
        self._seconds = seconds

    @contextmanager
    def task(self, name: str, total: float) -> Iterator[Task]:
        """A task with a line for its share and its remark; short tasks print nothing."""
        yield _PrintedTask(name, total, self._seconds)

    def note(self, line: str) -> None:
        """Print a line."""
        print(line, flush=True)


class _PrintedTask:
    def __init__(self, name: str, total: float, seconds: float) -> None:
        self._name, self._total, self._seconds = name, total, seconds
        self._last = time.monotonic()

    def update(self, completed: float, remark: str = "") -> None:
        """Print a line if the last one is old enough."""
        now = time.monotonic()
        if now - self._last >= self._seconds:
            self._last = now
            share = completed / self._total if self._total else 1.0
            print(f"{self._name:<8} {share:4.0%}  {remark}".rstrip(), flush=True)


LINES = Lines()
