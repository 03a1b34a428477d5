"""Artifact <-> bytes: recipe, tokenizer, and tensors with their integers entropy-coded.

Sections: header (JSON, squeezed: recipe and tensor table), tokenizer (squeezed), halves (all fp16
steps and fp16 tensors, high bytes then low bytes, squeezed), codes (one rANS stream a tensor).
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from underpar.artifact import rans
from underpar.artifact.format import frame, squeeze, unframe, unsqueeze
from underpar.errors import ArtifactError, DataError, RecipeError
from underpar.quant.rules import QuantizedModel
from underpar.quant.schemes import QuantizedTensor, parse_scheme
from underpar.recipe import Recipe, from_tree, to_tree

# Bounds on what a file may claim, far above any model of 16 MB.
MAX_HEADER_BYTES = 8 << 20
MAX_TOKENIZER_BYTES = 16 << 20
MAX_WEIGHTS = 1 << 28


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
    return (
        (a.shape, a.scheme) == (b.shape, b.scheme)
        and a.steps.tobytes() == b.steps.tobytes()
        and np.array_equal(codes[0], codes[1])
    )


def pack(artifact: Artifact) -> bytes:
    """The artifact as one file; equal artifacts give equal bytes."""
    table, streams, halves = [], [], []
    for name, tensor in artifact.tensors.items():
        row: dict[str, Any] = {"name": name, "shape": tensor.shape, "scheme": str(tensor.scheme)}
        if tensor.codes is not None:
            stream, coding = _encode_codes(tensor.codes)
            streams.append(stream)
            row |= coding
        halves.append(tensor.steps)
        table.append(row)
    header = json.dumps({"recipe": to_tree(artifact.recipe), "tensors": table}, sort_keys=True)
    return frame(
        [
            squeeze(header.encode()),
            squeeze(artifact.tokenizer),
            squeeze(_shuffle(halves)),
            b"".join(streams),
        ]
    )


def _encode_codes(codes: np.ndarray) -> tuple[bytes, dict[str, Any]]:
    flat = codes.reshape(-1).astype(np.int64)
    low = int(flat.min())
    freqs = rans.quantize_counts(np.bincount(flat - low))
    stream = rans.encode(flat - low, freqs)
    return stream, {"low": low, "freqs": freqs.tolist(), "bytes": len(stream)}


def _shuffle(halves: Sequence[np.ndarray]) -> bytes:
    # High bytes repeat, low bytes hardly do: apart, they compress better.
    raw = np.concatenate([h.reshape(-1) for h in halves] or [np.empty(0, np.float16)])
    pairs = raw.astype("<f2").view(np.uint8).reshape(-1, 2)
    return pairs[:, 1].tobytes() + pairs[:, 0].tobytes()


def _unshuffle(data: bytes) -> np.ndarray:
    planes = np.frombuffer(data, np.uint8).reshape(2, -1)
    return np.stack((planes[1], planes[0]), axis=1).reshape(-1).view("<f2").astype(np.float16)


def unpack(data: bytes) -> Artifact:
    """The artifact in `data`; a file that breaks any rule of the format is refused."""
    header_bytes, tokenizer, halves_bytes, codes = unframe(data, num_sections=4)
    recipe, table = _read_header(unsqueeze(header_bytes, MAX_HEADER_BYTES))
    num_halves = [num_halves_of(row) for row in table]
    raw = unsqueeze(halves_bytes, 2 * sum(num_halves))
    if len(raw) != 2 * sum(num_halves):
        raise ArtifactError("artifact holds fewer steps than its tensor table needs")
    halves = np.split(_unshuffle(raw), np.cumsum(num_halves)[:-1])
    tensors, at = {}, 0
    for row, steps in zip(table, halves, strict=True):
        tensors[row["name"]], at = _decode_tensor(row, steps, codes, at)
    if at != len(codes):
        raise ArtifactError("artifact holds more codes than its tensor table needs")
    return Artifact(recipe, unsqueeze(tokenizer, MAX_TOKENIZER_BYTES), tensors)


def read_table(data: bytes) -> tuple[list[dict[str, Any]], list[int]]:
    """Tensor table and section lengths of a packed file, for accounting."""
    sections = unframe(data, num_sections=4)
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
    if parse_scheme(row["scheme"]).bits:
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
    shape = row["shape"]
    if not parse_scheme(row["scheme"]).bits:
        return math.prod(shape)
    return int(shape[0]) if len(shape) > 1 else 1


def _decode_tensor(
    row: Mapping[str, Any], steps: np.ndarray, codes: bytes, at: int
) -> tuple[QuantizedTensor, int]:
    shape, scheme = tuple(row["shape"]), parse_scheme(row["scheme"])
    if not np.isfinite(steps).all():
        raise ArtifactError(f"tensor {row['name']}: a step is not finite")
    if not scheme.bits:
        return QuantizedTensor(shape, scheme, steps), at
    end = at + row["bytes"]
    if end > len(codes):
        raise ArtifactError(f"tensor {row['name']}: its codes reach past the file")
    freqs = np.array(row["freqs"], dtype=np.int64)
    symbols = rans.decode(codes[at:end], freqs, math.prod(shape))
    values = (symbols.astype(np.int64) + row["low"]).astype(np.int8)
    return QuantizedTensor(shape, scheme, steps, values.reshape(len(steps), -1)), end
