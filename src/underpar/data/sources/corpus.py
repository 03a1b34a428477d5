"""Documents: read text, JSON-lines and parquet files; cut long documents; hash documents."""

import codecs
import gzip
import hashlib
import io
import json
import lzma
import re
import zlib
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path

from underpar.data.sources.parquet import read_column
from underpar.data.sources.zstd import open_zstd
from underpar.errors import DataError

# A file with one of these endings is one document: prose, markup and programs.
TEXT_ENDINGS = (
    *(".txt", ".text", ".md", ".markdown", ".rst", ".adoc", ".org", ".tex", ".log", ".srt"),
    *(".html", ".htm", ".xhtml", ".xml", ".css", ".toml", ".yaml", ".yml", ".ini", ".cfg"),
    *(".py", ".c", ".h", ".cc", ".cpp", ".hpp", ".java", ".js", ".ts", ".go", ".rs", ".rb", ".pl"),
    *(".sh", ".sql", ".lua", ".r", ".jl", ".hs", ".swift", ".kt", ".scala", ".el", ".lisp"),
)
PACKINGS = (".xz", ".gz", ".zst")
SUPPORTED_ENDINGS = (
    *(kind + packing for kind in (*TEXT_ENDINGS, ".jsonl") for packing in ("", *PACKINGS)),
    ".parquet",
)
_READABLE = (
    "text (.txt, .md, .rst, .tex, .html, .py and the like), .jsonl, each also with .xz, .gz or "
    ".zst, or .parquet"
)
# A file without an ending, such as LICENSE, is text if its first bytes are.
SNIFFED_BYTES = 1 << 12
# A longer line is refused before it is loaded: a document must fit into memory.
MAX_DOCUMENT_BYTES = 1 << 28
# Small enough that the words of a batch stay in the CPU caches.
BATCH_BYTES = 1 << 20
# What to do with text that is not valid Unicode, and with empty documents.
REFUSE, REPAIR = "refuse", "repair"

_REPLACEMENT = "\ufffd"
# Byte order marks: a file that begins with one is in that encoding.
_MARKS = {
    codecs.BOM_UTF8: "utf-8",
    codecs.BOM_UTF16_LE: "utf-16-le",
    codecs.BOM_UTF16_BE: "utf-16-be",
}
_SURROGATE = re.compile("[\ud800-\udfff]")


@dataclass(frozen=True)
class Document:
    """One text and the name of its source."""

    text: str
    source: str
    is_repaired: bool = False


def document_hash(text: str) -> bytes:
    """SHA-256 of the text in UTF-8."""
    return hashlib.sha256(text.encode("utf-8")).digest()


def is_held_out(digest: bytes, fraction: float) -> bool:
    """Whether a document is validation: first 8 hash bytes, big-endian, < fraction * 2^64."""
    return int.from_bytes(digest[:8], "big") < fraction * 2**64


def is_kept_apart(digest: bytes, share: float) -> bool:
    """Whether a training document is for development: the next 8 hash bytes < share * 2^64.

    Other bytes than those of the held-out documents, so that the two choices are independent.
    """
    return int.from_bytes(digest[8:16], "big") < share * 2**64


def demo_corpus() -> Path:
    """The JSON-lines file that comes with the package (licences: NOTICE.md in the same folder)."""
    return Path(str(resources.files("underpar").joinpath("data", "demo", "demo.jsonl.xz")))


@dataclass(frozen=True)
class Inputs:
    """The files to read, in order, and why the other files of the named folders are skipped."""

    files: list[Path]
    skipped: dict[Path, str]


def list_inputs(paths: Sequence[Path]) -> Inputs:
    """The files of `paths`; a folder stands for the text files inside, recursively and sorted."""
    inputs = Inputs([], {})
    for path in paths:
        if path.is_dir():
            inside = sorted(file for file in path.rglob("*") if file.is_file())
            reasons = {file: _why_skipped(file, path) for file in inside}
            readable = [file for file, reason in reasons.items() if not reason]
            if not readable:
                raise DataError(f"{path}: folder holds no file that is {_READABLE}")
            inputs.files.extend(readable)
            inputs.skipped.update({file: reason for file, reason in reasons.items() if reason})
        elif not path.exists():
            raise DataError(f"{path}: no such file or folder")
        elif not _is_text(path):
            raise DataError(
                f"{path}: unsupported ending, expected {_READABLE}; if it is text, name it "
                f"{path.name}.txt"
            )
        else:
            inputs.files.append(path)
    for file, num_times in Counter(inputs.files).items():
        if num_times > 1:
            raise DataError(f"{file}: named {num_times} times, name it once")
    return inputs


