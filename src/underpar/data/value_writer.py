"""Write files of 16-bit values in the published FineWeb format (`value_files` opens them)."""

import contextlib
import os
from pathlib import Path
from typing import IO, Any

import numpy as np
import numpy.typing as npt

from underpar.data.value_files import HEADER_BYTES, HEADER_INTS, MAGIC, VERSION
from underpar.errors import DataError

# The header holds a signed 32-bit count.
MAX_FILE_VALUES = (1 << 31) - 1


class ValueSeries:
    """Numbered files, all full except the last; they have temporary names until `publish`."""

    def __init__(self, folder: Path, pattern: str, shard_tokens: int = MAX_FILE_VALUES) -> None:
        self.paths: list[Path] = []
        self._folder = folder
        self._pattern = pattern
        self._shard_tokens = shard_tokens
        self._room = 0
        self._file: IO[bytes] | None = None

    def write(self, values: npt.NDArray[Any]) -> None:
        """Append values below 2^16."""
        begin = 0
        while begin < len(values):
            file = self._file if self._file is not None and self._room else self._open_next()
            piece = values[begin : begin + self._room]
            file.write(piece.astype("<u2").tobytes())
            self._room -= len(piece)
            begin += len(piece)

    def close(self) -> None:
        """Write the header of the last file; without any value, file 0 is written empty."""
        file = self._file or self._open_next()
        header = np.zeros(HEADER_INTS, dtype="<i4")
        header[:3] = MAGIC, VERSION, self._shard_tokens - self._room
        file.seek(0)
        file.write(header.tobytes())
        file.flush()
        os.fsync(file.fileno())
        file.close()

    def publish(self) -> None:
        """Rename the closed files to their final names, the first file last."""
        for path in reversed(self.paths):
            os.replace(part_of(path), path)

    def discard(self) -> None:
        """Remove the files that were not renamed."""
        if self._file is not None:
            # An error while closing would hide the first error.
            with contextlib.suppress(OSError):
                self._file.close()
        for path in self.paths:
            part_of(path).unlink(missing_ok=True)

    def _open_next(self) -> IO[bytes]:
        if self._file is not None:
            self.close()
        self.paths.append(self._folder / self._pattern.format(len(self.paths)))
        self._room = self._shard_tokens
        self._file = part_of(self.paths[-1]).open("xb")
        self._file.seek(HEADER_BYTES)
        return self._file


def part_of(path: Path) -> Path:
    """The temporary name of a file until it is published."""
    return path.with_name(f".{path.name}.part")


def checked_values(values: npt.ArrayLike | None, limit: int, what: str) -> npt.NDArray[Any]:
    """`values` as an array (N,) of integers in [0, limit); a DataError names the first other."""
    array = np.asarray(values)
    if array.ndim != 1 or not array.size or array.dtype.kind not in "iu":
        raise DataError(
            f"{what}s are {array.dtype} of shape {array.shape}, expected a row of integers"
        )
    if array.min() < 0 or array.max() >= limit:
        at = int(np.argmax((array < 0) | (array >= limit)))
        raise DataError(f"{what} {at} is {array[at]}, expected 0 to {limit - 1}")
    return array
