"""What people see: tables, progress bars, one-line errors. Machines get JSON on standard output."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.progress import (
    BarColumn,
    Progress,
    TaskProgressColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.table import Table

# Results go to standard output, everything about progress and trouble to standard error.
OUT = Console(highlight=False)
ERR = Console(stderr=True, highlight=False)


def show_json(value: Any) -> None:
    """One JSON document on standard output."""
    print(json.dumps(value))


def show_table(title: str, columns: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    """A table; columns named with a trailing '#' are numbers, set to the right."""
    table = Table(title=escape(title), title_justify="left", title_style="bold", header_style="dim")
    for column in columns:
        table.add_column(column.rstrip("#"), justify="right" if column.endswith("#") else "left")
    for row in rows:
        table.add_row(*(_cell(value) for value in row))
    OUT.print(table)


def _cell(value: object) -> str:
    if isinstance(value, float):
        return f"{value:,.4f}"
    if isinstance(value, int) and not isinstance(value, bool):
        return f"{value:,}"
    # A path may hold brackets, which are not ours to interpret.
    return escape(str(value))


def show_pairs(title: str, pairs: Mapping[str, object]) -> None:
    """A table of names and values."""
    show_table(title, ("", "value#"), pairs.items())


class Bar:
    """A progress bar that counts towards `total`, with a changing remark."""

    def __init__(self, progress: Progress, name: str, total: float) -> None:
        self._progress = progress
        self._task = progress.add_task(name, total=total, remark="")

    def update(self, completed: float, remark: str = "") -> None:
        """Move to `completed` and show `remark`."""
        self._progress.update(self._task, completed=completed, remark=remark)


@contextmanager
def progress_bar(name: str, total: float, quiet: bool = False) -> Iterator[Bar]:
    """A live bar on standard error with time spent and time left."""
    columns = (
        TextColumn("{task.description:<12}"),
        BarColumn(bar_width=24),
        TaskProgressColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.fields[remark]}"),
    )
    # Where nobody watches, a bar is noise in a log.
    with Progress(*columns, console=ERR, disable=quiet or not ERR.is_terminal) as progress:
        try:
            yield Bar(progress, name, total)
        except BaseException:
            # The error line stands alone.
            progress.live.transient = True
            raise
