"""Documents: read them from text and JSON-lines files, name them by hash, split them by hash."""

import gzip
import hashlib
import io
import json
import lzma
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path

from underpar.data.zstd import open_zstd
from underpar.errors import DataError

SUPPORTED_ENDINGS = tuple(
    kind + packing for kind in (".txt", ".jsonl") for packing in ("", ".xz", ".gz", ".zst")
)
# One document is held in memory at a time; a longer line is refused instead of being loaded.
MAX_DOCUMENT_BYTES = 1 << 28


@dataclass(frozen=True)
class Document:
    """One text and the name of where it came from."""

    text: str
    source: str


def document_hash(text: str) -> str:
    """SHA-256 of the text in UTF-8, as 64 hex digits."""
    return hashlib.sha256(text.encode("utf-8")).hexdigest()


def is_held_out(hash_hex: str, fraction: float) -> bool:
    """Whether a document is validation: first 8 hash bytes, big-endian, < fraction * 2^64."""
    return int(hash_hex[:16], 16) < fraction * 2**64


def demo_corpus() -> Path:
    """The JSON-lines file that comes with the package (licences: NOTICE.md beside it)."""
    return Path(str(resources.files("underpar").joinpath("data", "demo", "demo.jsonl.xz")))


def input_files(paths: Sequence[Path]) -> list[Path]:
    """The files that `paths` stand for; a folder gives its supported files, sorted, recursively."""
    files: list[Path] = []
    for path in paths:
        if path.is_dir():
            inside = sorted(file for file in path.rglob("*") if file.is_file() and _ending(file))
            if not inside:
                raise DataError(f"{path}: folder holds no file ending in {_endings_text()}")
            files += inside
        elif not path.exists():
            raise DataError(f"{path}: no such file or folder")
        elif not _ending(path):
            raise DataError(f"{path}: unsupported ending, expected {_endings_text()}")
        else:
            files.append(path)
    return files


def read_documents(paths: Sequence[Path]) -> Iterator[Document]:
    """Every document of the files and folders, in order.

    .txt is one document a file, .jsonl one object a line with the field "text" and, if it has
    one, "source"; both may be packed as .xz, .gz or .zst.
    """
    for path in input_files(paths):
        if ".txt" in _ending(path):
            yield _read_text_file(path)
        else:
            yield from _read_json_lines(path)


def _ending(path: Path) -> str:
    return next((ending for ending in SUPPORTED_ENDINGS if path.name.endswith(ending)), "")


def _endings_text() -> str:
    return ", ".join(SUPPORTED_ENDINGS)


def _open(path: Path) -> io.BufferedIOBase:
    if path.name.endswith(".xz"):
        return lzma.open(path, "rb")
    if path.name.endswith(".gz"):
        return gzip.open(path, "rb")
    if path.name.endswith(".zst"):
        return open_zstd(path)
    return path.open("rb")


def _lines(path: Path) -> Iterator[tuple[int, bytes]]:
    number = 0
    try:
        with _open(path) as stream:
            while line := stream.readline(MAX_DOCUMENT_BYTES + 1):
                number += 1
                yield number, line
    except (OSError, EOFError, lzma.LZMAError, zlib.error) as error:
        raise DataError(f"{path}: line {number + 1}: cannot be read: {error}") from error


def _read_text_file(path: Path) -> Document:
    lines: list[str] = []
    num_bytes = 0
    for number, line in _lines(path):
        num_bytes += len(line)
        _check_length(num_bytes, f"{path}: line {number}")
        lines.append(_decode(line, f"{path}: line {number}"))
    return _document("".join(lines), path.name, f"{path}: document 1")


def _read_json_lines(path: Path) -> Iterator[Document]:
    for number, line in _lines(path):
        where = f"{path}: line {number}"
        _check_length(len(line), where)
        if line.strip():
            yield _parse_line(_decode(line, where), path.name, where)


def _check_length(num_bytes: int, where: str) -> None:
    if num_bytes > MAX_DOCUMENT_BYTES:
        raise DataError(f"{where}: document over {MAX_DOCUMENT_BYTES} bytes, split it first")


def _decode(line: bytes, where: str) -> str:
    try:
        return line.decode("utf-8")
    except UnicodeDecodeError as error:
        raise DataError(
            f"{where}: invalid UTF-8 at byte {error.start + 1} of the line, convert to UTF-8 first"
        ) from error


def _parse_line(line: str, default_source: str, where: str) -> Document:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise DataError(f"{where}: invalid JSON: {error}") from error
    if not isinstance(record, dict):
        raise DataError(f"{where}: expected a JSON object, found {type(record).__name__}")
    if "text" not in record:
        raise DataError(f'{where}: the object has no field "text"')
    for field in ("text", "source"):
        value = record.get(field, "")
        if not isinstance(value, str):
            raise DataError(f'{where}: field "{field}" is {type(value).__name__}, not a string')
    return _document(record["text"], record.get("source", default_source), where)


def _document(text: str, source: str, where: str) -> Document:
    if not text:
        raise DataError(f"{where}: empty document, remove it")
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise DataError(
            f"{where}: lone surrogate at character {error.start + 1}, not valid Unicode text"
        ) from error
    return Document(text, source)
