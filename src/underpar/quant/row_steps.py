"""Steps by row: the rule of intB, intB:k and ternary:G, for the packer and what imitates it.

The packer works on numpy arrays. The forecast of the size (`artifact.size_while_training`) and
fake quantization (`levers.ste`) work on tensors, on their device. Their sums may differ in the last
bit, therefore each keeps its own library; the rule is the same code.
"""

from __future__ import annotations

from typing import TypeVar

import numpy as np
from torch import Tensor

# The range of a stored step: normal fp16 numbers. Subnormal ones have fewer digits.
SMALLEST_STEP, LARGEST_STEP = 2.0**-14, 65504.0

Rows = TypeVar("Rows", np.ndarray, Tensor)


def row_steps(rows: Rows, limit: int, sigmas: float = 0.0, by_mean: bool = False) -> Rows:
    """The step (R,) of each row (R, C) of integers -`limit` ... `limit`, not yet rounded to fp16.

    The integers reach as far as `sigmas` deviations of the row, as the row's largest magnitude
    (`sigmas` = 0), or as its mean magnitude (`by_mean`, the rule of PR 640).
    """
    if by_mean:
        widths = abs(rows).mean(1)
    elif sigmas > 0 and rows.shape[1] > 1:
        widths = sigmas * _deviations(rows)
    else:
        # Also for a single column, which has no deviation.
        widths = _largest(rows)
    return clamp_steps(widths / limit)


def clamp_steps(steps: Rows) -> Rows:
    """The steps, moved into the range that is stored."""
    return steps.clip(SMALLEST_STEP, LARGEST_STEP)


def _deviations(rows: Rows) -> Rows:
    return rows.std(axis=1, ddof=1) if isinstance(rows, np.ndarray) else rows.std(dim=1)


def _largest(rows: Rows) -> Rows:
    return abs(rows).max(axis=1) if isinstance(rows, np.ndarray) else rows.abs().amax(dim=1)
