"""How a stage reports progress, without knowing who watches.

A stage takes a `progress` argument and reports to it. The command line passes an implementation
that draws bars; scripts and tests pass nothing and get `SILENT`.
"""

from __future__ import annotations

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
