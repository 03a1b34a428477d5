"""The byte ledger: how many bytes of the source text each token stands for.

Bytes are counted in the source text, not in the spelling of a piece. A token is a span of the
transformed text, and the transform states the source bytes of each code point that it writes. A
code point counts for the token in which it ends: of several byte tokens of one character, the last
gets all bytes of the character, as in the published sidecars.
"""

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from underpar.data.transforms import utf8_lengths
from underpar.seams import TextTransform

Offsets = npt.NDArray[np.int64]


def span_source_bytes(
    written: str, begins: Offsets, ends: Offsets, transform: TextTransform
) -> npt.NDArray[np.int64]:
    """Source bytes of each span; spans are offsets [begin, end) in the UTF-8 of `written`."""
    bounds = np.cumsum(utf8_lengths(written))
    # totals[i] is the source bytes of the first i code points.
    totals = np.append(0, np.cumsum(transform.source_bytes(written)))
    # The code points that end at or before an offset count for the text before the offset.
    return (
        totals[np.searchsorted(bounds, ends, side="right")]
        - totals[np.searchsorted(bounds, begins, side="right")]
    )


def surfaces(proto: bytes) -> tuple[list[int], list[int], list[int]]:
    """Ids, begins and ends of a serialized SentencePieceText, in bytes of the encoder's input.

    Parsed here, because the reader of the library needs the protobuf package; sentencepiece 0.2.2
    removed the reader that did not.
    """
    columns: tuple[list[int], list[int], list[int]] = ([], [], [])
    for field, piece in _fields(proto):
        if field == 2 and isinstance(piece, bytes):
            values = dict(_fields(piece))
            # Fields 2, 4 and 5 are id, begin and end. A missing field is 0.
            for column, number in zip(columns, (2, 4, 5), strict=True):
                column.append(int(values.get(number, 0)))
    return columns


def _fields(message: bytes) -> Iterator[tuple[int, int | bytes]]:
    at = 0
    while at < len(message):
        key, at = _varint(message, at)
        field, kind = key >> 3, key & 7
        if kind == 0:
            value, at = _varint(message, at)
            yield field, value
        elif kind == 2:
            size, at = _varint(message, at)
            yield field, message[at : at + size]
            at += size
        else:
            # A field of 32 bits: the score. These messages have no other types.
            assert kind == 5
            at += 4


def _varint(message: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = message[at]
        value |= (byte & 0x7F) << shift
        at, shift = at + 1, shift + 7
        if byte < 0x80:
            return value, at
