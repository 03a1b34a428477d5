"""Quantize / dequantize pairs. What dequantizing gives is exactly what is scored.

`fp16` stores halves. `intB:k` stores integers of B bits with one fp16 step a row, k row deviations
wide: step = k * std / (2^(B-1) - 1), the SD-clip rule of PR 1394 (the step sets entropy and error,
B only the clipping point). `intB` alone takes the step from the row's largest value. `gptqB:k` has
the same steps and form, rounded with feedback (`quant.gptq`). `gridS` has log steps by row, set by
what errors cost (`quant.allocate`), and a trellis of S states (1: none); `gridS+columns` has steps
by column too.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

import numpy as np

from underpar.errors import ArtifactError, RecipeError
from underpar.quant.logsteps import from_index, from_indices
from underpar.quant.trellis import STATES

# The smallest normal half: steps stay exact powers away from fp16's subnormal grid.
SMALLEST_STEP = 2.0**-14
LARGEST_STEP = 65504.0

_SCHEME = re.compile(r"(int|gptq)([2-8])(?::(\d+(?:\.\d+)?))?|grid(\d+)(\+columns)?")


@dataclass(frozen=True)
class Scheme:
    """How a tensor is stored and rounded.

    `bits` = 0 without `states` is fp16; `sigmas` = 0 takes the step from the row's largest value.
    """

    bits: int = 0
    sigmas: float = 0.0
    feedback: bool = False
    states: int = 0
    columns: bool = False

    @property
    def limit(self) -> int:
        """Largest integer magnitude."""
        return int(2 ** (self.bits - 1) - 1)

    @property
    def is_half(self) -> bool:
        """Whether the tensor is stored as it is, in fp16."""
        return not self.bits and not self.states

    @property
    def calibrated(self) -> bool:
        """Whether rounding needs to know the inputs."""
        return self.feedback or self.states > 0

    def __str__(self) -> str:
        if self.states:
            return f"grid{self.states}" + ("+columns" if self.columns else "")
        if not self.bits:
            return "fp16"
        # repr keeps every digit: the name is what the artifact stores.
        width = f":{self.sigmas!r}".removesuffix(".0") if self.sigmas else ""
        return f"{'gptq' if self.feedback else 'int'}{self.bits}{width}"


def parse_scheme(text: str) -> Scheme:
    """'fp16', 'int6', 'int6:12.85', 'gptq6:12.85', 'grid8' or 'grid8+columns'."""
    if text == "fp16":
        return Scheme()
    found = _SCHEME.fullmatch(text)
    states = int(found[4]) if found and found[4] else 0
    width = float(found[3] or 0) if found else 0.0
    if not found or width >= 1000 or (states and states not in STATES):
        raise RecipeError(
            f"scheme {text!r}: expected fp16, int2 ... int8, int6:12.85, gptq6:12.85, or grid "
            f"with {', '.join(map(str, STATES))} states, as in grid8+columns"
        )
    if states:
        return Scheme(states=states, columns=bool(found[5]))
    return Scheme(int(found[2]), width, found[1] == "gptq")


@dataclass(frozen=True)
class QuantizedTensor:
    """Integers (rows, cols) and steps (rows,): fp16, or int16 log steps; fp16 has no integers."""

    shape: tuple[int, ...]
    scheme: Scheme
    steps: np.ndarray
    codes: np.ndarray | None = None
    columns: np.ndarray | None = None
    """Log steps (cols,) of a grid that has them."""


def quantize(weight: np.ndarray, scheme: Scheme) -> QuantizedTensor:
    """Round each row of `weight` to the nearest multiple of its step."""
    if not np.isfinite(weight).all():
        raise ArtifactError("a weight is NaN or infinite; the run diverged, nothing to pack")
    shape = tuple(weight.shape)
    if scheme.is_half:
        halves = weight.astype(np.float16).reshape(-1)
        if not np.isfinite(halves).all():
            raise ArtifactError("a weight is too large for fp16; give its tensor an int scheme")
        return QuantizedTensor(shape, scheme, halves)
    rows = as_rows(weight)
    steps = row_steps(rows, scheme)
    codes = np.rint(rows / steps.astype(np.float32)[:, None])
    codes = np.clip(codes, -scheme.limit, scheme.limit).astype(np.int8)
    return QuantizedTensor(shape, scheme, steps, codes)


def as_rows(weight: np.ndarray) -> np.ndarray:
    """A weight as a matrix of fp32, one row for a vector."""
    return weight.astype(np.float32).reshape(weight.shape[0] if weight.ndim > 1 else 1, -1)


def row_steps(rows: np.ndarray, scheme: Scheme) -> np.ndarray:
    """fp16 steps (rows,) of a scheme with bits."""
    # One column has no deviation; its largest value serves.
    by_deviation = scheme.sigmas > 0 and rows.shape[1] > 1
    width = scheme.sigmas * rows.std(axis=1, ddof=1) if by_deviation else np.abs(rows).max(axis=1)
    return np.clip(width / scheme.limit, SMALLEST_STEP, LARGEST_STEP).astype(np.float16)


def dequantize(tensor: QuantizedTensor) -> np.ndarray:
    """The fp32 weights that are scored, packed and decoded."""
    if tensor.scheme.states:
        assert tensor.codes is not None
        steps = from_index(tensor.steps)[:, None]
        if tensor.columns is not None:
            steps = from_indices(tensor.steps, tensor.columns)
        return (tensor.codes.astype(np.float32) * steps).reshape(tensor.shape)
    steps = tensor.steps.astype(np.float32)
    if tensor.codes is None:
        return steps.reshape(tensor.shape)
    return (tensor.codes.astype(np.float32) * steps[:, None]).reshape(tensor.shape)
