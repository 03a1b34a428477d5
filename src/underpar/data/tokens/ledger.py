"""The byte ledger: how many bytes of the source text each token stands for.

Bytes come from the source text, never from the spelling of a piece: tokens are spans of the
transformed text, and the transform's byte law says what each of its code points is worth. A code
point counts where it ends, so of the byte tokens of one character the last gets all its bytes, as
in the published sidecars.
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
    """Source bytes of each span [begin, end) of a transformed text, in bytes of its UTF-8."""
    bounds = np.cumsum(utf8_lengths(written))
    credit = np.append(0, np.cumsum(transform.source_bytes(written)))
    # Code points that end at or before an offset are paid for there.
    return (
        credit[np.searchsorted(bounds, ends, side="right")]
        - credit[np.searchsorted(bounds, begins, side="right")]
    )


def surfaces(proto: bytes) -> tuple[list[int], list[int], list[int]]:
    """Ids, begins and ends of a serialized SentencePieceText, in bytes of the encoder's input.

    Read by hand: the library's own reader needs the protobuf package, and the one that did not
    was taken out in sentencepiece 0.2.2.
    """
    found: tuple[list[int], list[int], list[int]] = ([], [], [])
    for field, piece in _fields(proto):
        if field == 2 and isinstance(piece, bytes):
            values = dict(_fields(piece))
            # id, begin and end; a field that is left out is 0.
            for column, number in zip(found, (2, 4, 5), strict=True):
                column.append(int(values.get(number, 0)))
    return found


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
            # Fixed 32 bits, the score; nothing else occurs in these messages.
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
