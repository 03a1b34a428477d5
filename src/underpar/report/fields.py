"""Values of a JSON object, checked when they are read."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from underpar.errors import RunError

# Floats are exact for integers up to here; a larger count means a damaged file.
LARGEST_COUNT = 2**53


@dataclass(frozen=True)
class Fields:
    """A JSON object and its file; an error about a value names both."""

    file: Path
    values: dict[str, Any]

    def number(self, key: str) -> float:
        """A number; NaN and infinity are allowed."""
        value = self._get(key, (int, float), "a number")
        try:
            return float(value)
        except OverflowError as error:
            raise self._wrong(key, "a number that fits 64 bits") from error

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
        return Fields(self.file, self._get(key, (dict,), "an object"))

    def numbers(self, key: str) -> dict[str, float]:
        """An object of which all values are numbers."""
        table = self.table(key)
        return {name: table.number(name) for name in table.values}

    def rows(self, key: str) -> list[Fields]:
        """A list of objects."""
        rows = self._get(key, (list,), "a list")
        if not all(isinstance(row, dict) for row in rows):
            raise self._wrong(key, "a list of objects")
        return [Fields(self.file, row) for row in rows]

    def _get(self, key: str, kinds: tuple[type, ...], expected: str) -> Any:
        value = self.values.get(key)
        if isinstance(value, bool) or not isinstance(value, kinds):
            raise self._wrong(key, expected)
        return value

    def _wrong(self, key: str, expected: str) -> RunError:
        text = repr(self.values[key])[:60] if key in self.values else "missing"
        return RunError(f"{self.file}: {key} is {text}, expected {expected}; run its stage again")
