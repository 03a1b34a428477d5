"""Bytes -> artifact, whole or one tensor at a time; a file that breaks any rule is refused.

Sections of the file (docs/format.md):

    header        recipe and tensor table (table.py): JSON, squeezed
    tokenizer     squeezed; absent if the header names a tokenizer outside the file
    halves        all fp16 steps and fp16 tensors: high bytes, then low bytes, squeezed
    indices       log steps and activation scales (`read_lines`)
    codes         one stream per tensor: array_decoder.py, for grids matrix_decoder.py
    corrections   two streams of array_decoder.py per corrected tensor
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate, pairwise

import numpy as np

from underpar.artifact import array_decoder, matrix_decoder
from underpar.artifact.format import unframe, unsqueeze
from underpar.artifact.table import MAX_HEADER_BYTES, MAX_TOKENIZER_BYTES, TensorEntry, read_header
from underpar.errors import ArtifactError
from underpar.quant.logsteps import LARGEST_INDEX
from underpar.quant.lowrank import Factor, LowRank
from underpar.quant.schemes import QuantizedModel, QuantizedTensor, Scheme
from underpar.quant.trellis import next_state
from underpar.recipe import Recipe

NUM_SECTIONS = 6
# The log steps of all tensors are coded as one matrix with this many columns.
LINE_WIDTH = 128
# The largest magnitude of integers that are stored as a byte.
LARGEST_BYTE = 127

# Names a stream of integers: tensor, and 0 for its own integers, 1 and 2 for the left and the right
# factor of its correction.
Key = tuple[str, int]


@dataclass(frozen=True)
class Artifact:
    """All that scoring needs. `unpack(pack(x))` equals x."""

    recipe: Recipe
    tokenizer: bytes
    tensors: QuantizedModel
    activations: Mapping[str, int] = field(default_factory=dict)
    """Matrix -> log step (`quant.logsteps`) of the largest input in the calibration text."""

    def equals(self, other: Artifact) -> bool:
        """Same recipe, tokenizer, integers, steps and scales, bit for bit."""
        return (
            self.recipe == other.recipe
            and self.tokenizer == other.tokenizer
            and self.activations == other.activations
            and list(self.tensors) == list(other.tensors)
            and all(_same(t, other.tensors[name]) for name, t in self.tensors.items())
        )


def _same(a: QuantizedTensor, b: QuantizedTensor) -> bool:
    (facts, arrays), (other_facts, other_arrays) = _take_apart(a), _take_apart(b)
    return facts == other_facts and all(map(np.array_equal, arrays, other_arrays))


def _take_apart(tensor: QuantizedTensor) -> tuple[list[object], list[np.ndarray]]:
    factors = [] if tensor.correction is None else [tensor.correction.left, tensor.correction.right]
    arrays = [tensor.codes, tensor.columns, *(a for f in factors for a in (f.codes, f.steps))]
    facts = [tensor.shape, tensor.scheme, tensor.steps.tobytes(), *(f.group for f in factors)]
    return facts, [np.empty(0) if a is None else a for a in arrays]


def unpack(data: bytes, tokenizer: bytes | None = None) -> Artifact:
    """The artifact in `data`; `tokenizer` is needed where the artifact only names its own."""
    return LazyArtifact(data).unpack(tokenizer)


class LazyArtifact:
    """A packed file whose frame and header were checked; tensors are decoded when they are read."""

    def __init__(self, data: bytes) -> None:
        sections = unframe(data, NUM_SECTIONS)
        self.section_bytes = [len(section) for section in sections]
        header, self._tokenizer, self._halves, self._indices, codes, corrections = sections
        self.header = read_header(unsqueeze(header, MAX_HEADER_BYTES))
        self.rows = self.header.rows
        if bool(self._tokenizer) == self.names_tokenizer:
            raise ArtifactError("artifact has to hold its tokenizer or to name it, not both")
        whole = {(row.name, 0): row.coding.num_bytes for row in self.rows.values()}
        factors = {
            (row.name, side): factor.coding.num_bytes
            for row in self.rows.values()
            for side, factor in enumerate(row.factors, 1)
        }
        self._streams = _cut(codes, whole) | _cut(corrections, factors)

    @property
    def names_tokenizer(self) -> bool:
        """Whether the file has the SHA-256 of its tokenizer instead of the tokenizer."""
        return bool(self.header.tokenizer_sha256)

    @property
    def activations(self) -> dict[str, int]:
        """Matrix -> log step of its largest input."""
        return self._logs[1]

    def unpack(self, tokenizer: bytes | None = None) -> Artifact:
        """Decode everything at once, which is faster than tensor by tensor."""
        content = self.read_tokenizer(tokenizer)
        tensors = self._read([*self.rows.values()])
        return Artifact(self.header.recipe, content, tensors, self.activations)

    def read(self, name: str) -> QuantizedTensor:
        """One tensor, the same as `unpack` gives."""
        if name not in self.rows:
            raise ArtifactError(f"artifact has no tensor {name!r}")
        return self._read([self.rows[name]])[name]

    def read_tokenizer(self, outside: bytes | None = None) -> bytes:
        """The tokenizer in the file, or `outside` if the file names that one."""
        if not self.names_tokenizer:
            return unsqueeze(self._tokenizer, MAX_TOKENIZER_BYTES)
        wanted = self.header.tokenizer_sha256.hex()
        if outside is None:
            raise ArtifactError(f"artifact needs the tokenizer of SHA-256 {wanted}; none is given")
        digest = hashlib.sha256(outside).hexdigest()
        if digest != wanted:
            raise ArtifactError(
                f"tokenizer has SHA-256 {digest}: the artifact needs that of {wanted}"
            )
        return outside

    @cached_property
    def _numbers(self) -> dict[str, np.ndarray]:
        """The fp16 numbers of each tensor."""
        counts = [row.scheme.num_halves(row.shape) for row in self.rows.values()]
        raw = unsqueeze(self._halves, 2 * sum(counts))
        if len(raw) != 2 * sum(counts):
            raise ArtifactError("artifact holds fewer steps than its table needs")
        numbers = unshuffle(raw)
        if not np.isfinite(numbers).all():
            raise ArtifactError("artifact holds a step that is not finite")
        return dict(zip(self.rows, np.split(numbers, np.cumsum(counts)[:-1]), strict=True))

    @cached_property
    def _logs(self) -> tuple[dict[str, list[np.ndarray]], dict[str, int]]:
        """Log steps of each tensor (rows, columns, factors), and those of the largest inputs."""
        rows = self.rows.values()
        names = [row.name for row in rows if row.activation]
        lengths = [n for row in rows for n in row.line_lengths]
        lines = iter(read_lines(self._indices, [*lengths, len(names)]))
        steps = {row.name: [next(lines) for _ in row.line_lengths] for row in rows}
        return steps, dict(zip(names, next(lines).tolist(), strict=True))

    def _read(self, rows: Sequence[TensorEntry]) -> QuantizedModel:
        codes = self._read_grids(rows) | self._read_ints(rows)
        tensors = {}
        for row in rows:
            lines = iter(self._logs[0][row.name])
            steps = next(lines) if row.scheme.has_log_rows else self._numbers[row.name]
            columns = next(lines) if row.scheme.columns else None
            factors = [
                Factor(codes[row.name, side].reshape(factor.shape), next(lines), factor.group)
                for side, factor in enumerate(row.factors, 1)
            ]
            integers = codes.get((row.name, 0))
            tensors[row.name] = QuantizedTensor(
                row.shape,
                row.scheme,
                steps,
                None if integers is None else integers.reshape(len(steps), -1),
                columns,
                LowRank(*factors) if factors else None,
            )
            check_codes(row.name, tensors[row.name])
        return tensors

    def _read_grids(self, rows: Sequence[TensorEntry]) -> dict[Key, np.ndarray]:
        """Integers of grids; grids with the same trellis are decoded together, which is faster."""
        codes: dict[Key, np.ndarray] = {}
        for states in sorted({row.scheme.states for row in rows} - {0}):
            grids = {(row.name, 0): row for row in rows if row.scheme.states == states}
            matrices = matrix_decoder.decode_many(
                [self._streams[key] for key in grids],
                [(row.shape[0], row.shape[1]) for row in grids.values()],
                next_state(states),
                [steps_of(row.scheme, self._logs[0][row.name]) for row in grids.values()],
            )
            codes |= dict(zip(grids, matrices, strict=True))
        return codes

    def _read_ints(self, rows: Sequence[TensorEntry]) -> dict[Key, np.ndarray]:
        """Integers of tensors and factors that are stored as bytes."""
        wanted = {(row.name, 0): (row.coding, row.num_weights) for row in rows if row.scheme.bits}
        for row in rows:
            for side, factor in enumerate(row.factors, 1):
                wanted[row.name, side] = factor.coding, math.prod(factor.shape)
        symbols = array_decoder.decode_many(
            [self._streams[key] for key in wanted],
            [np.array(coding.freqs, dtype=np.int64) for coding, _ in wanted.values()],
            [size for _, size in wanted.values()],
        )
        return {
            key: (array + coding.low).astype(np.int8)
            for array, (key, (coding, _)) in zip(symbols, wanted.items(), strict=True)
        }


def steps_of(scheme: Scheme, lines: Sequence[np.ndarray]) -> matrix_decoder.Steps:
    """Log steps of the rows of a grid and, if the scheme has them, of its columns."""
    return lines[0], lines[1] if scheme.columns else None


def check_codes(name: str, tensor: QuantizedTensor) -> None:
    """Refuse integers outside the range of the tensor's scheme."""
    codes, columns, limit = tensor.codes, tensor.columns, tensor.scheme.limit
    if codes is None or tensor.scheme.states:
        return
    # Columns with finer steps have a wider range.
    limits = limit if columns is None else np.where(columns, LARGEST_BYTE, limit)
    if np.any(codes.max(axis=0) > limits) or np.any(codes.min(axis=0) < -limits):
        raise ArtifactError(f"tensor {name!r} has integers that {tensor.scheme} does not have")


