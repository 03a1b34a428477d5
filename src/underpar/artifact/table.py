"""The header of an artifact: the recipe and one entry per tensor, checked before they are used."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from underpar.artifact.frequencies import TOTAL
from underpar.errors import DAMAGE, ArtifactError, UnderparError
from underpar.quant.schemes import Scheme, parse_scheme
from underpar.recipe import Recipe, from_tree

# The largest sizes that a file may claim, far above any model of 16 MB.
MAX_HEADER_BYTES = 2 << 20
MAX_TOKENIZER_BYTES = 16 << 20
MAX_STREAM_BYTES = 1 << 32
MAX_WEIGHTS = 1 << 27
MAX_RANK = 64
# Matrices with equal numbers of columns are decoded together; this bounds the time for the others.
MAX_COLUMNS = 1 << 20
# The group size of a factor may exceed the factor, up to this: one step then serves all of it.
SMALL_GROUP = 1 << 16


class Coding(NamedTuple):
    """Bytes of a stream; for array_decoder.py also the least integer and the frequencies."""

    num_bytes: int
    low: int = 0
    freqs: tuple[int, ...] = ()


class FactorEntry(NamedTuple):
    """What the header says of one factor of a low-rank correction."""

    shape: tuple[int, int]
    group: int
    coding: Coding

    @property
    def num_steps(self) -> int:
        """How many log steps the factor stores."""
        return -(-math.prod(self.shape) // self.group)


@dataclass(frozen=True)
class TensorEntry:
    """What the header says of one tensor."""

    name: str
    shape: tuple[int, ...]
    scheme: Scheme
    coding: Coding
    factors: tuple[FactorEntry, ...]
    """Left and right factor of its correction; empty without a correction."""
    activation: bool
    """Whether the file has the log step of its largest input."""

    @property
    def num_weights(self) -> int:
        """How many weights the tensor has."""
        return math.prod(self.shape)

    @property
    def line_lengths(self) -> list[int]:
        """How many log steps its rows, columns and factors have; parts without any are left out."""
        by_column = self.shape[-1] if self.scheme.columns else 0
        by_row = self.scheme.num_indices(self.shape) - by_column
        return [n for n in (by_row, by_column, *(f.num_steps for f in self.factors)) if n]


@dataclass(frozen=True)
class Header:
    """Recipe and tensors; if the tokenizer is not in the file, its SHA-256 and squeezed length."""

    recipe: Recipe
    rows: dict[str, TensorEntry]
    tokenizer_sha256: bytes = b""
    tokenizer_bytes: int = 0


def read_header(raw: bytes) -> Header:
    """Read the JSON of the header; sizes and names that no packed file has are refused."""
    try:
        tree = json.loads(raw)
        rows = [_read_entry(row) for row in tree["tensors"]]
        tokenizer = _read_tokenizer(tree["tokenizer"]) if "tokenizer" in tree else (b"", 0)
        header = Header(from_tree(tree["recipe"]), {r.name: r for r in rows}, *tokenizer)
        if len(header.rows) != len(rows) or not rows:
            raise ValueError("no tensors, or a name twice")
        if sum(row.num_weights for row in rows) > MAX_WEIGHTS:
            raise ValueError(f"more than {MAX_WEIGHTS} weights")
        if sum({row.shape[1] for row in rows if row.scheme.states}) > MAX_COLUMNS:
            raise ValueError(f"grids of more than {MAX_COLUMNS} columns")
    except (UnderparError, *DAMAGE) as error:
        # The message may quote the file: line breaks are escaped and the length is limited.
        raise ArtifactError(f"artifact header cannot be used: {error!r:.300}") from error
    return header


def _whole(value: Any, least: int, most: int) -> int:
    if type(value) is not int or not least <= value <= most:
        raise ValueError(f"{value!r:.40} for a whole number from {least} to {most}")
    return value


def _read_entry(tree: Mapping[str, Any]) -> TensorEntry:
    name, scheme = tree["name"], parse_scheme(tree["scheme"])
    shape = tuple(_whole(size, 1, MAX_WEIGHTS) for size in tree["shape"])
    if not isinstance(name, str) or not name.isprintable() or len(shape) > 4:
        raise ValueError(f"tensor {name!r:.40} with {len(shape)} axes")
    if (scheme.states or scheme.columns or "correction" in tree) and len(shape) != 2:
        raise ValueError(f"{scheme} for shape {shape}, which is no matrix")
    if scheme.group and (not shape or shape[-1] % scheme.group):
        raise ValueError(f"{scheme} for shape {shape}, whose rows are no whole runs")
    coding = Coding(0) if scheme.is_half else _read_coding(tree, bool(scheme.bits))
    factors: tuple[FactorEntry, ...] = ()
    if "correction" in tree:
        if scheme.is_half or scheme.group:
            raise ValueError(f"a correction of {scheme}")
        factors = _read_factors(tree["correction"], shape[0], shape[1])
    return TensorEntry(name, shape, scheme, coding, factors, tree.get("activation") is True)


def _read_coding(tree: Mapping[str, Any], has_table: bool) -> Coding:
    num_bytes = _whole(tree["bytes"], 0, MAX_STREAM_BYTES)
    if not has_table:
        return Coding(num_bytes)
    freqs = tuple(_whole(freq, 0, TOTAL) for freq in tree["freqs"])
    return Coding(num_bytes, _whole(tree["low"], -128, 128 - len(freqs)), freqs)


def _read_factors(
    tree: Mapping[str, Any], num_rows: int, num_columns: int
) -> tuple[FactorEntry, ...]:
    rank = _whole(tree["rank"], 1, min(MAX_RANK, num_rows, num_columns))
    factors = []
    for side, shape in (("left", (num_rows, rank)), ("right", (rank, num_columns))):
        group = _whole(tree[side]["group"], 1, max(math.prod(shape), SMALL_GROUP))
        factors.append(FactorEntry(shape, group, _read_coding(tree[side], True)))
    return tuple(factors)


def _read_tokenizer(tree: Mapping[str, Any]) -> tuple[bytes, int]:
    digest = bytes.fromhex(tree["sha256"])
    if len(digest) != 32:
        raise ValueError("a tokenizer without SHA-256")
    return digest, _whole(tree["bytes"], 0, MAX_TOKENIZER_BYTES)
