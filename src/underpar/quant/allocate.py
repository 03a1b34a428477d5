"""How fine to round each weight: steps from what an error costs, and what they cost in bits.

An error e of weight (r, j) costs 1/2 g_r d_j e^2 nats a token (`quant.fisher`). Behind an entropy
coder the cheapest steps at a given loss have the same step^2 g d everywhere in the model: the
weights' own size does not matter, unlike in the SD-clip rule of PR 1394. Steps by column are those
of WaterSIC (arXiv:2603.04956). PR 1962 took d alone, and lost.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
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
# Below it, nothing is known to cost anything; the largest step that can be stored does.
LEAST = 1e-30

# Bits a weight that a trellis of so many states saves at equal error, in simulation. Its points are
# twice as dense as those it can use next: at half the step its rate is that of plain rounding.
TRELLIS_BITS = {1: 0.0, 4: 0.165, 8: 0.179, 16: 0.188, 64: 0.206}

# Ratios of step to deviation with exact sums: 1/2 to 64, in 64ths of an octave.
_PER_OCTAVE = 64
_LOWEST, _HIGHEST = -1, 6
# Octaves between a step and a deviation that are told apart.
_FARTHEST = 128


@dataclass(frozen=True, eq=False)
class Sensitivity:
    """An error e of weight (r, j) costs 1/2 rows[r] columns[j] e^2 nats a token."""

    rows: Floats  # (R,)
    columns: Floats  # (C,)


@dataclass(frozen=True, eq=False)
class Steps:
    """Log steps: weight (r, j) is rounded to multiples of 2^((rows[r] + columns[j]) / 16)."""

    rows: npt.NDArray[np.int16]  # (R,)
    columns: npt.NDArray[np.int16] | None = None  # (C,), or all 0

    def values(self) -> npt.NDArray[np.float32]:
        """The steps, (R, C), or (R, 1) where columns do not differ."""
        if self.columns is None:
            return from_index(self.rows)[:, None]
        return from_indices(self.rows, self.columns)


def conditional_variances(hessian: Tensor, damping: float = DAMPING) -> Floats:
    """D (C,): sum of squares of column j that the columns rounded after it cannot explain.

    D_j = 1 / U_jj^2 with U the factor of GPTQ, of a Hessian (C, C) damped by a share of its mean
    diagonal: the calibration loss of a row is the sum of D_j times its squared rounding errors.
    """
    damped, _ = damp(hessian.double()[None], damping)
    factor = factor_inverse(damped)[0]
    return factor.diagonal().pow(-2).cpu().numpy()


def sensitivities(
    calibration: Calibration, fisher: Fisher, damping: float = DAMPING
) -> dict[str, Sensitivity]:
    """What errors cost, by weight name."""
    # q, k and v share a Hessian: its factor is made once.
    own = {id(h): h for h in calibration.hessians.values()}
    variances = {key: conditional_variances(h, damping) for key, h in own.items()}
    found = {}
    for name, hessian in calibration.hessians.items():
        columns = np.maximum(variances[id(hessian)] / calibration.num_tokens, LEAST)
        rows = fisher.rows(name, float(columns.mean())).double().cpu().numpy()
        found[name] = Sensitivity(np.maximum(rows, LEAST), columns)
    return found


def spread(
    sensitivity: Sensitivity, constant: float, rows: bool = True, columns: bool = False
) -> tuple[Floats, Floats]:
    """Steps as the product of two factors, (R,) and (C,), not yet on the grid of log steps.

    With `rows` and `columns` step_rj = constant / sqrt(g_r d_j). Where all rows or all columns
    share a step, their mean sensitivity sets it: the least loss that one step allows. Column
    factors have a geometric mean of 1.
    """
    g, d = sensitivity.rows, sensitivity.columns
    by_column = np.exp(np.log(d).mean() / 2) / np.sqrt(d) if columns else np.ones_like(d)
    shared = float((d * by_column**2).mean())
    own = g if rows else np.full_like(g, g.mean())
    return constant / np.sqrt(own * shared), by_column


def allocate(
    sensitivity: Sensitivity,
    constant: float,
    rows: bool = True,
    columns: bool = False,
    num_states: int = 1,
) -> Steps:
    """The steps of `spread` as log steps, those of a trellis finer by what gives the same error.

    One constant serves the whole model.
    """
    own = constant if num_states == 1 else constant * 2 ** TRELLIS_BITS[num_states] / 2
    by_row, by_column = spread(sensitivity, own, rows, columns)
    return Steps(to_index(by_row), to_index(by_column) if columns else None)


@dataclass(frozen=True, eq=False)
class RateCurve:
    """Bits of all weights together, coded with known deviations, as the constant changes."""

    octaves: Floats
    """log2 of step over deviation at a constant of 1, as of a grid without a trellis."""
    counts: npt.NDArray[np.int64]
    """Weights that have it."""

    def bits(self, constant: float) -> float:
        """The predicted rate with this constant, integers being weighed by their bits."""
        a = np.exp2(self.octaves + math.log2(constant))
        # Weights are divided by 1 + a^2 / 12 before they are rounded (see gptq).
        return float(self.counts @ gaussian_bits(a * (1 + a**2 / 12)))

    def constant_for(self, rate_bits: float) -> float:
        """The constant with which `rate_bits` are predicted."""
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
    """What a grid may vary: its rows' steps, its columns', and the states of its trellis."""

    rows: bool = True
    columns: bool = False
    num_states: int = 1


def rate_curve(
    weights: Mapping[str, npt.NDArray[np.floating]],
    sensitivity: Mapping[str, Sensitivity],
    layouts: Mapping[str, Layout],
) -> RateCurve:
    """What the matrices (R, C) will cost, each with the layout of its name."""
    octaves = np.arange(-_FARTHEST * _PER_OCTAVE, _FARTHEST * _PER_OCTAVE + 1) / _PER_OCTAVE
    counts = np.zeros(len(octaves), dtype=np.int64)
    for name, weight in weights.items():
        rows, columns, num_states = layouts[name]
        by_row, by_column = spread(sensitivity[name], 1.0, rows, columns)
        ratios = _divide(np.outer(by_row, by_column), deviations(weight))
        found = np.log2(ratios[np.isfinite(ratios)]) + TRELLIS_BITS[num_states]
        found = np.clip(found, -_FARTHEST, _FARTHEST) + _FARTHEST
        counts += np.bincount(np.rint(_PER_OCTAVE * found).astype(int), minlength=len(counts))
    return RateCurve(octaves[counts > 0], counts[counts > 0])


def deviations(weight: npt.NDArray[np.floating]) -> Floats:
    """Root mean squares (R, C) as a product of one number a row and one a column."""
    squares = weight.astype(np.float64) ** 2
    by_row = squares.mean(axis=1, keepdims=True)
    # Relative to their rows: coarse rows must not set the columns' scale.
    shares = np.divide(squares, by_row, out=np.zeros_like(squares), where=by_row > 0)
    alive = max(1, np.count_nonzero(by_row))
    return np.sqrt(by_row * shares.sum(axis=0) / alive)


def _divide(steps: npt.NDArray[np.floating], scales: Floats) -> Floats:
    """Steps in deviations; infinite where there is nothing to round."""
    return np.divide(steps, scales, out=np.full(scales.shape, np.inf), where=scales > 0)


def gaussian_bits(ratios: npt.ArrayLike) -> Floats:
    """Entropy of a unit Gaussian rounded to multiples of each ratio: at high and at low rates."""
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
