"""A progress that remembers what it is told, for tests."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field


@dataclass
class Watcher:
    """Every task with its updates, and every note, in order."""

    tasks: list["WatchedTask"] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @contextmanager
    def task(self, name: str, total: float) -> Iterator["WatchedTask"]:
        """Begin a task."""
        task = WatchedTask(name, total)
        self.tasks.append(task)
        yield task

    def note(self, line: str) -> None:
        """Remember a line."""
        self.notes.append(line)


@dataclass
class WatchedTask:
    """A task with its updates."""

    name: str
    total: float
    updates: list[tuple[float, str]] = field(default_factory=list)

    def update(self, completed: float, remark: str = "") -> None:
        """Remember an update."""
        self.updates.append((completed, remark))
