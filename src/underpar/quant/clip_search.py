"""Steps from the best of a few clipping points, row by row, without a Hessian (GPTQ-lite).

Source: PR 374 and its descendants, which describe a search per row (some of their code searches per
tensor). The search minimizes the error for a given number of levels, and ignores how many bits the
levels take. With an entropy coder, steps by deviation or by sensitivity are better.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from underpar.errors import DivergedError
from underpar.quant.gptq import round_to_nearest
from underpar.quant.row_steps import SMALLEST_STEP

# Shares of the magnitudes of a row that are not clipped.
QUANTILES = (1.0, 0.99999, 0.9999, 0.9995, 0.999)


@torch.no_grad()
def search_steps(weight: Tensor, limit: int, quantiles: Sequence[float] = QUANTILES) -> Tensor:
    """The step (R, 1) of least squared error of each row, with integers -`limit` ... `limit`."""
    if not weight.isfinite().all():
        raise DivergedError("a weight is NaN or infinite")
    tries = quantile_steps(weight, limit, quantiles)
    best_steps = (weight.abs().amax(dim=1, keepdim=True) / limit).clamp_min(SMALLEST_STEP)
    best_errors = torch.full_like(best_steps, torch.inf)
    for steps in tries[..., None]:
        restored = round_to_nearest(weight, steps, limit) * steps
        errors = (restored - weight).square().sum(dim=1, keepdim=True)
        # In a tie the earlier, wider range wins.
        better = errors < best_errors
        best_steps = torch.where(better, steps, best_steps)
        best_errors = torch.where(better, errors, best_errors)
    return best_steps


def quantile_steps(weight: Tensor, limit: int, quantiles: Sequence[float] = QUANTILES) -> Tensor:
    """The step of each clipping point and row (Q, R)."""
    magnitudes = weight.abs().sort(dim=1).values  # (R, C)
    points = [_quantile(magnitudes, quantile)[:, 0] for quantile in quantiles]
    return (torch.stack(points) / limit).clamp_min(SMALLEST_STEP)


def _quantile(ascending: Tensor, quantile: float) -> Tensor:
    """A linear interpolation; torch.quantile refuses more than 2^24 values."""
    last = ascending.shape[1] - 1
    low = int(quantile * last)
    pair = ascending[:, [low, min(low + 1, last)]]
    return torch.lerp(pair[:, :1], pair[:, 1:], quantile * last - low)
