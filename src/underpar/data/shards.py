"""Token files: the tokens of one split, with a table of its documents.

Layout, little-endian:

    offset  type              content
    0       4 bytes           magic "UPSH"
    4       u16               version, 2
    6       u16               bytes per token, 2 or 4
    8       u64               number of tokens T, BOS included
    16      u64               number of documents D
    24      32 bytes          SHA-256 of everything that follows
    56      u64[D]            document starts, in tokens
    ...     u64[D]            document bytes, the UTF-8 length of the source text
    ...     32 bytes [D]      SHA-256 of the source text
    ...     u8[D]             flags: 1 the tokenizer changed the text, 2 the text was repaired;
                              then zeros up to a multiple of 8 bytes
    ...     u16[T] or u32[T]  tokens; every document is [BOS] + tokens, no EOS
"""

import hashlib
import os
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from types import TracebackType
from typing import IO, Any

import numpy as np
import numpy.typing as npt

from underpar.errors import DataError
from underpar.seams import BOS_ID

MAGIC = b"UPSH"
VERSION = 2
# Sums of document bytes below this bound cannot overflow a u64.
MAX_TEXT_BYTES = 1 << 40

# Bits of a document's flags.
CHANGED, REPAIRED = 1, 2

_HEADER = struct.Struct("<4sHHQQ32s")
CHUNK = 1 << 22
_COLUMNS = ("starts", "bytes", "hashes", "flags", "tokens")


@dataclass(frozen=True, eq=False)
class Shard:
    """The tokens of one split and its table of documents, mapped from the file."""

    tokens: npt.NDArray[Any]  # (T,) uint16 or uint32
    starts: npt.NDArray[np.int64]  # (D,)
    doc_bytes: npt.NDArray[np.int64]  # (D,)
    doc_hashes: npt.NDArray[np.uint8]  # (D, 32)
    flags: npt.NDArray[np.uint8]  # (D,) CHANGED | REPAIRED

    @property
    def num_tokens(self) -> int:
        """Number of tokens, with the BOS of each document."""
        return len(self.tokens)

    @property
    def num_documents(self) -> int:
        """Number of documents."""
        return len(self.starts)

    @property
    def num_bytes(self) -> int:
        """UTF-8 bytes of all source texts."""
        return int(self.doc_bytes.sum())

    def doc(self, index: int) -> npt.NDArray[Any]:
        """Tokens of one document, its BOS first."""
        if not 0 <= index < self.num_documents:
            raise IndexError(f"document {index} of {self.num_documents}")
        is_last = index + 1 == self.num_documents
        end = self.num_tokens if is_last else int(self.starts[index + 1])
        return self.tokens[int(self.starts[index]) : end]

    def parts(self, num_tokens: int) -> Iterator[tuple[int, "Shard"]]:
        """The shard cut at starts of documents, about so many tokens a part.

        Each part comes with the index of its first document.
        """
        cuts = np.searchsorted(self.starts, np.arange(0, self.num_tokens, num_tokens))
        firsts = np.unique(np.append(cuts, self.num_documents)).tolist()
        for first, end in pairwise(firsts):
            begin = int(self.starts[first])
            stop = int(self.starts[end]) if end < self.num_documents else self.num_tokens
            yield (
                first,
                Shard(
                    tokens=self.tokens[begin:stop],
                    starts=self.starts[first:end] - begin,
                    doc_bytes=self.doc_bytes[first:end],
                    doc_hashes=self.doc_hashes[first:end],
                    flags=self.flags[first:end],
                ),
            )


def pick_documents(shard: Shard, indices: Sequence[int]) -> Shard:
    """Some documents of a shard, as a shard."""
    documents = [shard.doc(index) for index in indices]
    lengths = np.array([len(tokens) for tokens in documents], dtype=np.int64)
    return Shard(
        tokens=np.concatenate([shard.tokens[:0], *documents]),
        starts=np.cumsum(lengths) - lengths,
        doc_bytes=shard.doc_bytes[indices],
        doc_hashes=shard.doc_hashes[indices],
        flags=shard.flags[indices],
    )


