"""Quantize / dequantize pairs. What dequantizing gives is exactly what is scored.

`fp16` stores halves. `intB:k` stores integers of B bits with one fp16 step a row, k row deviations
wide: step = k * std / (2^(B-1) - 1), the SD-clip rule of PR 1394 (the step sets entropy and error,
B only the clipping point). `intB` alone takes the step from the row's largest value.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from underpar.errors import ArtifactError, RecipeError

# The smallest normal half: steps stay exact powers away from fp16's subnormal grid.
SMALLEST_STEP = 2.0**-14
LARGEST_STEP = 65504.0


@dataclass(frozen=True)
class Scheme:
    """`bits` = 0 is fp16; `sigmas` = 0 takes the step from the row's largest value."""

    bits: int = 0
    sigmas: float = 0.0

    @property
    def limit(self) -> int:
        """Largest integer magnitude."""
        return int(2 ** (self.bits - 1) - 1)

    def __str__(self) -> str:
        if not self.bits:
            return "fp16"
        # repr keeps every digit: the name is what the artifact stores.
        return f"int{self.bits}" + (f":{self.sigmas!r}".removesuffix(".0") if self.sigmas else "")


def parse_scheme(text: str) -> Scheme:
    """'fp16', 'int6' or 'int6:12.85'."""
    if text == "fp16":
        return Scheme()
    name, _, sigmas = text.partition(":")
    try:
        bits, width = int(name.removeprefix("int")), float(sigmas or 0)
    except ValueError:
        bits, width = 0, 0.0
    if not name.startswith("int") or not 2 <= bits <= 8 or not 0 <= width < 1000:
        raise RecipeError(f"scheme {text!r}: expected fp16, int2 ... int8, or int6:12.85")
    return Scheme(bits, width)


@dataclass(frozen=True)
class QuantizedTensor:
    """Integers (rows, cols) and fp16 steps (rows,); an fp16 tensor has no integers."""

    shape: tuple[int, ...]
    scheme: Scheme
    steps: np.ndarray
    codes: np.ndarray | None = None


def quantize(weight: np.ndarray, scheme: Scheme) -> QuantizedTensor:
    """Round each row of `weight` to the nearest multiple of its step."""
    if not np.isfinite(weight).all():
        raise ArtifactError("a weight is NaN or infinite; the run diverged, nothing to pack")
    shape = tuple(weight.shape)
    if not scheme.bits:
        halves = weight.astype(np.float16).reshape(-1)
        if not np.isfinite(halves).all():
            raise ArtifactError("a weight is too large for fp16; give its tensor an int scheme")
        return QuantizedTensor(shape, scheme, halves)
    rows = weight.astype(np.float32).reshape(shape[0] if len(shape) > 1 else 1, -1)
    # One column has no deviation; its largest value serves.
    by_deviation = scheme.sigmas > 0 and rows.shape[1] > 1
    width = scheme.sigmas * rows.std(axis=1, ddof=1) if by_deviation else np.abs(rows).max(axis=1)
    steps = np.clip(width / scheme.limit, SMALLEST_STEP, LARGEST_STEP).astype(np.float16)
    codes = np.rint(rows / steps.astype(np.float32)[:, None])
    codes = np.clip(codes, -scheme.limit, scheme.limit).astype(np.int8)
    return QuantizedTensor(shape, scheme, steps, codes)


def dequantize(tensor: QuantizedTensor) -> np.ndarray:
    """The fp32 weights that are scored, packed and decoded."""
    steps = tensor.steps.astype(np.float32)
    if tensor.codes is None:
        return steps.reshape(tensor.shape)
    return (tensor.codes.astype(np.float32) * steps[:, None]).reshape(tensor.shape)
