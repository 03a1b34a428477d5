"""Decoder of arrays of symbols, one frequency table per array, with interleaved rANS coders.

Symbol i belongs to coder i mod num_coders. A stream holds neither the number of coders, which
follows from the length of the array, nor the frequencies, which the caller knows. array_encoder.py
writes the streams, rans_decoder.py has their layout.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from underpar.artifact.frequencies import PROB_BITS, check_freqs
from underpar.artifact.rans_decoder import Decoder, make_block, pack_slots
from underpar.errors import ArtifactError

# A coder costs about 3 bytes per stream: 0.1 % of its share of a stream at this length.
_SYMBOLS_PER_CODER = 8192
_MAX_CODERS = 1024
# A small array is a small part of an artifact, but with so few coders it would take as long to
# decode as a large one.
_SMALL_SYMBOLS = 1 << 16
_SYMBOLS_PER_SMALL_CODER = 512
# The lookup tables of this many streams take 32 MB.
_STREAMS_AT_ONCE = 256


def choose_num_coders(num_symbols: int) -> int:
    """How many coders encoder and decoder use for an array: a power of two in 1..1024."""
    small = num_symbols < _SMALL_SYMBOLS
    symbols_per_coder = _SYMBOLS_PER_SMALL_CODER if small else _SYMBOLS_PER_CODER
    wanted = min(max(num_symbols // symbols_per_coder, 1), _MAX_CODERS)
    return 1 << (wanted.bit_length() - 1)


def decode(
    data: bytes, freqs: np.ndarray, num_symbols: int, *, num_coders: int | None = None
) -> np.ndarray:
    """The int16 symbols of a stream; anything but an exact stream of that length is refused."""
    return decode_many([data], [freqs], [num_symbols], num_coders=num_coders)[0]


def decode_many(
    streams: Sequence[bytes],
    freqs: Sequence[np.ndarray],
    sizes: Sequence[int],
    *,
    num_coders: int | None = None,
) -> list[np.ndarray]:
    """The int16 symbols of each stream: what `decode` gives, but faster."""
    arrays: list[np.ndarray] = []
    for begin in range(0, len(streams), _STREAMS_AT_ONCE):
        some = slice(begin, begin + _STREAMS_AT_ONCE)
        arrays += _decode_some(streams[some], freqs[some], sizes[some], num_coders)
    return arrays


def _decode_some(
    streams: Sequence[bytes],
    freqs: Sequence[np.ndarray],
    sizes: Sequence[int],
    num_coders: int | None,
) -> list[np.ndarray]:
    tables = [*map(check_freqs, freqs)]
    if min(sizes) < 0:
        raise ArtifactError(f"weight stream of {min(sizes)} symbols: expected 0 or more")
    coders = [num_coders or choose_num_coders(size) for size in sizes]
    decoder = Decoder(streams, coders)
    slots = np.concatenate([pack_slots(np.arange(table.size), table) for table in tables])
    outs = [np.empty(size, dtype=np.int16) for size in sizes]
    for part in cut_rounds(sizes, coders):
        places = np.repeat(np.arange(len(tables)) << PROB_BITS, part.active)
        places = np.broadcast_to(places, (part.num_rounds, places.size))
        block = make_block(places, part.active, coders)
        parts = np.split(decoder.read(block, slots), block.bounds[1:-1], axis=1)
        for out, n, symbols in zip(outs, coders, parts, strict=True):
            out[part.begin * n :][: symbols.size] = symbols.reshape(-1)
    decoder.finish()
    return outs


class _Part(NamedTuple):
    """Rounds in which the same coders have a symbol."""

    begin: int
    num_rounds: int
    active: list[int]
    """Coders of each stream that act, counted from its first."""


def cut_rounds(sizes: Sequence[int], num_coders: Sequence[int]) -> list[_Part]:
    """Cut the rounds of streams that are coded together; a coder has one symbol per round."""
    whole = [divmod(size, n) for size, n in zip(sizes, num_coders, strict=True)]
    ends = sorted({0} | {r for r, _ in whole} | {r + 1 for r, left in whole if left})
    parts = []
    for begin, end in pairwise(ends):
        active = [
            n if end <= rounds else left * (begin == rounds)
            for n, (rounds, left) in zip(num_coders, whole, strict=True)
        ]
        parts.append(_Part(begin, end - begin, active))
    return parts