@dataclass(frozen=True, eq=False)
class Columns:
    """A batch of documents that goes into a shard."""

    tokens: npt.NDArray[Any]  # (N,) BOS first in every document
    source_bytes: npt.NDArray[np.int32] | None  # (N,) source bytes of each token
    counts: npt.NDArray[np.int64]  # (D,) tokens of each document, its BOS included
    doc_bytes: npt.NDArray[np.int64]  # (D,) UTF-8 length of the source text
    doc_hashes: npt.NDArray[np.uint8]  # (D, 32) SHA-256 of the source text
    flags: npt.NDArray[np.uint8]  # (D,) CHANGED | REPAIRED
    num_off_table: int = 0  # documents whose bytes differ from the sum over the token table

    @property
    def starts(self) -> npt.NDArray[np.int64]:
        """Index in `tokens` of the BOS of each document (D,)."""
        return np.cumsum(self.counts) - self.counts


def token_dtype(vocab_size: int) -> np.dtype[Any]:
    """The integer type that stores the tokens of a vocabulary."""
    return np.dtype("<u2" if vocab_size <= 1 << 16 else "<u4")


def _table_bytes(num_documents: int) -> list[int]:
    """Bytes of the tables before the tokens: starts, bytes, hashes, padded flags."""
    return [8 * num_documents, 8 * num_documents, 32 * num_documents, -(-num_documents // 8) * 8]


def open_shard(path: Path, vocab_size: int, verify: bool = True) -> Shard:
    """Map a shard; `verify` also reads the whole file: checksum, token ids, BOS positions."""
    try:
        with path.open("rb") as file:
            header = file.read(_HEADER.size)
            num_file_bytes = os.fstat(file.fileno()).st_size
    except OSError as error:
        raise DataError(f"{path}: shard cannot be read: {error.strerror}") from error
    width, num_tokens, num_documents, checksum = _parse_header(path, header)
    # Checked before the file is mapped. Python integers cannot overflow.
    tables = _table_bytes(num_documents)
    expected = _HEADER.size + sum(tables) + num_tokens * width
    if num_file_bytes != expected:
        raise DataError(f"{path}: file has {num_file_bytes} bytes, its header promises {expected}")
    # A plain array over the map: slices of a memmap object are several times slower.
    raw = np.asarray(np.memmap(path, dtype=np.uint8, mode="r"))
    columns = np.split(raw[_HEADER.size :], np.cumsum(tables))
    shard = Shard(
        tokens=columns[4].view("<u2" if width == 2 else "<u4"),
        starts=columns[0].view("<i8"),
        doc_bytes=columns[1].view("<i8"),
        doc_hashes=columns[2].reshape(num_documents, 32),
        flags=columns[3][:num_documents],
    )
    _check_table(path, shard)
    if verify:
        _check_payload(path, raw[_HEADER.size :], checksum)
        _check_tokens(path, shard, vocab_size)
    return shard


def _parse_header(path: Path, header: bytes) -> tuple[int, int, int, bytes]:
    if len(header) < _HEADER.size or not header.startswith(MAGIC):
        raise DataError(f"{path}: not an underpar shard, it must start with {MAGIC!r}")
    _, version, width, num_tokens, num_documents, checksum = _HEADER.unpack(header)
    if version != VERSION:
        raise DataError(f"{path}: shard version {version}, expected {VERSION}")
    if width not in (2, 4):
        raise DataError(f"{path}: {width} bytes per token, expected 2 or 4")
    return width, num_tokens, num_documents, checksum


def _check_table(path: Path, shard: Shard) -> None:
    starts = shard.starts
    if not shard.num_documents:
        if shard.num_tokens:
            raise DataError(f"{path}: {shard.num_tokens} tokens belong to no document")
        return
    if starts[0] != 0:
        raise DataError(f"{path}: the first document starts at token {starts[0]}, expected 0")
    falling = np.flatnonzero(starts[1:] <= starts[:-1])
    if falling.size:
        raise DataError(f"{path}: start of document {falling[0] + 1} does not increase")
    if starts[-1] >= shard.num_tokens:
        raise DataError(f"{path}: a document starts at or after the end, {shard.num_tokens}")
    if shard.doc_bytes.min() < 0 or shard.doc_bytes.max() >= MAX_TEXT_BYTES:
        raise DataError(f"{path}: a document claims {MAX_TEXT_BYTES} bytes or more")


def _check_payload(path: Path, payload: npt.NDArray[np.uint8], checksum: bytes) -> None:
    digest = hashlib.sha256()
    for chunk in _chunks(payload):
        digest.update(chunk.data)
    if digest.digest() != checksum:
        raise DataError(f"{path}: checksum does not match, the file is damaged")


def _check_tokens(path: Path, shard: Shard, vocab_size: int) -> None:
    num_bos = 0
    for chunk in _chunks(shard.tokens):
        if chunk.size and chunk.max() >= vocab_size:
            raise DataError(
                f"{path}: token id {chunk.max()} out of range, the tokenizer has {vocab_size}"
            )
        num_bos += int(np.count_nonzero(chunk == BOS_ID))
    without_bos = np.flatnonzero(shard.tokens[shard.starts] != BOS_ID)
    if without_bos.size:
        raise DataError(f"{path}: document {without_bos[0]} does not start with BOS")
    if num_bos != shard.num_documents:
        raise DataError(
            f"{path}: {num_bos} BOS tokens for {shard.num_documents} documents, "
            "a BOS stands inside a document"
        )


def _chunks(values: npt.NDArray[Any]) -> Iterator[npt.NDArray[Any]]:
    for begin in range(0, len(values), CHUNK):
        yield values[begin : begin + CHUNK]


class ShardWriter:
    """Write a shard batch by batch. The file appears complete; after an error it does not appear.

    Each column is collected in a temporary file next to the target, so memory does not grow.
    """

    def __init__(self, path: Path, vocab_size: int) -> None:
        self.path = path
        self.num_tokens = self.num_documents = self.num_bytes = 0
        self.num_changed = self.num_repaired = self.num_off_table = 0
        self._vocab_size = vocab_size
        self._dtype = token_dtype(vocab_size)
        self._documents = hashlib.sha256()
        self._part = path.with_name(path.name + ".part")
        self._files = {name: self._open_column(name) for name in _COLUMNS}

    def _open_column(self, name: str) -> IO[bytes]:
        return self.path.with_name(f"{self.path.name}.{name}.part").open("x+b")

    def __enter__(self) -> "ShardWriter":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            if kind is None:
                self._assemble()
        finally:
            for file in self._files.values():
                file.close()
                Path(file.name).unlink(missing_ok=True)
            self._part.unlink(missing_ok=True)

    @property
    def documents_sha256(self) -> str:
        """SHA-256 over the hashes of all documents, in order: identifies the text of the split."""
        return self._documents.hexdigest()

    def add(self, columns: Columns) -> None:
        """Append documents."""
        tokens, starts = columns.tokens, columns.starts
        assert tokens.size and 0 <= tokens.min() <= tokens.max() < self._vocab_size
        assert np.array_equal(np.flatnonzero(tokens == BOS_ID), starts)
        self._documents.update(columns.doc_hashes.tobytes())
        for name, values in (
            ("starts", (starts + self.num_tokens).astype("<u8")),
            ("bytes", columns.doc_bytes.astype("<u8")),
            ("hashes", columns.doc_hashes),
            ("flags", columns.flags),
            ("tokens", tokens.astype(self._dtype)),
        ):
            self._files[name].write(values.tobytes())
        self.num_tokens += len(tokens)
        self.num_documents += len(columns.counts)
        self.num_bytes += int(columns.doc_bytes.sum())
        self.num_changed += int(np.count_nonzero(columns.flags & CHANGED))
        self.num_repaired += int(np.count_nonzero(columns.flags & REPAIRED))
        self.num_off_table += columns.num_off_table

    def _assemble(self) -> None:
        digest = hashlib.sha256()
        with self._part.open("xb") as out:
            out.seek(_HEADER.size)
            for chunk in self._payload():
                digest.update(chunk)
                out.write(chunk)
            out.seek(0)
            width, checksum = self._dtype.itemsize, digest.digest()
            out.write(
                _HEADER.pack(MAGIC, VERSION, width, self.num_tokens, self.num_documents, checksum)
            )
        os.replace(self._part, self.path)

    def _payload(self) -> Iterator[bytes]:
        for name, file in self._files.items():
            file.seek(0)
            while chunk := file.read(CHUNK):
                yield chunk
            if name == "flags":
                yield bytes(-self.num_documents % 8)
