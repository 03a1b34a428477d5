"""Round to the nearest multiple of a step: the schemes that need no calibration."""

from __future__ import annotations

import numpy as np
import torch

from underpar.errors import ArtifactError, RecipeError
from underpar.quant.clip_search import search_steps
from underpar.quant.row_steps import clamp_steps, row_steps
from underpar.quant.schemes import QuantizedTensor, Scheme


def round_tensor(weight: np.ndarray, scheme: Scheme) -> QuantizedTensor:
    """Round each row of `weight` to the nearest multiples of its step."""
    if not np.isfinite(weight).all():
        raise ArtifactError("a weight is NaN or infinite; the run diverged, nothing to pack")
    shape = tuple(weight.shape)
    if scheme.is_half:
        with np.errstate(over="ignore"):
            halves = weight.astype(np.float16).reshape(-1)
        if not np.isfinite(halves).all():
            raise ArtifactError("a weight is too large for fp16; give its tensor an int scheme")
        return QuantizedTensor(shape, scheme, halves)
    rows = as_rows(weight, scheme)
    steps = stored_steps(rows, scheme)
    codes = np.rint(rows / steps.astype(np.float32)[:, None])
    codes = np.clip(codes, -scheme.limit, scheme.limit).astype(np.int8)
    return QuantizedTensor(shape, scheme, steps, codes)


def as_rows(weight: np.ndarray, scheme: Scheme) -> np.ndarray:
    """A tensor as an fp32 matrix, of which every row has one step."""
    row = weight.shape[-1] if weight.ndim else 1
    if scheme.group and row % scheme.group:
        raise RecipeError(
            f"{scheme} for a tensor of shape {tuple(weight.shape)}: rows of {row} weights "
            f"are not whole runs of {scheme.group}; choose a divisor of {row}"
        )
    return weight.astype(np.float32).reshape(scheme.num_halves(weight.shape), -1)


def stored_steps(rows: np.ndarray, scheme: Scheme) -> np.ndarray:
    """fp16 steps (R,) for rows (R, C) of a scheme with bits."""
    if scheme.form == "clip":
        steps = clamp_steps(search_steps(torch.from_numpy(rows), scheme.limit).numpy()[:, 0])
    else:
        steps = row_steps(rows, scheme.limit, scheme.sigmas, by_mean=bool(scheme.group))
    return steps.astype(np.float16)
