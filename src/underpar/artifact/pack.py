"""Artifact <-> bytes: recipe, tokenizer, and tensors with their integers entropy-coded.

Sections: header (JSON, squeezed: recipe and tensor table), tokenizer (squeezed), halves (all fp16
steps and fp16 tensors, high bytes then low bytes, squeezed), indices (log steps of rows and columns
in i16, in the same way), codes (one stream a tensor: rans.py, or gaussian.py for grids).
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from underpar.artifact import gaussian, rans
from underpar.artifact.format import frame, squeeze, unframe, unsqueeze
from underpar.errors import ArtifactError, DataError, RecipeError
from underpar.quant import logsteps
from underpar.quant.rules import QuantizedModel
from underpar.quant.schemes import QuantizedTensor, parse_scheme
from underpar.quant.trellis import next_state
from underpar.recipe import Recipe, from_tree, to_tree

# Bounds on what a file may claim, far above any model of 16 MB.
MAX_HEADER_BYTES = 8 << 20
MAX_TOKENIZER_BYTES = 16 << 20
MAX_WEIGHTS = 1 << 28

NUM_SECTIONS = 5


@dataclass(frozen=True)
class Artifact:
    """All that scoring needs. `unpack(pack(x)) == x`."""

    recipe: Recipe
    tokenizer: bytes
    tensors: QuantizedModel

    def equals(self, other: Artifact) -> bool:
        """Same recipe, tokenizer, integers and steps, bit for bit."""
        return (
            self.recipe == other.recipe
            and self.tokenizer == other.tokenizer
            and list(self.tensors) == list(other.tensors)
            and all(_same(t, other.tensors[name]) for name, t in self.tensors.items())
        )


def _same(a: QuantizedTensor, b: QuantizedTensor) -> bool:
    codes = [np.empty(0) if t.codes is None else t.codes for t in (a, b)]
    columns = [np.empty(0) if t.columns is None else t.columns for t in (a, b)]
    return (
        (a.shape, a.scheme) == (b.shape, b.scheme)
        and a.steps.tobytes() == b.steps.tobytes()
        and np.array_equal(codes[0], codes[1])
        and np.array_equal(columns[0], columns[1])
    )


def pack(artifact: Artifact) -> bytes:
    """The artifact as one file; equal artifacts give equal bytes."""
    tensors = artifact.tensors
    streams = _encode_grids({n: t for n, t in tensors.items() if t.scheme.states})
    table, halves, indices = [], [], []
    for name, tensor in tensors.items():
        row: dict[str, Any] = {"name": name, "shape": tensor.shape, "scheme": str(tensor.scheme)}
        if tensor.scheme.states:
            row["bytes"] = len(streams[name])
            indices += [tensor.steps, *([] if tensor.columns is None else [tensor.columns])]
        else:
            halves.append(tensor.steps)
        if tensor.scheme.bits:
            assert tensor.codes is not None
            streams[name], coding = _encode_codes(tensor.codes)
            row |= coding
        table.append(row)
    header = json.dumps({"recipe": to_tree(artifact.recipe), "tensors": table}, sort_keys=True)
    return frame(
        [
            squeeze(header.encode()),
            squeeze(artifact.tokenizer),
            squeeze(_shuffle(halves, "<f2")),
            squeeze(_shuffle(indices, "<i2")),
            b"".join(streams[name] for name in tensors if name in streams),
        ]
    )


def _encode_grids(grids: Mapping[str, QuantizedTensor]) -> dict[str, bytes]:
    """The streams of grids by name; those of one trellis are coded together, which is faster."""
    streams: dict[str, bytes] = {}
    for states in sorted({t.scheme.states for t in grids.values()}):
        names = [name for name, t in grids.items() if t.scheme.states == states]
        matrices = [codes for name in names if (codes := grids[name].codes) is not None]
        found = gaussian.encode_many(matrices, next_state(states))
        streams |= dict(zip(names, found, strict=True))
    return streams


def _encode_codes(codes: np.ndarray) -> tuple[bytes, dict[str, Any]]:
    flat = codes.reshape(-1).astype(np.int64)
    low = int(flat.min())
    freqs = rans.quantize_counts(np.bincount(flat - low))
    stream = rans.encode(flat - low, freqs)
    return stream, {"low": low, "freqs": freqs.tolist(), "bytes": len(stream)}


def _shuffle(arrays: Sequence[np.ndarray], kind: str) -> bytes:
    # High bytes repeat, low bytes hardly do: apart, they compress better.
    raw = np.concatenate([a.reshape(-1) for a in arrays] or [np.empty(0)])
    pairs = raw.astype(kind).view(np.uint8).reshape(-1, 2)
    return pairs[:, 1].tobytes() + pairs[:, 0].tobytes()


def _unshuffle(data: bytes, kind: str) -> np.ndarray:
    planes = np.frombuffer(data, np.uint8).reshape(2, -1)
    return np.stack((planes[1], planes[0]), axis=1).reshape(-1).view(kind)


def unpack(data: bytes) -> Artifact:
    """The artifact in `data`; a file that breaks any rule of the format is refused."""
    header_bytes, tokenizer, halves_bytes, indices_bytes, codes = unframe(data, NUM_SECTIONS)
    recipe, table = _read_header(unsqueeze(header_bytes, MAX_HEADER_BYTES))
    halves = _read_numbers(halves_bytes, [num_halves_of(row) for row in table], "<f2")
    indices = _read_numbers(indices_bytes, [num_indices_of(row) for row in table], "<i2")
    streams = _cut_codes(codes, table)
    grids = _decode_grids(table, streams)
    tensors = {}
    for row, steps, logs in zip(table, halves, indices, strict=True):
        name = row["name"]
        if name in grids:
            tensors[name] = _build_grid(row, logs, grids[name])
        else:
            tensors[name] = _decode_tensor(row, steps.astype(np.float16), streams.get(name, b""))
    return Artifact(recipe, unsqueeze(tokenizer, MAX_TOKENIZER_BYTES), tensors)


def _read_numbers(data: bytes, counts: Sequence[int], kind: str) -> list[np.ndarray]:
    """The 16-bit numbers of a section, as many for each tensor as `counts` says."""
    raw = unsqueeze(data, 2 * sum(counts))
    if len(raw) != 2 * sum(counts):
        raise ArtifactError("artifact holds fewer steps than its tensor table needs")
    return np.split(_unshuffle(raw, kind), np.cumsum(counts)[:-1])


def _cut_codes(codes: bytes, table: Sequence[Mapping[str, Any]]) -> dict[str, bytes]:
    streams, at = {}, 0
    for row in table:
        if parse_scheme(row["scheme"]).is_half:
            continue
        end = at + row["bytes"]
        if end > len(codes):
            raise ArtifactError(f"tensor {row['name']}: its codes reach past the file")
        streams[row["name"]] = codes[at:end]
        at = end
    if at != len(codes):
        raise ArtifactError("artifact holds more codes than its tensor table needs")
    return streams


def _decode_grids(
    table: Sequence[Mapping[str, Any]], streams: Mapping[str, bytes]
) -> dict[str, np.ndarray]:
    states = {row["name"]: parse_scheme(row["scheme"]).states for row in table}
    shapes = {row["name"]: tuple(row["shape"]) for row in table}
    codes: dict[str, np.ndarray] = {}
    for number in sorted(set(states.values()) - {0}):
        names = [name for name, own in states.items() if own == number]
        found = gaussian.decode_many(
            [streams[n] for n in names], [shapes[n] for n in names], next_state(number)
        )
        codes |= dict(zip(names, found, strict=True))
    return codes


def _build_grid(row: Mapping[str, Any], logs: np.ndarray, codes: np.ndarray) -> QuantizedTensor:
    if np.abs(logs.astype(np.int32)).max() > logsteps.LARGEST_INDEX:
        raise ArtifactError(f"tensor {row['name']}: a step is out of range")
    num_rows, scheme = row["shape"][0], parse_scheme(row["scheme"])
    steps, columns = logs[:num_rows].astype(np.int16), logs[num_rows:].astype(np.int16)
    return QuantizedTensor(
        tuple(row["shape"]), scheme, steps, codes, columns if scheme.columns else None
    )


def read_table(data: bytes) -> tuple[list[dict[str, Any]], list[int]]:
    """Tensor table and section lengths of a packed file, for accounting."""
    sections = unframe(data, NUM_SECTIONS)
    _, table = _read_header(unsqueeze(sections[0], MAX_HEADER_BYTES))
    return table, [len(section) for section in sections]


def _read_header(raw: bytes) -> tuple[Recipe, list[dict[str, Any]]]:
    try:
        header = json.loads(raw)
        recipe, table = from_tree(header["recipe"]), header["tensors"]
        for row in table:
            _check_row(row)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ArtifactError(f"artifact header is malformed ({error!r})") from error
    except (RecipeError, DataError) as error:
        raise ArtifactError(f"artifact holds a recipe that cannot be used: {error}") from error
    if not table:
        raise ArtifactError("artifact holds no tensors")
    if sum(math.prod(row["shape"]) for row in table) > MAX_WEIGHTS:
        raise ArtifactError(f"artifact claims more than {MAX_WEIGHTS} weights")
    if len({row["name"] for row in table}) != len(table):
        raise ArtifactError("artifact names a tensor twice")
    return recipe, table


def _check_row(row: Mapping[str, Any]) -> None:
    whole = [*row["shape"]]
    scheme = parse_scheme(row["scheme"])
    if scheme.states:
        whole.append(row["bytes"])
        if len(row["shape"]) != 2:
            raise ValueError("a grid that is not a matrix")
    if scheme.bits:
        whole += [row["bytes"], *row["freqs"]]
        inside = type(row["low"]) is int and -128 <= row["low"] <= 128 - len(row["freqs"])
        if not inside or max(row["freqs"], default=0) > 1 << rans.PROB_BITS:
            raise ValueError("codes or frequencies out of range")
    if not isinstance(row["name"], str) or any(type(n) is not int or n < 0 for n in whole):
        raise ValueError("a size that is not a whole number")
    if not all(row["shape"]) or len(row["shape"]) > 4:
        raise ValueError("an empty or over-nested shape")


def num_halves_of(row: Mapping[str, Any]) -> int:
    """How many fp16 numbers a tensor of the table stores."""
    shape, scheme = row["shape"], parse_scheme(row["scheme"])
    if scheme.states:
        return 0
    if scheme.is_half:
        return math.prod(shape)
    return int(shape[0]) if len(shape) > 1 else 1


def num_indices_of(row: Mapping[str, Any]) -> int:
    """How many log steps a tensor of the table stores."""
    scheme = parse_scheme(row["scheme"])
    if not scheme.states:
        return 0
    num_rows, num_columns = row["shape"]
    return int(num_rows) + (int(num_columns) if scheme.columns else 0)


def _decode_tensor(row: Mapping[str, Any], steps: np.ndarray, stream: bytes) -> QuantizedTensor:
    shape, scheme = tuple(row["shape"]), parse_scheme(row["scheme"])
    if not np.isfinite(steps).all():
        raise ArtifactError(f"tensor {row['name']}: a step is not finite")
    if scheme.is_half:
        return QuantizedTensor(shape, scheme, steps)
    freqs = np.array(row["freqs"], dtype=np.int64)
    symbols = rans.decode(stream, freqs, math.prod(shape))
    values = (symbols.astype(np.int64) + row["low"]).astype(np.int8)
    return QuantizedTensor(shape, scheme, steps, values.reshape(len(steps), -1))
