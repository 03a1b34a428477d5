"""Schemes: how a tensor is stored, and the weights that its integers and steps stand for.

The dequantized weights are exactly those that are scored.

    fp16            halves
    intB:k          integers of B bits and one fp16 step per row, step = k * std / (2^(B-1) - 1):
                    the SD-clip rule of PR 1394. The step sets entropy and error; B only clips
    intB            the same with the step from the largest value of the row
    intB/A          the same with one step for each index of the first A axes (0: one step)
    clipB           the same with the step from the best of a few clipping points (`clip_search`)
    gptqB:k         steps of intB:k, rounded with error feedback (`gptq`)
    gptqB:k+awq     the same with finer steps in some columns (`awq`)
    gptqB:k+hq      the same with steps by the importance of the row (`importance`)
    gptqB+clip      the same with the step of the row's best clipping point, one for all rows, at
                    least 1 / (2^(B-1) - 1) (PR 1105)
    ...+log         intB, clipB or gptqB with log steps instead of fp16 ones, chosen before rounding
    ternary:G       integers -1, 0, 1 and one fp16 step for each run of G weights of a row
    gridS           log steps by row, set by sensitivity (`allocate`), and a trellis of S states
                    (1: no trellis)
    gridS+columns   the same with log steps by column too

A row runs along the last axis; a vector or scalar is one row.

rounding.py and solve.py round weights to these schemes.
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
    r"(?P<form>int|clip|gptq)(?P<bits>[2-8])(:(?P<sigmas>\d+(\.\d+)?))?"
    r"(/(?P<axes>[0-3]))?(\+(?P<rule>awq|clip|hq))?(?P<log>\+log)?"
    r"|ternary:(?P<group>[1-9]\d{0,5})"
    r"|grid(?P<states>\d+)(?P<columns>\+columns)?"
)


@dataclass(frozen=True)
class Scheme:
    """How a tensor is stored and rounded.

    `bits` = 0 and `states` = 0 is fp16. With `sigmas` = 0 the largest value of a row sets its step.
    """

    bits: int = 0
    sigmas: float = 0.0
    form: str = "int"
    group: int = 0
    """Number of weights that share a step; 0: all weights of a row."""
    states: int = 0
    columns: bool = False
    """Whether log steps by column are stored too."""
    axes: int = -1
    """Weights with the same indices in the axes before this one share a step."""
    rule: str = ""
    """What else sets the steps of gptqB: "clip", the best of a few clipping points, or "hq"."""
    log: bool = False
    """Whether the steps of a scheme with bits are log steps."""

    @property
    def limit(self) -> int:
        """Largest integer magnitude."""
        return int(2 ** (self.bits - 1) - 1)

    @property
    def least_step(self) -> float:
        """The least step that a row may have, by the scheme's rule."""
        return 1 / self.limit if self.rule == "clip" else 0.0

    @property
    def is_half(self) -> bool:
        """Whether the tensor is stored in fp16."""
        return not self.bits and not self.states

    @property
    def calibrated(self) -> bool:
        """Whether rounding needs a calibration of the inputs."""
        return self.form == "gptq" or self.states > 0

    @property
    def has_log_rows(self) -> bool:
        """Whether the steps of rows are log steps."""
        return self.log or self.states > 0

    def num_steps(self, shape: Sequence[int]) -> int:
        """How many steps a tensor with integers has, those of columns apart."""
        if self.group:
            return math.prod(shape) // self.group
        return math.prod(shape[: self.axes])

    def num_halves(self, shape: Sequence[int]) -> int:
        """How many fp16 numbers a tensor stores."""
        if self.is_half:
            return math.prod(shape)
        return 0 if self.has_log_rows else self.num_steps(shape)

    def num_indices(self, shape: Sequence[int]) -> int:
        """How many log steps a tensor stores: rows, then columns."""
        by_row = self.num_steps(shape) if self.has_log_rows else 0
        return by_row + (shape[-1] if self.columns else 0)

    def __str__(self) -> str:
        if self.states:
            return f"grid{self.states}" + ("+columns" if self.columns else "")
        if self.group:
            return f"ternary:{self.group}"
        if not self.bits:
            return "fp16"
        # repr keeps every digit: the name is what the artifact stores.
        width = f":{self.sigmas!r}".removesuffix(".0") if self.sigmas else ""
        axes = f"/{self.axes}" if self.axes >= 0 else ""
        rule = "+awq" if self.columns else f"+{self.rule}" if self.rule else ""
        return f"{self.form}{self.bits}{width}{axes}{rule}" + ("+log" if self.log else "")


def parse_scheme(text: str) -> Scheme:
    """'fp16', 'int6', 'int6:12.85', 'clip6', 'gptq6:12.85', 'ternary:128' or 'grid8+columns'."""
    if text == "fp16":
        return Scheme()
    match = _SCHEME.fullmatch(text)
    parts = match.groupdict() if match else {}
    states, sigmas = int(parts.get("states") or 0), float(parts.get("sigmas") or 0)
    form, group = parts.get("form") or "int", int(parts.get("group") or 0)
    axes, rule = parts.get("axes"), parts.get("rule")
    misused = (
        ("clip" in (form, rule) and sigmas)
        or (rule == "hq" and not sigmas)
        or (form != "int" and axes)
        or (form != "gptq" and rule)
    )
    if not match or misused or sigmas >= 1000 or (parts["states"] and states not in STATES):
        raise RecipeError(
            f"scheme {text!r}: expected fp16, int2 ... int8, int6:12.85, int8/1, clip6, "
            "gptq6:12.85+log, gptq7:14+awq, gptq6:12.85+hq, gptq5+clip, ternary:128, or grid with "
            f"{', '.join(map(str, STATES))} states, as in grid8+columns"
        )
    if states:
        return Scheme(states=states, columns=bool(parts["columns"]))
    if group:
        return Scheme(bits=2, group=group)
    return Scheme(
        int(parts["bits"]),
        sigmas,
        form,
        columns=rule == "awq",
        axes=int(axes or -1),
        rule=rule if rule in ("clip", "hq") else "",
        log=bool(parts["log"]),
    )


@dataclass(frozen=True, eq=False)
class QuantizedTensor:
    """Integers (rows, cols) and one step per row: fp16, or an int16 log step.

    With scheme fp16, `steps` are the weights themselves and `codes` is None. With ternary:G, the
    rows are runs of G weights.
    """

    shape: tuple[int, ...]
    scheme: Scheme
    steps: np.ndarray
    codes: np.ndarray | None = None
    columns: np.ndarray | None = None
    """Log steps (cols,) int16, if the scheme has them."""
    correction: LowRank | None = None


QuantizedModel = dict[str, QuantizedTensor]

# The log steps of columns, for a tensor that stores none: all columns share a step.
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
    """Steps in fp32: (rows, cols), or (rows, 1) if all columns of a row have the same step."""
    if tensor.scheme.has_log_rows:
        return from_indices(tensor.steps, ONE_COLUMN if tensor.columns is None else tensor.columns)
    steps = tensor.steps.astype(np.float32)[:, None]
    return steps if tensor.columns is None else steps * from_index(tensor.columns)
