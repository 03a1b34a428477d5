"""Artifact -> bytes: recipe, tokenizer, and tensors with entropy-coded integers.

unpack.py says what each section of the file holds, and docs/format.md specifies every byte.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from underpar.artifact import array_encoder, matrix_encoder
from underpar.artifact.format import frame, squeeze
from underpar.artifact.frequencies import normalize_counts
from underpar.artifact.table import read_header
from underpar.artifact.unpack import (
    LINE_WIDTH,
    NUM_SECTIONS,
    Artifact,
    Key,
    check_codes,
    steps_of,
    unpack,
)
from underpar.errors import ArtifactError
from underpar.quant.logsteps import LARGEST_INDEX
from underpar.quant.schemes import QuantizedModel, QuantizedTensor
from underpar.quant.trellis import next_state
from underpar.recipe import to_tree

__all__ = ["NUM_SECTIONS", "Artifact", "pack", "unpack"]

Rows = dict[str, dict[str, Any]]


def pack(artifact: Artifact, tokenizer_inside: bool = True) -> bytes:
    """The artifact as one file; equal artifacts give equal bytes.

    If the tokenizer stays outside, the file holds its SHA-256 and its squeezed length.
    """
    tensors, activations = artifact.tensors, artifact.activations
    rows: Rows = {
        name: {"name": name, "shape": list(t.shape), "scheme": str(t.scheme)}
        for name, t in tensors.items()
    }
    for name in activations:
        if name not in rows:
            raise ArtifactError(f"activation scale of {name!r}, which is no tensor")
        rows[name]["activation"] = True
    streams = _encode_grids(tensors, rows) | _encode_ints(tensors, rows)
    tokenizer = squeeze(artifact.tokenizer)
    header = {"recipe": to_tree(artifact.recipe), "tensors": [*rows.values()]}
    if not tokenizer_inside:
        digest = hashlib.sha256(artifact.tokenizer).hexdigest()
        header["tokenizer"] = {"sha256": digest, "bytes": len(tokenizer)}
        tokenizer = b""
    raw = json.dumps(header, sort_keys=True).encode()
    # Refuse now what unpacking would refuse.
    read_header(raw)
    lines = [line for t in tensors.values() for line in lines_of(t)]
    lines.append(np.array([activations[n] for n in tensors if n in activations], dtype=np.int64))
    halves = [t.steps.reshape(-1) for t in tensors.values() if not t.scheme.has_log_rows]
    return frame(
        [
            squeeze(raw),
            tokenizer,
            squeeze(shuffle(np.concatenate([np.empty(0, dtype=np.float16), *halves]))),
            write_lines(lines),
            b"".join(streams.get((name, 0), b"") for name in tensors),
            b"".join(streams.get((name, side), b"") for name in tensors for side in (1, 2)),
        ]
    )


def lines_of(tensor: QuantizedTensor) -> list[np.ndarray]:
    """The log steps of a tensor: those of rows, columns and factors, as far as it has them."""
    lines = [tensor.steps] if tensor.scheme.has_log_rows else []
    lines += [] if tensor.columns is None else [tensor.columns]
    if tensor.correction is not None:
        lines += [tensor.correction.left.steps, tensor.correction.right.steps]
    return lines


def _encode_grids(tensors: QuantizedModel, rows: Rows) -> dict[Key, bytes]:
    """The streams of grids; grids with the same trellis are encoded together, which is faster."""
    streams: dict[Key, bytes] = {}
    for states in sorted({t.scheme.states for t in tensors.values()} - {0}):
        grids = {name: t for name, t in tensors.items() if t.scheme.states == states}
        encoded = matrix_encoder.encode_many(
            [t.codes for t in grids.values() if t.codes is not None],
            next_state(states),
            [steps_of(t.scheme, lines_of(t)) for t in grids.values()],
        )
        for name, stream in zip(grids, encoded, strict=True):
            streams[name, 0] = stream
            rows[name]["bytes"] = len(stream)
    return streams


def _encode_ints(tensors: QuantizedModel, rows: Rows) -> dict[Key, bytes]:
    """The streams of all other integers; adds to the rows what decoding needs."""
    codes: dict[Key, np.ndarray] = {}
    tables: dict[Key, dict[str, Any]] = {}
    for name, tensor in tensors.items():
        check_codes(name, tensor)
        if tensor.scheme.bits and tensor.codes is not None:
            codes[name, 0], tables[name, 0] = tensor.codes, rows[name]
        if tensor.correction is not None:
            left, right = tensor.correction.left, tensor.correction.right
            rows[name]["correction"] = {"rank": len(right.codes)}
            for side, key, factor in ((1, "left", left), (2, "right", right)):
                codes[name, side] = factor.codes
                tables[name, side] = {"group": factor.group}
                rows[name]["correction"][key] = tables[name, side]
    return _encode_arrays(codes, tables)


def _encode_arrays(
    codes: Mapping[Key, np.ndarray], tables: Mapping[Key, dict[str, Any]]
) -> dict[Key, bytes]:
    lows = {key: int(array.min()) for key, array in codes.items()}
    symbols = [array.reshape(-1).astype(np.int16) - lows[key] for key, array in codes.items()]
    freqs = [normalize_counts(np.bincount(array)) for array in symbols]
    streams = dict(zip(codes, array_encoder.encode_many(symbols, freqs), strict=True))
    for (key, stream), table in zip(streams.items(), freqs, strict=True):
        tables[key] |= {"low": lows[key], "freqs": table.tolist(), "bytes": len(stream)}
    return streams


def shuffle(numbers: np.ndarray) -> bytes:
    """fp16 numbers as all high bytes, then all low bytes."""
    # High bytes repeat and low bytes hardly do, so that LZMA compresses them better apart.
    pairs = numbers.astype("<f2").view(np.uint8).reshape(-1, 2)
    return pairs[:, 1].tobytes() + pairs[:, 0].tobytes()


def write_lines(lines: Sequence[np.ndarray]) -> bytes:
    """Encode lines of log steps for `read_lines`."""
    values = np.concatenate([line.astype(np.int64) for line in lines])
    if not values.size:
        return b""
    if np.abs(values).max() > LARGEST_INDEX:
        raise ArtifactError(
            f"log step {values[np.abs(values).argmax()]}: expected at most {LARGEST_INDEX} of them"
        )
    centers = [int(np.median(line)) if line.size else 0 for line in lines]
    values -= np.repeat(centers, [line.size for line in lines])
    padded = np.pad(values, (0, -values.size % LINE_WIDTH)).reshape(-1, LINE_WIDTH)
    return np.array(centers, dtype="<i2").tobytes() + matrix_encoder.encode(padded)
