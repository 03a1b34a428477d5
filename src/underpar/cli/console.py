"""What people see: tables, progress bars, one-line errors. Machines get JSON on standard output.

Only the command line imports this: stages and lab report to a `core.progress.Progress`.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Literal

import rich.progress
from rich.console import Console, RenderableType
from rich.markup import escape
from rich.progress import BarColumn, TextColumn
from rich.table import Table
from rich.text import Text

from underpar.core.progress import SILENT, Progress, Task
from underpar.core.words import clock_text
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
        title=escape(_plain(title)) or None,
        title_justify="left",
        title_style="bold",
        header_style="dim",
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


def show_result(sentence: str, rows: Iterable[tuple[str, str]], last: str = "") -> None:
    """Print a sentence, a table of names and values below it, and a last line."""
    OUT.print(_plain(sentence), style="bold", markup=False)
    table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 3, 0, 0))
    table.add_column(style="dim", no_wrap=True)
    table.add_column(overflow="fold")
    for row in rows:
        table.add_row(*(_cell(value) for value in row))
    if table.row_count:
        OUT.print(table)
    if last:
        OUT.print(_plain(last), markup=False, soft_wrap=True)


# Backgrounds of the levels of surprise, as on the report's page.
SURPRISE = ("", "black on #f8ecd2", "black on #f6d9a4", "black on #f0b57c", "black on #e8906f")


def show_colored(runs: Iterable[tuple[int, str]], between: str = "") -> None:
    """Print a text whose parts have levels of surprise; without colors where there is no terminal.

    The text may hold terminal sequences, which are escaped.
    """
    text = Text()
    for level, part in runs:
        safe = "\n".join(
            "\t".join(one_line(p, len(p)) for p in line.split("\t")) for line in part.split("\n")
        )
        text.append(safe, SURPRISE[level]).append(between)
    OUT.print(text)


def show_pairs(title: str, pairs: Mapping[str, object]) -> None:
    """Print a table of names and values."""
    show_table(title, ("", "value#"), pairs.items())


class Bars(rich.progress.Progress):
    """A bar with percent and remaining time on one line, and below it what is being done."""

    def __init__(self) -> None:
        bar = BarColumn(bar_width=36)
        done, time_left = TextColumn("{task.fields[done]:>5}"), TextColumn("{task.fields[left]}")
        super().__init__(TextColumn("{task.description:<12}"), bar, done, time_left, console=ERR)

    def get_renderables(self) -> Iterable[RenderableType]:
        """The lines, none wider than the terminal."""
        yield from super().get_renderables()
        for task in self.tasks:
            if task.fields["remark"]:
                yield Text("  " + fit(task.fields["remark"], self.console.width - 2))


def fit(remark: str, num_columns: int) -> str:
    """As many of the parts between commas, from the first on, as there is room for."""
    while len(remark) > num_columns and ", " in remark:
        remark = remark.rpartition(", ")[0]
    return remark if len(remark) <= num_columns else f"{remark[: num_columns - 1]}\u2026"


class Pace:
    """The time that is left, by the pace since the first report of a task."""

    def __init__(self) -> None:
        self._first: tuple[float, float] | None = None

    def left(self, share: float, seconds: float) -> str:
        """In words, when `share` is done at the time `seconds`; empty if nobody can know."""
        if not 0 < share < 1:
            return ""
        if self._first is None:
            self._first = (share, seconds)
        since, began = self._first
        if share <= since:
            return ""
        return f"{clock_text((seconds - began) * (1 - share) / (share - since))} left"


class Bar:
    """A task as a progress bar, with a remark below it that changes."""

    def __init__(self, bars: Bars, name: str, total: float) -> None:
        self._bars, self._total, self._pace = bars, total, Pace()
        # Without a total the bar moves to and fro: nobody knows yet how much is done.
        self._id = bars.add_task(name, total=None, remark="", done="", left="")

    def update(self, completed: float, remark: str = "") -> None:
        """Move to `completed` and show `remark`."""
        share = completed / self._total
        left = self._pace.left(share, time.monotonic())
        total, done = (1.0, f"{share:.0%}".replace("%", " %")) if share else (None, "")
        self._bars.update(
            self._id, completed=share, total=total, done=done, left=left, remark=_plain(remark)
        )


class Lines:
    """A task as lines in a log: one per tenth that is done, if that takes a while."""

    # Short tasks leave no line.
    SECONDS_BETWEEN = 10.0

    def __init__(self, name: str, total: float, clock: Callable[[], float] = time.monotonic):
        self._name, self._total, self._clock = name, total, clock
        self._pace, self._tenths, self._said = Pace(), 0, clock()

    def update(self, completed: float, remark: str = "") -> None:
        """Print a line if another tenth is done."""
        share, now = completed / self._total, self._clock()
        left, tenths = self._pace.left(share, now), int(10 * share)
        if tenths <= self._tenths or now - self._said < self.SECONDS_BETWEEN:
            return
        self._tenths, self._said = tenths, now
        words = [f"{self._name} {share:.0%}".replace("%", " %"), left, remark]
        _say(", ".join(filter(None, words)))


class Terminal:
    """Progress on standard error: a live bar per task, or lines in a log; notes as lines."""

    def __init__(self, has_bars: bool = True) -> None:
        self._has_bars = has_bars

    @contextmanager
    def task(self, name: str, total: float) -> Iterator[Task]:
        """A bar with percent, the time left and what is being done."""
        if not self._has_bars:
            yield SILENT
        elif not ERR.is_terminal:
            yield Lines(name, total)
        else:
            with Bars() as bars:
                try:
                    yield Bar(bars, name, total)
                except BaseException:
                    # Remove the bar, so that the error message stands alone.
                    bars.live.transient = True
                    raise

    def note(self, line: str) -> None:
        """Print a line above the bar."""
        _say(line)


def show_error(error: object) -> None:
    """Print an error as one line on standard error."""
    _say(f"error: {one_line(error)}")


def _say(line: str) -> None:
    """Print a line on standard error; on a terminal it breaks between words, in a log nowhere."""
    ERR.print(_plain(line), markup=False, soft_wrap=not ERR.is_terminal)


def open_progress(json: bool, runtime: Runtime | None = None) -> Progress:
    """What a command passes to its stage: no bars with --json, nothing at all on other ranks."""
    if runtime is not None and not runtime.is_main:
        return SILENT
    return Terminal(has_bars=not json)
