"""Round to the nearest multiple of a step: the schemes that need no calibration."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import torch

from underpar.errors import ArtifactError, DivergedError, RecipeError
from underpar.quant.allocate import RateCurve, count_ratios, deviations, divide
from underpar.quant.clip_search import quantile_steps, search_steps
from underpar.quant.logsteps import to_index
from underpar.quant.row_steps import clamp_steps, row_steps
from underpar.quant.schemes import QuantizedTensor, Scheme, steps_of


def round_tensor(weight: np.ndarray, scheme: Scheme, factor: float = 1.0) -> QuantizedTensor:
    """Round each row of `weight` to the nearest multiples of its step, times `factor`."""
    if not np.isfinite(weight).all():
        raise DivergedError("a weight is NaN or infinite")
    shape = tuple(weight.shape)
    if scheme.is_half:
        with np.errstate(over="ignore"):
            halves = weight.astype(np.float16).reshape(-1)
        if not np.isfinite(halves).all():
            raise ArtifactError("a weight is too large for fp16; give its tensor an int scheme")
        return QuantizedTensor(shape, scheme, halves)
    rows = as_rows(weight, scheme)
    tensor = QuantizedTensor(shape, scheme, stored_steps(rows, scheme, factor))
    codes = np.clip(np.rint(rows / steps_of(tensor)), -scheme.limit, scheme.limit)
    return replace(tensor, codes=codes.astype(np.int8))


def as_rows(weight: np.ndarray, scheme: Scheme) -> np.ndarray:
    """A tensor as an fp32 matrix, of which every row has one step."""
    row = weight.shape[-1] if weight.ndim else 1
    if scheme.group and row % scheme.group:
        raise RecipeError(
            f"{scheme} for a tensor of shape {tuple(weight.shape)}: rows of {row} weights "
            f"are not whole runs of {scheme.group}; choose a divisor of {row}"
        )
    return weight.astype(np.float32).reshape(scheme.num_steps(weight.shape), -1)


def stored_steps(rows: np.ndarray, scheme: Scheme, factor: float | np.ndarray = 1.0) -> np.ndarray:
    """The steps (R,) of rows (R, C) as a scheme with bits stores them: fp16, or log steps.

    They are those of the scheme times `factor`, a number or (R,). With +clip they are the widest of
    those that are tried.
    """
    if scheme.form == "clip":
        steps = clamp_steps(search_steps(torch.from_numpy(rows), scheme.limit).numpy()[:, 0])
    elif scheme.rule == "clip":
        return clipped_steps(rows, scheme, factor)[0]
    else:
        steps = row_steps(rows, scheme.limit, scheme.sigmas, by_mean=bool(scheme.group))
    return _store(steps, scheme, factor)


def clipped_steps(
    rows: np.ndarray, scheme: Scheme, factor: float | np.ndarray = 1.0
) -> list[np.ndarray]:
    """The steps (R,) that +clip chooses from, as they are stored, without repetitions."""
    tries = quantile_steps(torch.from_numpy(rows), scheme.limit).numpy()
    stored = [_store(np.maximum(steps, scheme.least_step), scheme, factor) for steps in tries]
    return [s for i, s in enumerate(stored) if not any(map(np.array_equal, stored[:i], [s] * i))]


def _store(steps: np.ndarray, scheme: Scheme, factor: float | np.ndarray) -> np.ndarray:
    if np.any(factor != 1.0):
        steps = clamp_steps(factor * steps)
    return to_index(steps) if scheme.log else steps.astype(np.float16)


def fixed_rate_curve(weights: Mapping[str, np.ndarray], schemes: Mapping[str, Scheme]) -> RateCurve:
    """The predicted bits of matrices whose steps do not depend on sensitivity, by their factor."""
    steps = {n: stored_steps(as_rows(w, schemes[n]), schemes[n]) for n, w in weights.items()}
    tensors = {n: QuantizedTensor(w.shape, schemes[n], steps[n]) for n, w in weights.items()}
    ratios = (divide(steps_of(t), deviations(weights[n])) for n, t in tensors.items())
    return count_ratios((each, 0.0) for each in ratios)
