"""How tensors are stored, and what they stand for: dequantizing gives exactly what is scored.

`fp16` stores halves. `intB:k` stores integers of B bits with one fp16 step a row, k row deviations
wide: step = k * std / (2^(B-1) - 1), the SD-clip rule of PR 1394 (the step sets entropy and error,
B only the clipping point). `intB` alone takes the step from the row's largest value, `clipB` from
the best of a few clipping points (`quant.clip_search`). `gptqB:k` has the steps of `intB:k`,
rounded with feedback (`quant.gptq`); `gptqB:k+awq` lets columns have finer steps (`quant.awq`).
`ternary:G` has one fp16 step for each run of G weights of a row. `gridS` has log steps by row, set
by what errors cost (`quant.allocate`), and a trellis of S states (1: none); `gridS+columns` has
steps by column too. How weights are rounded is in `quant.rounding` and `quant.solve`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from underpar.errors import RecipeError
from underpar.quant.logsteps import from_index, from_indices
from underpar.quant.lowrank import LowRank
from underpar.quant.trellis import STATES

_SCHEME = re.compile(
    r"(?P<form>int|clip|gptq)(?P<bits>[2-8])(:(?P<sigmas>\d+(\.\d+)?))?(?P<awq>\+awq)?"
    r"|ternary:(?P<group>[1-9]\d{0,5})"
    r"|grid(?P<states>\d+)(?P<columns>\+columns)?"
)


@dataclass(frozen=True)
class Scheme:
    """How a tensor is stored and rounded.

    `bits` = 0 without `states` is fp16; `sigmas` = 0 takes the step from the row's largest value.
    """

    bits: int = 0
    sigmas: float = 0.0
    form: str = "int"
    group: int = 0
    """Weights that share a step; 0: those of a row."""
    states: int = 0
    columns: bool = False
    """Whether log steps by column are stored."""

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
        return self.form == "gptq" or self.states > 0

    def num_halves(self, shape: Sequence[int]) -> int:
        """How many fp16 numbers a tensor stores."""
        if self.states:
            return 0
        if self.is_half:
            return math.prod(shape)
        if self.group:
            return math.prod(shape) // self.group
        return int(shape[0]) if len(shape) > 1 else 1

    def num_indices(self, shape: Sequence[int]) -> int:
        """How many log steps a tensor stores: rows, then columns."""
        by_row = shape[0] if self.states else 0
        return int(by_row + (shape[-1] if self.columns else 0))

    def __str__(self) -> str:
        if self.states:
            return f"grid{self.states}" + ("+columns" if self.columns else "")
        if self.group:
            return f"ternary:{self.group}"
        if not self.bits:
            return "fp16"
        # repr keeps every digit: the name is what the artifact stores.
        width = f":{self.sigmas!r}".removesuffix(".0") if self.sigmas else ""
        return f"{self.form}{self.bits}{width}" + ("+awq" if self.columns else "")


def parse_scheme(text: str) -> Scheme:
    """'fp16', 'int6', 'int6:12.85', 'clip6', 'gptq6:12.85', 'ternary:128' or 'grid8+columns'."""
    if text == "fp16":
        return Scheme()
    found = _SCHEME.fullmatch(text)
    parts = found.groupdict() if found else {}
    states, sigmas = int(parts.get("states") or 0), float(parts.get("sigmas") or 0)
    form, group = parts.get("form") or "int", int(parts.get("group") or 0)
    odd = (form == "clip" and sigmas) or (parts.get("awq") and form != "gptq")
    if not found or odd or sigmas >= 1000 or (parts["states"] and states not in STATES):
        raise RecipeError(
            f"scheme {text!r}: expected fp16, int2 ... int8, int6:12.85, clip6, gptq6:12.85, "
            f"gptq7:14+awq, ternary:128, or grid with {', '.join(map(str, STATES))} states, as in "
            "grid8+columns"
        )
    if states:
        return Scheme(states=states, columns=bool(parts["columns"]))
    if group:
        return Scheme(bits=2, group=group)
    return Scheme(int(parts["bits"]), sigmas, form, columns=bool(parts["awq"]))


@dataclass(frozen=True, eq=False)
class QuantizedTensor:
    """Integers (rows, cols) and steps (rows,): fp16, or int16 log steps; fp16 has no integers.

    The rows of `ternary:G` are its runs of G weights.
    """

    shape: tuple[int, ...]
    scheme: Scheme
    steps: np.ndarray
    codes: np.ndarray | None = None
    columns: np.ndarray | None = None
    """Log steps (cols,) int16, where the scheme has them."""
    correction: LowRank | None = None


QuantizedModel = dict[str, QuantizedTensor]

# The log step of rows whose columns do not differ.
ONE_COLUMN = np.zeros(1, dtype=np.int16)


def dequantize(tensor: QuantizedTensor) -> np.ndarray:
    """The fp32 weights that are scored, packed and decoded."""
    if tensor.codes is None:
        return tensor.steps.astype(np.float32).reshape(tensor.shape)
    weight = tensor.codes.astype(np.float32) * steps_of(tensor)
    if tensor.correction is not None:
        weight += tensor.correction.product()
    return weight.reshape(tensor.shape)


def steps_of(tensor: QuantizedTensor) -> np.ndarray:
    """Steps in fp32, (rows, cols), or (rows, 1) where columns do not differ."""
    if tensor.scheme.states:
        return from_indices(tensor.steps, ONE_COLUMN if tensor.columns is None else tensor.columns)
    steps = tensor.steps.astype(np.float32)[:, None]
    return steps if tensor.columns is None else steps * from_index(tensor.columns)
