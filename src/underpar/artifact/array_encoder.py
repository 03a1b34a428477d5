"""Encoder of arrays of symbols: writes the streams that array_decoder.py reads."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from underpar.artifact.array_decoder import choose_num_coders, cut_rounds
from underpar.artifact.frequencies import check_freqs
from underpar.artifact.rans_decoder import make_block
from underpar.artifact.rans_encoder import Encoder
from underpar.errors import ArtifactError


def encode(symbols: np.ndarray, freqs: np.ndarray, *, num_coders: int | None = None) -> bytes:
    """The stream of a 1-D array of symbols 0..len(freqs)-1."""
    return encode_many([symbols], [freqs], num_coders=num_coders)[0]


def encode_many(
    arrays: Sequence[np.ndarray], freqs: Sequence[np.ndarray], *, num_coders: int | None = None
) -> list[bytes]:
    """The stream of each array under its frequencies: what `encode` gives, but faster."""
    if not arrays:
        return []
    arrays, tables = [*map(np.asarray, arrays)], [*map(check_freqs, freqs)]
    for symbols, table in zip(arrays, tables, strict=True):
        _check_symbols(symbols, table)
    coders = [num_coders or choose_num_coders(a.size) for a in arrays]
    firsts = np.cumsum([0, *(table.size for table in tables[:-1])], dtype=np.int32)
    starts = [np.cumsum(table, dtype=np.uint32) - table for table in tables]
    encoder = Encoder(coders, np.concatenate(tables), np.concatenate(starts))
    for part in reversed(cut_rounds([a.size for a in arrays], coders)):
        rounds = [
            a[part.begin * n :][: part.num_rounds * k].reshape(part.num_rounds, k)
            for a, n, k in zip(arrays, coders, part.active, strict=True)
        ]
        places = np.concatenate(rounds, axis=1, dtype=np.int32, casting="unsafe")
        places += np.repeat(firsts, part.active)
        encoder.write(make_block(places, part.active, coders))
    return encoder.finish()


def _check_symbols(symbols: np.ndarray, table: np.ndarray) -> None:
    """Refuse symbols that the table cannot code."""
    if symbols.ndim != 1 or symbols.dtype.kind not in "iu":
        raise ArtifactError(
            f"symbols of shape {symbols.shape} and type {symbols.dtype}: "
            "expected a 1-D integer array"
        )
    if symbols.size and (symbols.min() < 0 or symbols.max() >= table.size):
        raise ArtifactError(
            f"symbols {symbols.min()}..{symbols.max()}: expected 0..{table.size - 1}"
        )
    counts = np.bincount(symbols.astype(np.int64, copy=False), minlength=table.size)
    missing = np.flatnonzero((counts > 0) & (table == 0))
    if missing.size:
        raise ArtifactError(f"symbol {missing[0]} occurs but has frequency 0 in the table")
