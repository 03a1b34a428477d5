"""Zstandard files as byte streams; an incomplete file is an error."""

import io
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from underpar.errors import DataError

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer

# A block of one repeated byte expands 4 bytes to 128 KiB, so small slices bound the output.
_COMPRESSED_CHUNK_BYTES = 1024


def open_zstd(path: Path) -> io.BufferedReader:
    """Open a .zst file of one or more frames; OSError if damaged, EOFError if incomplete."""
    try:
        import zstandard  # noqa: F401
    except ImportError as error:
        raise DataError(
            f"{path}: reading .zst needs the package zstandard (pip install zstandard)"
        ) from error
    return io.BufferedReader(_ChunkStream(_decompressed_chunks(path)))


def _decompressed_chunks(path: Path) -> Iterator[bytes]:
    # The stream_reader of the package takes a truncated frame for the end of the file.
    import zstandard

    decompressor = zstandard.ZstdDecompressor()
    frame = None
    with path.open("rb") as file:
        while compressed := file.read(_COMPRESSED_CHUNK_BYTES):
            while compressed:
                frame = frame or decompressor.decompressobj()
                try:
                    chunk = frame.decompress(compressed)
                except zstandard.ZstdError as error:
                    raise OSError(str(error)) from error
                compressed = frame.unused_data
                frame = None if frame.eof else frame
                yield chunk
    if frame is not None:
        raise EOFError("compressed file ended before the end of its last frame")


class _ChunkStream(io.RawIOBase):
    """A read-only stream over an iterator of byte chunks."""

    def __init__(self, chunks: Iterator[bytes]) -> None:
        self._chunks = chunks
        self._rest = memoryview(b"")

    def readable(self) -> bool:
        """Always."""
        return True

    def readinto(self, buffer: "WriteableBuffer") -> int:
        """Fill `buffer` with the next bytes; 0 at the end."""
        while not self._rest:
            chunk = next(self._chunks, None)
            if chunk is None:
                return 0
            self._rest = memoryview(chunk)
        target = memoryview(buffer)
        num_bytes = min(len(target), len(self._rest))
        target[:num_bytes] = self._rest[:num_bytes]
        self._rest = self._rest[num_bytes:]
        return num_bytes
