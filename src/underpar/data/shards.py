"""Token files: the tokens of one split, with a table of its documents.

Layout, little-endian:

    offset  type              content
    0       4 bytes           magic "UPSH"
    4       u16               version, 1
    6       u16               bytes per token, 2 or 4
    8       u64               number of tokens T, BOS included
    16      u64               number of documents D
    24      32 bytes          SHA-256 of everything that follows
    56      u64[D]            document starts, in tokens
    ...     u64[D]            document bytes, the UTF-8 length of the source text
    ...     32 bytes [D]      SHA-256 of the source text
    ...     u16[T] or u32[T]  tokens; every document is [BOS] + tokens, no EOS
"""

import hashlib
import os
import struct
from array import array
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import IO, Any

import numpy as np
import numpy.typing as npt

from underpar.errors import DataError
from underpar.seams import BOS_ID

MAGIC = b"UPSH"
VERSION = 1
# A u64 sum of document bytes cannot overflow below this.
MAX_TEXT_BYTES = 1 << 40

_HEADER = struct.Struct("<4sHHQQ32s")
_DOCUMENT_BYTES = 8 + 8 + 32
_CHUNK = 1 << 22


@dataclass(frozen=True, eq=False)
class Shard:
    """The tokens of one split, mapped from its file."""

    tokens: npt.NDArray[Any]  # (T,) uint16 or uint32
    starts: npt.NDArray[np.int64]  # (D,)
    doc_bytes: npt.NDArray[np.int64]  # (D,)
    doc_hashes: npt.NDArray[np.uint8]  # (D, 32)

    @property
    def num_tokens(self) -> int:
        """Tokens, each document's BOS included."""
        return len(self.tokens)

    @property
    def num_documents(self) -> int:
        """Documents."""
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


def open_shard(path: Path, vocab_size: int, verify: bool = True) -> Shard:
    """Map a shard; `verify` also reads all of it: checksum, token ids and BOS positions."""
    try:
        with path.open("rb") as file:
            header = file.read(_HEADER.size)
            num_file_bytes = os.fstat(file.fileno()).st_size
    except OSError as error:
        raise DataError(f"{path}: shard cannot be read: {error.strerror}") from error
    width, num_tokens, num_documents, checksum = _parse_header(path, header)
    # Checked before anything is mapped or allocated, in integers that cannot overflow.
    expected = _HEADER.size + num_documents * _DOCUMENT_BYTES + num_tokens * width
    if num_file_bytes != expected:
        raise DataError(f"{path}: file has {num_file_bytes} bytes, its header promises {expected}")
    # A plain view of the map: slicing the memmap class itself is several times slower.
    raw = np.asarray(np.memmap(path, dtype=np.uint8, mode="r"))
    tables = _HEADER.size + 8 * num_documents * np.arange(3)
    tokens_at = _HEADER.size + num_documents * _DOCUMENT_BYTES
    shard = Shard(
        tokens=raw[tokens_at:].view("<u2" if width == 2 else "<u4"),
        starts=raw[tables[0] : tables[1]].view("<i8"),
        doc_bytes=raw[tables[1] : tables[2]].view("<i8"),
        doc_hashes=raw[tables[2] : tokens_at].reshape(num_documents, 32),
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
        raise DataError(f"{path}: shard version {version}, expected {VERSION}; build it again")
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
        raise DataError(f"{path}: checksum does not match, the file is damaged; build it again")


def _check_tokens(path: Path, shard: Shard, vocab_size: int) -> None:
    num_bos = 0
    for chunk in _chunks(shard.tokens):
        if chunk.max() >= vocab_size:
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
    for begin in range(0, len(values), _CHUNK):
        yield values[begin : begin + _CHUNK]


class ShardWriter:
    """Write a shard document by document; the file appears whole, or not at all on an error.

    Memory: 48 bytes a document. Tokens wait in a temporary file beside the target.
    """

    def __init__(self, path: Path, vocab_size: int) -> None:
        self.path = path
        self.num_tokens = 0
        self._vocab_size = vocab_size
        self._dtype = np.dtype("<u2" if vocab_size <= 1 << 16 else "<u4")
        self._starts = array("Q")
        self._doc_bytes = array("Q")
        self._hashes = bytearray()
        self._part = path.with_name(path.name + ".part")
        self._tokens_file = path.with_name(path.name + ".tokens.part")
        self._tokens: IO[bytes] = self._tokens_file.open("w+b")

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
            self._tokens.close()
            self._tokens_file.unlink(missing_ok=True)
            self._part.unlink(missing_ok=True)

    @property
    def num_documents(self) -> int:
        """Documents added so far."""
        return len(self._starts)

    @property
    def num_bytes(self) -> int:
        """UTF-8 bytes of the documents added so far."""
        return sum(self._doc_bytes)

    def add(self, tokens: npt.NDArray[Any], num_bytes: int, hash_hex: str) -> None:
        """Append a document: its tokens without BOS, its UTF-8 length and its SHA-256."""
        framed = np.concatenate([[BOS_ID], tokens])
        assert 0 <= framed.min() <= framed.max() < self._vocab_size
        assert np.count_nonzero(framed == BOS_ID) == 1
        self._starts.append(self.num_tokens)
        self._doc_bytes.append(num_bytes)
        self._hashes += bytes.fromhex(hash_hex)
        self._tokens.write(framed.astype(self._dtype).tobytes())
        self.num_tokens += len(framed)

    def _assemble(self) -> None:
        digest = hashlib.sha256()
        with self._part.open("wb") as out:
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
        for column in (self._starts, self._doc_bytes):
            yield np.frombuffer(column, dtype=np.uint64).astype("<u8").tobytes()
        yield bytes(self._hashes)
        self._tokens.seek(0)
        while chunk := self._tokens.read(_CHUNK):
            yield chunk
