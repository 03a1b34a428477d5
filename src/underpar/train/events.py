"""Scalars for TensorBoard, without its package: event files that grow by one record a call.

A record is a TFRecord (length, masked CRC-32C of it, data, masked CRC-32C of them) around an Event
message, whose fields are numbered in tensorflow/core/util/event.proto and summary.proto.
"""

from __future__ import annotations

import struct
import time
from collections.abc import Mapping
from pathlib import Path

FILE_VERSION = b"brain.Event:2"
# Castagnoli's polynomial, bits reversed.
CRC_POLYNOMIAL = 0x82F63B78
MASK_DELTA = 0xA282EAD8

# Wire types of protocol buffers.
VARINT, FIXED64, BYTES, FIXED32 = 0, 1, 2, 5
# SessionLog.START.
START = 1


def _crc_table() -> tuple[int, ...]:
    table = []
    for crc in range(256):
        for _ in range(8):
            crc = crc >> 1 ^ (CRC_POLYNOMIAL if crc & 1 else 0)
        table.append(crc)
    return tuple(table)


CRC_TABLE = _crc_table()


def crc32c(data: bytes) -> int:
    """CRC-32C (RFC 3720, appendix B.4)."""
    crc = 0xFFFFFFFF
    for byte in data:
        crc = CRC_TABLE[(crc ^ byte) & 0xFF] ^ crc >> 8
    return crc ^ 0xFFFFFFFF


def masked_crc(data: bytes) -> int:
    """The CRC as TFRecord stores it: rotated and shifted, so that a CRC of CRCs stays sound."""
    crc = crc32c(data)
    return ((crc >> 15 | crc << 17) + MASK_DELTA) & 0xFFFFFFFF


def frame(data: bytes) -> bytes:
    """One TFRecord."""
    length = struct.pack("<Q", len(data))
    return b"".join(
        (length, struct.pack("<I", masked_crc(length)), data, struct.pack("<I", masked_crc(data)))
    )


def _varint(value: int) -> bytes:
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes((*out, value))


def _key(number: int, wire: int) -> bytes:
    return _varint(number << 3 | wire)


def _bytes(number: int, data: bytes) -> bytes:
    return _key(number, BYTES) + _varint(len(data)) + data


def _event(step: int, body: bytes) -> bytes:
    wall_time = _key(1, FIXED64) + struct.pack("<d", time.time())
    return frame(wall_time + _key(2, VARINT) + _varint(step) + body)


def _scalar(tag: str, value: float) -> bytes:
    number = _key(2, FIXED32) + struct.pack("<f", value)
    return _bytes(1, _bytes(1, tag.encode()) + number)


class EventWriter:
    """A new event file in `folder` from the first call on: TensorBoard expects one a start.

    What earlier files say of its first step and of later ones was lost with a kill; TensorBoard
    drops it.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.path: Path | None = None

    def write(self, step: int, values: Mapping[str, object]) -> None:
        """Add the numbers among `values`, by name; they are stored as fp32."""
        numbers = {k: v for k, v in values.items() if isinstance(v, int | float)}
        summary = b"".join(_scalar(tag, value) for tag, value in numbers.items())
        self.path = self.path or self._begin(step)
        with self.path.open("ab") as file:
            file.write(_event(step, _bytes(5, summary)))

    def _begin(self, step: int) -> Path:
        # Readers take files in the order of their names.
        path = self.folder / f"events.out.tfevents.{time.time_ns()}"
        session = _bytes(7, _key(1, VARINT) + _varint(START))
        with path.open("xb") as file:
            file.write(_event(0, _bytes(3, FILE_VERSION)) + _event(step, session))
        return path
