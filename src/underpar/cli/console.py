"""What people see: tables, progress bars, one-line errors. Machines get JSON on standard output.

Only the command line imports this: stages and lab report to a `core.progress.Progress`.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Literal

import rich.progress
from rich.console import Console
from rich.markup import escape
from rich.progress import (
    BarColumn,
    TaskProgressColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.table import Table

from underpar.core.progress import SILENT, Progress, Task
from underpar.errors import one_line

if TYPE_CHECKING:
    from underpar.core.runtime import Runtime


class PlainConsole(Console):
    """A console that leaves a broken pipe to `cli.main`; rich would end with exit code 1."""

    def on_broken_pipe(self) -> None:
        """Called inside the handler of the BrokenPipeError, which goes on from here."""
        raise


# Results go to standard output, progress and errors to standard error.
OUT = PlainConsole(highlight=False)
ERR = PlainConsole(stderr=True, highlight=False)
# The longest line of a table or a note.
MOST_CHARACTERS = 2000


def show_json(value: Any) -> None:
    """Print one JSON document on standard output."""
    print(json.dumps(value))


def show_table(title: str, columns: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    """Print a table; a column whose name ends with '#' holds numbers, aligned to the right."""
    table = Table(
        title=escape(_plain(title)), title_justify="left", title_style="bold", header_style="dim"
    )
    for column in columns:
        justify: Literal["left", "right"] = "right" if column.endswith("#") else "left"
        # A long hash is wrapped, not cut.
        table.add_column(column.rstrip("#"), justify=justify, overflow="fold")
    for row in rows:
        table.add_row(*(_cell(value) for value in row))
    OUT.print(table)


def _cell(value: object) -> str:
    if isinstance(value, float):
        return f"{value:,.4f}"
    if isinstance(value, int) and not isinstance(value, bool):
        return f"{value:,}"
    # Brackets in a path are text, not markup.
    return escape(_plain(str(value)))


def _plain(text: str) -> str:
    """Text without terminal sequences: what comes from files may hold them. Lines stay lines."""
    return "\n".join(one_line(line, MOST_CHARACTERS) for line in text.split("\n"))


def show_pairs(title: str, pairs: Mapping[str, object]) -> None:
    """Print a table of names and values."""
    show_table(title, ("", "value#"), pairs.items())


class Bar:
    """A task as a progress bar, with a remark after it that changes."""

    def __init__(self, bars: rich.progress.Progress, name: str, total: float) -> None:
        self._bars = bars
        self._id = bars.add_task(name, total=total, remark="")

    def update(self, completed: float, remark: str = "") -> None:
        """Move to `completed` and show `remark`."""
        self._bars.update(self._id, completed=completed, remark=remark)


class Terminal:
    """Progress on standard error: a live bar per task, notes as lines."""

    def __init__(self, has_bars: bool = True) -> None:
        self._has_bars = has_bars

    @contextmanager
    def task(self, name: str, total: float) -> Iterator[Task]:
        """A bar with the time spent and the time left."""
        columns = (
            TextColumn("{task.description:<12}"),
            BarColumn(bar_width=24),
            TaskProgressColumn(),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.fields[remark]}"),
        )
        # In a log file a bar is noise.
        hidden = not self._has_bars or not ERR.is_terminal
        with rich.progress.Progress(*columns, console=ERR, disable=hidden) as bars:
            try:
                yield Bar(bars, name, total)
            except BaseException:
                # Remove the bar, so that the error message stands alone.
                bars.live.transient = True
                raise

    def note(self, line: str) -> None:
        """Print a line above the bar."""
        ERR.print(_plain(line), markup=False, soft_wrap=True)


def show_error(error: object) -> None:
    """Print an error as one line on standard error."""
    ERR.print(f"error: {one_line(error)}", markup=False, soft_wrap=True)


def open_progress(json: bool, runtime: Runtime | None = None) -> Progress:
    """What a command passes to its stage: no bars with --json, nothing at all on other ranks."""
    if runtime is not None and not runtime.is_main:
        return SILENT
    return Terminal(has_bars=not json)
