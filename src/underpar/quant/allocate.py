"""How fine to round each weight: steps by sensitivity, and the bits that they will take.

An error e of weight (r, j) costs 1/2 g_r d_j e^2 nats per token (`quant.fisher`). With an entropy
coder, a given loss takes the fewest bits if step^2 g d is the same everywhere in the model. The
size of the weights does not matter, unlike in the SD-clip rule of PR 1394. Steps by column are
those of WaterSIC (arXiv:2603.04956). PR 1962 used d alone, and lost.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from underpar.quant.calibration import Calibration
from underpar.quant.fisher import Fisher
from underpar.quant.gptq import Options, damp, factor_inverse
from underpar.quant.logsteps import from_index, from_indices, to_index

Floats = npt.NDArray[np.float64]

DAMPING = Options.damping
# The least sensitivity. Where it is reached, the largest step that can be stored is used.
LEAST = 1e-30

# Bits per weight that a trellis saves at equal error, by its number of states; from simulations.
# At half the step a trellis has the rate of plain rounding, as it allows half of the integers.
TRELLIS_BITS = {1: 0.0, 4: 0.165, 8: 0.179, 16: 0.188, 64: 0.206}

# Ratios of step to deviation whose entropy is computed exactly: 1/2 to 64, in 64ths of an octave.
_PER_OCTAVE = 64
_LOWEST, _HIGHEST = -1, 6
# Larger ratios of step to deviation, in octaves, count as this.
_FARTHEST = 128


@dataclass(frozen=True, eq=False)
class Sensitivity:
    """An error e of weight (r, j) costs 1/2 rows[r] columns[j] e^2 nats per token."""

    rows: Floats  # (R,)
    columns: Floats  # (C,)


@dataclass(frozen=True, eq=False)
class Steps:
    """Log steps: weight (r, j) is rounded to multiples of 2^((rows[r] + columns[j]) / 16)."""

    rows: npt.NDArray[np.int16]  # (R,)
    columns: npt.NDArray[np.int16] | None = None  # (C,), or all 0

    def values(self) -> npt.NDArray[np.float32]:
        """The steps: (R, C), or (R, 1) if all columns of a row have the same step."""
        if self.columns is None:
            return from_index(self.rows)[:, None]
        return from_indices(self.rows, self.columns)


def conditional_variances(hessian: Tensor, damping: float = DAMPING) -> Floats:
    """D (C,): the sum of squares of column j that the columns rounded after it cannot explain.

    D_j = 1 / U_jj^2, where U is the factor of GPTQ for the Hessian (C, C), damped by a share of its
    mean diagonal. The calibration loss of a row is the sum of D_j times its squared errors.
    """
    damped, _ = damp(hessian.double()[None], damping)
    factor = factor_inverse(damped)[0]
    return factor.diagonal().pow(-2).cpu().numpy()


def sensitivities(
    calibration: Calibration, fisher: Fisher, damping: float = DAMPING
) -> dict[str, Sensitivity]:
    """The cost of errors, by weight name."""
    # q, k and v share a Hessian: its factor is computed once.
    distinct = {id(h): h for h in calibration.hessians.values()}
    variances = {key: conditional_variances(h, damping) for key, h in distinct.items()}
    costs = {}
    for name, hessian in calibration.hessians.items():
        columns = np.maximum(variances[id(hessian)] / calibration.num_tokens, LEAST)
        rows = fisher.rows(name, float(columns.mean())).double().cpu().numpy()
        costs[name] = Sensitivity(np.maximum(rows, LEAST), columns)
    return costs


def spread(
    sensitivity: Sensitivity, constant: float, rows: bool = True, columns: bool = False
) -> tuple[Floats, Floats]:
    """Steps as the product of a factor by row (R,) and a factor by column (C,), not yet rounded.

    With `rows` and `columns`, step_rj = constant / sqrt(g_r d_j). Without one of them, rows or
    columns share a step, which follows from their mean sensitivity: the least loss with one step.
    The geometric mean of the column factors is 1.
    """
    g, d = sensitivity.rows, sensitivity.columns
    by_column = np.exp(np.log(d).mean() / 2) / np.sqrt(d) if columns else np.ones_like(d)
    shared = float((d * by_column**2).mean())
    by_row = g if rows else np.full_like(g, g.mean())
    return constant / np.sqrt(by_row * shared), by_column


def allocate(
    sensitivity: Sensitivity,
    constant: float,
    rows: bool = True,
    columns: bool = False,
    num_states: int = 1,
) -> Steps:
    """The steps of `spread` as log steps.

    One constant serves the whole model: the steps of a trellis are finer, so that its errors are
    those of plain rounding with this constant.
    """
    if num_states > 1:
        constant *= 2 ** TRELLIS_BITS[num_states] / 2
    by_row, by_column = spread(sensitivity, constant, rows, columns)
    return Steps(to_index(by_row), to_index(by_column) if columns else None)


@dataclass(frozen=True, eq=False)
class RateCurve:
    """Predicted bits of all weights together, as a function of the constant.

    The coder is assumed to know the deviations of rows and columns.
    """

    octaves: Floats
    """log2 of step / deviation at constant 1; of a trellis, that of rounding at equal rate."""
    counts: npt.NDArray[np.int64]
    """How many weights have each ratio."""

    def bits(self, constant: float) -> float:
        """The predicted bits with this constant, with the rate penalty of `quant.gptq`."""
        a = np.exp2(self.octaves + math.log2(constant))
        # The rate penalty divides weights by 1 + a^2 / 12 before they are rounded.
        return float(self.counts @ gaussian_bits(a * (1 + a**2 / 12)))

    def constant_for(self, rate_bits: float) -> float:
        """The constant for which `bits` predicts `rate_bits`."""
        assert rate_bits > 0
        low, high = -2.0 * _FARTHEST, 2.0 * _FARTHEST
        for _ in range(64):
            middle = (low + high) / 2
            if self.bits(2.0**middle) > rate_bits:
                low = middle
            else:
                high = middle
        return 2.0**high


class Layout(NamedTuple):
    """Which steps of a grid vary, by row and by column, and the number of states of its trellis."""

    rows: bool = True
    columns: bool = False
    num_states: int = 1


def rate_curve(
    weights: Mapping[str, npt.NDArray[np.floating]],
    sensitivity: Mapping[str, Sensitivity],
    layouts: Mapping[str, Layout],
) -> RateCurve:
    """The rate curve of matrices (R, C), each with its layout; all by name."""

    def ratios() -> Iterator[tuple[Floats, float]]:
        for name, weight in weights.items():
            rows, columns, num_states = layouts[name]
            by_row, by_column = spread(sensitivity[name], 1.0, rows, columns)
            steps = np.outer(by_row, by_column)
            yield divide(steps, deviations(weight)), TRELLIS_BITS[num_states]

    return count_ratios(ratios())


def count_ratios(ratios: Iterable[tuple[Floats, float]]) -> RateCurve:
    """The curve of weights by their ratios of step to deviation, and octaves that are added."""
    octaves = np.arange(-_FARTHEST * _PER_OCTAVE, _FARTHEST * _PER_OCTAVE + 1) / _PER_OCTAVE
    counts = np.zeros(len(octaves), dtype=np.int64)
    for values, added in ratios:
        logs = np.log2(values[np.isfinite(values)]) + added
        logs = np.clip(logs, -_FARTHEST, _FARTHEST) + _FARTHEST
        counts += np.bincount(np.rint(_PER_OCTAVE * logs).astype(int), minlength=len(counts))
    return RateCurve(octaves[counts > 0], counts[counts > 0])


def deviations(weight: npt.NDArray[np.floating]) -> Floats:
    """Root mean squares (R, C), modeled as a number per row times a number per column."""
    squares = weight.astype(np.float64) ** 2
    by_row = squares.mean(axis=1, keepdims=True)
    # Relative to their rows: coarse rows must not set the columns' scale.
    shares = np.divide(squares, by_row, out=np.zeros_like(squares), where=by_row > 0)
    alive = max(1, np.count_nonzero(by_row))
    return np.sqrt(by_row * shares.sum(axis=0) / alive)


def divide(steps: npt.NDArray[np.floating], scales: Floats) -> Floats:
    """Steps divided by deviations; infinite for a deviation of 0."""
    return np.divide(steps, scales, out=np.full(scales.shape, np.inf), where=scales > 0)


def gaussian_bits(ratios: npt.ArrayLike) -> Floats:
    """Entropy in bits of a unit Gaussian that is rounded to multiples of each ratio."""
    a = np.asarray(ratios, dtype=np.float64)
    small = np.minimum(a, 1.0)
    # Rounding adds a variance of a^2 / 12; up to a = 1 the sum stays Gaussian to 1e-5 bits.
    high_rate = np.log2(2 * math.pi * math.e * (1 / small**2 + 1 / 12)) / 2
    octaves = np.log2(np.clip(a, 2.0**_LOWEST, 2.0**_HIGHEST))
    table = _coarse_bits()
    low_rate = np.interp(octaves, np.linspace(_LOWEST, _HIGHEST, len(table)), table)
    return np.where(a < 1, high_rate, low_rate)


@cache
def _coarse_bits() -> Floats:
    """Entropy in bits of a rounded unit Gaussian, by octave of the step."""
    octaves = np.linspace(_LOWEST, _HIGHEST, (_HIGHEST - _LOWEST) * _PER_OCTAVE + 1)
    steps = torch.from_numpy(octaves).exp2()[:, None]
    edges = steps * (torch.arange(64, dtype=torch.float64) + 0.5)
    tails = torch.special.erfc(edges / math.sqrt(2)) / 2
    # One side of the Gaussian, and the middle, which rounds to 0.
    probs = tails[:, :-1] - tails[:, 1:]
    middle = 1 - 2 * tails[:, 0]
    bits = 2 * torch.special.entr(probs).sum(1) + torch.special.entr(middle)
    return (bits / math.log(2)).numpy()