def _cut(data: bytes, sizes: Mapping[Key, int]) -> dict[Key, bytes]:
    """Cut a section into its streams; they must fill it."""
    ends = [*accumulate(sizes.values(), initial=0)]
    if ends[-1] != len(data):
        raise ArtifactError(
            f"artifact has a section of {len(data)} bytes, its tensor table says {ends[-1]}"
        )
    return {key: data[a:b] for key, (a, b) in zip(sizes, pairwise(ends), strict=True)}


def unshuffle(raw: bytes) -> np.ndarray:
    """fp16 numbers from their high bytes, then their low bytes."""
    planes = np.frombuffer(raw, np.uint8).reshape(2, -1)
    numbers = np.stack((planes[1], planes[0]), axis=1).reshape(-1).view("<f2")
    return numbers.astype(np.float16)


def read_lines(data: bytes, lengths: Sequence[int]) -> list[np.ndarray]:
    """Lines of log steps: one i16 center per line, then a stream of matrix_decoder.py.

    The stream has no trellis. It holds all differences to the centers as the rows of a matrix, with
    zeros at the end of the last row.
    """
    total, num_center_bytes = sum(lengths), 2 * len(lengths)
    if not total and not data:
        return [np.empty(0, dtype=np.int16)] * len(lengths)
    if len(data) < num_center_bytes:
        raise ArtifactError(f"artifact has {len(data)} bytes of log steps for {total} of them")
    centers = np.frombuffer(data[:num_center_bytes], dtype="<i2").astype(np.int32)
    matrix = matrix_decoder.decode(data[num_center_bytes:], (-(-total // LINE_WIDTH), LINE_WIDTH))
    values = matrix.reshape(-1)[:total] + np.repeat(centers, lengths)
    if np.abs(values).max() > LARGEST_INDEX or matrix.reshape(-1)[total:].any():
        raise ArtifactError(f"artifact has a log step beyond {LARGEST_INDEX}")
    return np.split(values.astype(np.int16), np.cumsum(lengths)[:-1])
