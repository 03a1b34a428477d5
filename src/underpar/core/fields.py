"""JSON objects from files that anything may have happened to: values are checked when read."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from underpar.core.makers import again
from underpar.errors import DAMAGE, RunError

# Floats are exact for integers up to here; a larger count means a damaged file.
LARGEST_COUNT = 2**53
# The longest file, and the longest line of a file of lines. A score of 50,000 documents, with its
# ledger and its events, is 10 MB.
MOST_FILE_BYTES = 1 << 27
MOST_LINE_BYTES = 1 << 20


@dataclass(frozen=True)
class Fields:
    """A JSON object and its file; an error about a value names both."""

    file: Path
    values: dict[str, Any]
    # Empty: what helps a file of its name.
    remedy: str = ""

    def number(self, key: str) -> float:
        """A number; NaN and infinity are allowed."""
        value = self._get(key, (int, float), "a number")
        try:
            return float(value)
        except OverflowError as error:
            raise self._wrong(key, "a number that fits 64 bits") from error

    def finite(self, key: str) -> float:
        """A number that is neither NaN nor infinite."""
        value = self.number(key)
        if not math.isfinite(value):
            raise self._wrong(key, "a finite number")
        return value

    def count(self, key: str) -> int:
        """A whole number, 0 or more."""
        value: int = self._get(key, (int,), "a whole number")
        if not 0 <= value <= LARGEST_COUNT:
            raise self._wrong(key, f"a whole number from 0 to {LARGEST_COUNT}")
        return value

    def text(self, key: str) -> str:
        """A string."""
        return str(self._get(key, (str,), "a string"))

    def table(self, key: str) -> Fields:
        """An object."""
        return Fields(self.file, self._get(key, (dict,), "an object"), self.remedy)

    def numbers(self, key: str) -> dict[str, float]:
        """An object of which all values are numbers."""
        table = self.table(key)
        return {name: table.number(name) for name in table.values}

    def rows(self, key: str) -> list[Fields]:
        """A list of objects."""
        rows = self._get(key, (list,), "a list")
        if not all(isinstance(row, dict) for row in rows):
            raise self._wrong(key, "a list of objects")
        return [Fields(self.file, row, self.remedy) for row in rows]

    def texts(self, key: str) -> list[str]:
        """A list of strings."""
        texts: list[str] = self._get(key, (list,), "a list")
        if not all(isinstance(text, str) for text in texts):
            raise self._wrong(key, "a list of strings")
        return texts

    def _get(self, key: str, kinds: tuple[type, ...], expected: str) -> Any:
        value = self.values.get(key)
        if isinstance(value, bool) or not isinstance(value, kinds):
            raise self._wrong(key, expected)
        return value

    def _wrong(self, key: str, expected: str) -> RunError:
        text = f"{self.values[key]!r:.60}" if key in self.values else "missing"
        wrong = f"{self.file}: {key:.60} is {text}, expected {expected}"
        return RunError(f"{wrong}; {self.remedy or again(self.file)}")


@contextmanager
def reading(path: Path, remedy: str, *others: type[Exception]) -> Iterator[None]:
    """Inside, values from a file are used: an error means that it is not what its stage writes.

    `others` are the errors of a library that reads the file. torch's are RuntimeErrors.
    """
    kinds: tuple[type[Exception], ...] = (OSError, RuntimeError, *DAMAGE, *others)
    try:
        yield
    except kinds as error:
        raise RunError(f"{path} cannot be read ({error!r:.200}); {remedy}") from error


def read_fields(path: Path) -> Fields:
    """The JSON object in a file; anything else is refused."""
    try:
        # A pipe or a device could be read for ever.
        if not path.is_file():
            raise RunError(f"{path} is not a file; {again(path)}")
        with path.open("rb") as file:
            values = _parse(path, file.read(MOST_FILE_BYTES + 1), MOST_FILE_BYTES)
    except OSError as error:
        raise RunError(f"{path} cannot be read ({error}); {again(path)}") from error
    return Fields(path, values)


def read_lines(path: Path) -> Iterator[Fields]:
    """The JSON objects in the lines of a file, without a last line that a kill cut short."""
    try:
        if not path.is_file():
            raise RunError(f"{path} is not a file; {again(path)}")
        with path.open("rb") as file:
            while (line := file.readline(MOST_LINE_BYTES + 1)).endswith(b"\n"):
                yield Fields(path, _parse(path, line, MOST_LINE_BYTES))
            if len(line) > MOST_LINE_BYTES:
                most = f"{MOST_LINE_BYTES} bytes"
                raise RunError(f"{path} holds a line of over {most}; {again(path)}")
    except OSError as error:
        raise RunError(f"{path} cannot be read ({error}); {again(path)}") from error


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object without a key that it names twice: readers differ in which value they take."""
    values = dict(pairs)
    if len(values) < len(pairs):
        keys = [key for key, _ in pairs]
        raise ValueError(f"key {max(keys, key=keys.count)!r:.60} occurs twice")
    return values


def _parse(path: Path, raw: bytes, most_bytes: int) -> dict[str, Any]:
    if len(raw) > most_bytes:
        raise RunError(f"{path} holds over {most_bytes} bytes of JSON; {again(path)}")
    try:
        values = json.loads(raw.decode(), object_pairs_hook=_once)
    except (ValueError, RecursionError) as error:
        raise RunError(f"{path} is not valid JSON ({error!s:.200}); {again(path)}") from error
    if not isinstance(values, dict):
        raise RunError(f"{path} does not hold a JSON object; {again(path)}")
    return values