@dataclass(frozen=True)
class Reading:
    """How to read: the field with the text, what to do with bad input, and where to cut."""

    field: str = "text"
    bad_input: str = REFUSE
    # Longer documents are cut into pieces of at most so many characters; 0: none is.
    split_documents: int = 0

    def __post_init__(self) -> None:
        if self.split_documents < 0:
            raise DataError(
                f"split_documents is {self.split_documents}, expected characters, or 0 to cut none"
            )
        if self.bad_input not in (REFUSE, REPAIR):
            raise DataError(f"bad_input is {self.bad_input!r}, expected {REFUSE!r} or {REPAIR!r}")

    def describe(self) -> dict[str, str | int]:
        """What the manifest says; `split_documents` only if documents were cut."""
        return {name: value for name, value in vars(self).items() if value != 0}


@dataclass(frozen=True)
class RawBatch:
    """Consecutive undecoded records of one file: lines of JSON, or texts."""

    path: str
    is_json: bool
    first: int  # number of the first record in its file, from 1
    records: list[bytes]


@dataclass
class Tally:
    """Counts of documents read, left out and repaired."""

    documents: int = 0
    left_out_empty: int = 0
    repaired: int = 0
    replaced_characters: int = 0

    def add(self, other: "Tally") -> None:
        """Add the counts of another tally."""
        for name, value in vars(other).items():
            setattr(self, name, getattr(self, name) + value)


def read_documents(paths: Sequence[Path], reading: Reading | None = None) -> Iterator[Document]:
    """Every document of the files and folders, in order.

    A document is a text file, a line of a .jsonl file (an object) or a row of a .parquet file.
    Lines and rows have the text in the field "text" or the named field; a line may have a "source".
    Text files may be compressed as .xz, .gz or .zst.
    """
    reading = reading or Reading()
    for path in list_inputs(paths).files:
        for batch in read_raw(path, reading.field):
            yield from parse(batch, reading, Tally())


def read_raw(path: Path, field: str = "text") -> Iterator[RawBatch]:
    """The records of one file in batches: the cheap part of reading, in file order."""
    is_json = ".jsonl" in _ending(path)
    records: list[bytes] = []
    first, num_bytes = 1, 0
    for record in _records(path, field):
        records.append(record)
        num_bytes += len(record)
        if num_bytes >= BATCH_BYTES:
            yield RawBatch(str(path), is_json, first, records)
            first, records, num_bytes = first + len(records), [], 0
    if records:
        yield RawBatch(str(path), is_json, first, records)


def parse(batch: RawBatch, reading: Reading, tally: Tally) -> list[Document]:
    """The documents of a batch; a bad document is refused by number, or repaired and counted.

    A byte order mark is not text. It is taken away, and its document counts as repaired.
    """
    documents = []
    for number, record in enumerate(batch.records, start=batch.first):
        where = f"{batch.path}: {'line' if batch.is_json else 'document'} {number}"
        if batch.is_json and not record.strip():
            continue
        _check_length(len(record), where)
        mark = next((m for m in _MARKS if number == 1 and record.startswith(m)), b"")
        encoding = _MARKS.get(mark, "utf-8")
        text, num_replaced = _decode(record[len(mark) :], encoding, where, reading)
        source = Path(batch.path).name
        if batch.is_json:
            text, source = _parse_line(text, reading.field, source, where)
        text, num_surrogates = _without_surrogates(text, where, reading)
        num_replaced += num_surrogates
        is_repaired = num_replaced > 0 or mark != b""
        pieces = cut_text(text, reading.split_documents)
        tally.documents += len(pieces)
        tally.repaired += is_repaired
        tally.replaced_characters += num_replaced
        if text:
            documents += [Document(piece, source, is_repaired) for piece in pieces]
        elif reading.bad_input == REPAIR:
            tally.left_out_empty += 1
        else:
            raise DataError(f"{where}: empty document, remove it or read with --bad-input repair")
    return documents


