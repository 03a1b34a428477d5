"""The compressed file: header, payload, index, trailer. Nothing in it is believed before its check.

Layout, little-endian. docs/codec.md explains each field.

    4 bytes   magic "UPZ2"
    u8        mode: 0 stored, 1 plain, 2 adapted, 3 exact
    u16       lanes
    u32       documents
    u64       length of the original
    u64       length of the payload
    u64       length of the index
    8 bytes   start of the artifact's SHA-256
    8 bytes   start of the original's SHA-256
    u8, text  machine: whose floats the probabilities are; empty if any machine has the same
    u8, text  note: what the mode adds, such as a digest of its settings
    u8, bytes separator between documents; empty if documents are cuts of one text
    u32       CRC-32 of all of the above
    payload, index
    4 bytes   magic "UPZE"
    u8        1 if the file was decoded before it was written, else 0
    u32       CRC-32 of payload, index and the five bytes before this field
"""

from __future__ import annotations

import struct
import zlib
from dataclasses import dataclass

from underpar.errors import CodecError

MAGIC, END_MAGIC = b"UPZ2", b"UPZE"
STORED, PLAIN, ADAPTED, EXACT = MODES = range(4)
MODE_NAMES = ("stored", "plain", "adapted", "exact")

# More lanes need more memory than any encoder here uses.
MAX_LANES = 1024
MAX_SEPARATOR_BYTES = 255
# The most text that a byte of payload may stand for, and the most that any payload may. An encoder
# stores text beyond that, so a header that claims more is a lie and costs no memory.
MOST_PER_BYTE, MOST_OF_ANY = 1 << 14, 1 << 20

_FIXED = struct.Struct("<4sBHIQQQ8s8s")
_TRAILER = struct.Struct("<4sBI")


@dataclass(frozen=True)
class Header:
    """The facts that a decoder needs before the first token."""

    mode: int
    artifact: bytes
    num_lanes: int
    num_documents: int
    num_bytes: int
    checksum: bytes
    machine: str = ""
    note: str = ""
    separator: bytes = b""

    def to_bytes(self, num_payload_bytes: int, num_index_bytes: int) -> bytes:
        """The header with its CRC."""
        raw = _FIXED.pack(
            MAGIC,
            self.mode,
            self.num_lanes,
            self.num_documents,
            self.num_bytes,
            num_payload_bytes,
            num_index_bytes,
            self.artifact,
            self.checksum,
        )
        for text in (self.machine.encode("ascii"), self.note.encode("ascii"), self.separator):
            raw += struct.pack("<B", len(text)) + text
        return raw + struct.pack("<I", zlib.crc32(raw))


@dataclass(frozen=True)
class Frame:
    """A compressed file in parts."""

    header: Header
    payload: bytes
    index: bytes = b""
    verified: bool = True
    """Whether the writer decoded the file before it reported success."""

    def to_bytes(self) -> bytes:
        """The whole file."""
        body = self.payload + self.index
        end = END_MAGIC + bytes([self.verified])
        checksum = zlib.crc32(end, zlib.crc32(body))
        head = self.header.to_bytes(len(self.payload), len(self.index))
        return b"".join((head, body, end, struct.pack("<I", checksum)))


def read_frame(data: bytes) -> Frame:
    """The parts of a compressed file; other, damaged, cut or joined files are refused."""
    if data[:4] != MAGIC or len(data) < _FIXED.size:
        told = "wrong magic"
        if data[:4] == b"UPZ1":
            told = "it is of an earlier version, which decodes it"
        raise CodecError(f"not a file of this version of 'underpar compress' ({told})")
    values = _FIXED.unpack_from(data)
    _, mode, lanes, documents, num_bytes, num_payload, num_index, artifact, checksum = values
    texts, end = [], _FIXED.size
    for _ in range(3):
        length = data[end] if end < len(data) else 0
        texts.append(data[end + 1 : end + 1 + length])
        end += 1 + length
    if len(data) < end + 4 or struct.unpack_from("<I", data, end)[0] != zlib.crc32(data[:end]):
        raise CodecError("compressed file's header is damaged or cut short")
    begin = end + 4
    length = begin + num_payload + num_index + _TRAILER.size
    if len(data) != length:
        how = "cut short" if len(data) < length else "followed by other data"
        raise CodecError(f"compressed file is {how}: {len(data)} bytes, expected {length}")
    machine, note = (text.decode("ascii", "replace") for text in texts[:2])
    header = Header(
        mode, artifact, lanes, documents, num_bytes, checksum, machine, note, bytes(texts[2])
    )
    body = data[begin : -_TRAILER.size]
    end_magic, verified, crc = _TRAILER.unpack_from(data, length - _TRAILER.size)
    if end_magic != END_MAGIC or crc != zlib.crc32(data[begin:-4]) or verified > 1:
        raise CodecError("compressed file is damaged: its checksum does not match")
    if not is_plausible(header, num_payload):
        raise CodecError("compressed file's header makes no sense: damaged")
    return Frame(header, body[:num_payload], body[num_payload:], bool(verified))


def is_plausible(header: Header, num_payload_bytes: int) -> bool:
    """Whether an encoder may have written this header before such a payload."""
    if header.mode == STORED:
        return header.num_bytes == num_payload_bytes
    num, separator = header.num_documents, len(header.separator)
    # Documents are cuts, none of them empty, or stand between separators.
    most = header.num_bytes // separator + 1 if separator else header.num_bytes
    return (
        header.mode in MODES
        and 1 <= header.num_lanes <= MAX_LANES
        and 1 <= num <= min(most, MOST_OF_ANY + MOST_PER_BYTE * num_payload_bytes)
        and header.num_bytes <= MOST_OF_ANY + MOST_PER_BYTE * num_payload_bytes
    )
