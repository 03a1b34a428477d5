"""Byte layout of a container: a checked frame around named sections. Version 3, little-endian.

| offset | field                                                          |
|--------|----------------------------------------------------------------|
| 0      | magic "UPAR"                                                   |
| 4      | u16 version                                                    |
| 6      | u16 number of sections n                                       |
| 8      | u64 length of the whole file                                   |
| 16     | 32 bytes: SHA-256 of bytes 0..16 and of everything from byte 48 |
| 48     | n x u64 section lengths                                        |
| ...    | the sections, end to end                                       |
"""

from __future__ import annotations

import hashlib
import lzma
import struct
from collections.abc import Sequence

from underpar.errors import ArtifactError

MAGIC = b"UPAR"
VERSION = 3
HEAD = struct.Struct("<4sHHQ")
HEAD_BYTES = HEAD.size + 32

# Raw LZMA without magic, checksum and padding, which the frame has already.
LZMA_FILTERS = [{"id": lzma.FILTER_LZMA2, "preset": 9 | lzma.PRESET_EXTREME, "dict_size": 1 << 22}]


def frame(sections: Sequence[bytes]) -> bytes:
    """The sections as one checked file."""
    body = b"".join(struct.pack("<Q", len(s)) for s in sections) + b"".join(sections)
    head = HEAD.pack(MAGIC, VERSION, len(sections), HEAD_BYTES + len(body))
    return head + hashlib.sha256(head + body).digest() + body


def unframe(data: bytes, num_sections: int) -> list[bytes]:
    """The sections of a file; a damaged, cut or foreign file is refused."""
    if len(data) < HEAD_BYTES or data[:4] != MAGIC:
        raise ArtifactError("not an underpar artifact (wrong magic); expected a .upar file")
    _, version, count, length = HEAD.unpack_from(data)
    if version != VERSION:
        raise ArtifactError(f"artifact version {version}; this underpar reads version {VERSION}")
    if length != len(data):
        raise ArtifactError(
            f"artifact has {len(data)} bytes, its header says {length}: cut or grown"
        )
    head, digest, body = data[: HEAD.size], data[HEAD.size : HEAD_BYTES], data[HEAD_BYTES:]
    if hashlib.sha256(head + body).digest() != digest:
        raise ArtifactError("artifact checksum differs: the file is damaged")
    if count != num_sections or len(body) < 8 * count:
        raise ArtifactError(f"artifact has {count} sections, expected {num_sections}")
    lengths = struct.unpack_from(f"<{count}Q", body)
    if sum(lengths) + 8 * count != len(body):
        raise ArtifactError("artifact sections do not fill the file")
    sections, at = [], 8 * count
    for size in lengths:
        sections.append(body[at : at + size])
        at += size
    return sections


def squeeze(data: bytes) -> bytes:
    """LZMA without framing."""
    return lzma.compress(data, format=lzma.FORMAT_RAW, filters=LZMA_FILTERS)


def unsqueeze(data: bytes, limit_bytes: int) -> bytes:
    """Undo `squeeze`; more than `limit_bytes` of output is refused before it is made."""
    decoder = lzma.LZMADecompressor(format=lzma.FORMAT_RAW, filters=LZMA_FILTERS)
    try:
        out = decoder.decompress(data, max_length=limit_bytes + 1)
    except lzma.LZMAError as error:
        raise ArtifactError(f"artifact section does not decompress: {error}") from error
    if len(out) > limit_bytes:
        raise ArtifactError(f"artifact section grows past {limit_bytes} bytes")
    if not decoder.eof or decoder.unused_data:
        raise ArtifactError("artifact section is cut short or has bytes to spare")
    return out