def cut_text(text: str, most_characters: int) -> list[str]:
    """The text in pieces of about equal length: at ends of paragraphs, or lines, or words."""
    pieces, begin = [], 0
    while most_characters and len(text) - begin > most_characters:
        rest = len(text) - begin
        longest = -(-rest // -(-rest // most_characters))
        end = begin + longest
        for mark in ("\n\n", "\n", " "):
            found = text.rfind(mark, begin + longest // 2, end)
            if found >= 0:
                end = found + len(mark)
                break
        pieces.append(text[begin:end])
        begin = end
    return [*pieces, text[begin:]]


def _ending(path: Path) -> str:
    name = path.name.lower()
    return next((ending for ending in SUPPORTED_ENDINGS if name.endswith(ending)), "")


def _why_skipped(file: Path, folder: Path) -> str:
    """The kind of a file that is not read, or "" if it is read."""
    if any(part.startswith(".") for part in file.relative_to(folder).parts):
        return "hidden"
    return "" if _is_text(file) else file.suffix or "without an ending"


def _is_text(path: Path) -> bool:
    """Whether a file is one to read: by its ending or, without one, by its first bytes."""
    # The numbers of LICENSE-2.0 and of the manual page ls.1 are no endings.
    if _ending(path) or not (path.suffix[1:].isdigit() or not path.suffix):
        return _ending(path) != ""
    try:
        with path.open("rb") as stream:
            first = stream.read(SNIFFED_BYTES)
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error}") from error
    try:
        # The last character may be cut: that is no error before the last part.
        codecs.getincrementaldecoder("utf-8")().decode(first)
    except UnicodeDecodeError:
        return False
    return first != b"" and b"\0" not in first


def _open(path: Path) -> io.BufferedIOBase:
    ending = _ending(path)
    if ending.endswith(".xz"):
        return lzma.open(path, "rb")
    if ending.endswith(".gz"):
        return gzip.open(path, "rb")
    if ending.endswith(".zst"):
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


def _records(path: Path, field: str) -> Iterator[bytes]:
    if _ending(path) == ".parquet":
        yield from read_column(path, field)
    elif ".jsonl" in _ending(path):
        yield from (line for _, line in _lines(path))
    else:
        parts, num_bytes = [], 0
        for number, line in _lines(path):
            num_bytes += len(line)
            _check_length(num_bytes, f"{path}: line {number}")
            parts.append(line)
        yield b"".join(parts)


def _check_length(num_bytes: int, where: str) -> None:
    if num_bytes > MAX_DOCUMENT_BYTES:
        raise DataError(f"{where}: document over {MAX_DOCUMENT_BYTES} bytes, split it first")


def _decode(record: bytes, encoding: str, where: str, reading: Reading) -> tuple[str, int]:
    try:
        return record.decode(encoding), 0
    except UnicodeDecodeError as error:
        if reading.bad_input == REFUSE:
            raise DataError(
                f"{where}: invalid {encoding[:6].upper()} at byte {error.start + 1}, convert to "
                "UTF-8 first or read with --bad-input repair"
            ) from error
    text = record.decode(encoding, "replace")
    return text, text.count(_REPLACEMENT) - record.count(_REPLACEMENT.encode(encoding))


def _without_surrogates(text: str, where: str, reading: Reading) -> tuple[str, int]:
    surrogate = _SURROGATE.search(text)
    if surrogate is None:
        return text, 0
    if reading.bad_input == REFUSE:
        raise DataError(
            f"{where}: lone surrogate at character {surrogate.start() + 1}, not valid Unicode "
            "text; read with --bad-input repair to replace it"
        )
    return _SURROGATE.subn(_REPLACEMENT, text)


def _parse_line(line: str, field: str, default_source: str, where: str) -> tuple[str, str]:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise DataError(f"{where}: invalid JSON: {error}") from error
    if not isinstance(record, dict):
        raise DataError(f"{where}: expected a JSON object, found {type(record).__name__}")
    if field not in record:
        raise DataError(f'{where}: the object has no field "{field}"')
    for name in (field, "source"):
        value = record.get(name, "")
        if not isinstance(value, str):
            raise DataError(f'{where}: field "{name}" is {type(value).__name__}, not a string')
    return record[field], record.get("source", default_source)
