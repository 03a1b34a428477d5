"""Files of 16-bit values in the published FineWeb format: map one and check it.

Layout, little-endian:

    offset  type           content
    0       i32[256]       20240520, version 1, number of values n, then zeros
    1024    u16[n]         token ids; in a sidecar, the source bytes of each token

The byte sidecar of a data folder has this format too. The counted script therefore carries this
module, but not the rest of `published`.
"""

import os
from pathlib import Path

import numpy as np
import numpy.typing as npt

from underpar.errors import DataError

MAGIC = 20240520
VERSION = 1
HEADER_INTS = 256
HEADER_BYTES = 4 * HEADER_INTS


def open_values(path: Path) -> npt.NDArray[np.uint16]:
    """Map the values of one file."""
    try:
        with path.open("rb") as file:
            num_values = _parse_header(path, file.read(HEADER_BYTES))
            num_file_bytes = os.fstat(file.fileno()).st_size
            # Checked before the file is mapped. An incomplete download fails here.
            expected = HEADER_BYTES + 2 * num_values
            if num_file_bytes != expected:
                raise DataError(
                    f"{path}: file has {num_file_bytes} bytes, its header promises {expected}; "
                    "fetch it again, as with 'underpar data fetch'"
                )
            # A plain array over the map: slices of a memmap object are several times slower.
            raw = np.asarray(np.memmap(file, dtype=np.uint8, mode="r"))
    except OSError as error:
        raise DataError(f"{path}: token file cannot be read: {error.strerror}") from error
    return raw[HEADER_BYTES:].view("<u2")


def _parse_header(path: Path, header: bytes) -> int:
    if len(header) < HEADER_BYTES:
        raise DataError(f"{path}: {len(header)} bytes, a token file has at least {HEADER_BYTES}")
    magic, version, num_values, *reserved = np.frombuffer(header, dtype="<i4").tolist()
    if magic != MAGIC:
        raise DataError(f"{path}: not a published token file, magic is {magic}, expected {MAGIC}")
    if version != VERSION:
        raise DataError(f"{path}: token file version {version}, expected {VERSION}")
    if any(reserved):
        at = next(i for i, value in enumerate(reserved) if value)
        raise DataError(f"{path}: header integer {3 + at} is {reserved[at]}, expected 0")
    if num_values < 0:
        raise DataError(f"{path}: header promises {num_values} values, expected 0 or more")
    return int(num_values)
