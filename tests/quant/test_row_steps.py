"""One rule for steps by row: on arrays and on tensors it gives the bits that each library gives."""

import numpy as np
import pytest
import torch

from underpar.levers.ste import round_rows
from underpar.quant.row_steps import LARGEST_STEP, SMALLEST_STEP, row_steps
from underpar.quant.schemes import Scheme

ROWS = np.random.default_rng(3).standard_normal((64, 37)).astype(np.float32)
# All zeros, a constant, values near the smallest and above the largest step.
ROWS[0], ROWS[1], ROWS[2], ROWS[3] = 0, 1, ROWS[2] * 1e-6, ROWS[3] * 1e7
LIMITS = [1, 31, 127]


def clamped(steps: np.ndarray) -> np.ndarray:
    return np.clip(steps, SMALLEST_STEP, LARGEST_STEP)


@pytest.mark.parametrize("limit", LIMITS)
@pytest.mark.parametrize("sigmas", [0.0, 12.85])
@pytest.mark.parametrize("columns", [1, 37])
def test_arrays_get_the_sums_of_numpy(limit: int, sigmas: float, columns: int) -> None:
    rows = np.ascontiguousarray(ROWS[:, :columns])
    width = np.abs(rows).max(axis=1)
    if sigmas and columns > 1:
        width = sigmas * rows.std(axis=1, ddof=1)
    assert row_steps(rows, limit, sigmas).tobytes() == clamped(width / limit).tobytes()
    mean = np.abs(rows).mean(axis=1)
    assert row_steps(rows, 1, sigmas, by_mean=True).tobytes() == clamped(mean).tobytes()


@pytest.mark.parametrize("limit", LIMITS)
@pytest.mark.parametrize("sigmas", [0.0, 12.85])
@pytest.mark.parametrize("columns", [1, 37])
def test_tensors_get_the_sums_of_torch(limit: int, sigmas: float, columns: int) -> None:
    rows = torch.from_numpy(ROWS[:, :columns].copy())
    width = rows.abs().amax(dim=1, keepdim=True)
    if sigmas and columns > 1:
        width = sigmas * rows.std(dim=1, keepdim=True)
    expected = (width / limit).clamp(SMALLEST_STEP, LARGEST_STEP)[:, 0]
    assert torch.equal(row_steps(rows, limit, sigmas), expected)
    mean = rows.abs().mean(dim=1).clamp(SMALLEST_STEP, LARGEST_STEP)
    assert torch.equal(row_steps(rows, 1, sigmas, by_mean=True), mean)


@pytest.mark.parametrize("bits", [2, 6, 8])
@pytest.mark.parametrize("sigmas", [0.0, 12.85])
def test_fake_quantization_has_these_steps(bits: int, sigmas: float) -> None:
    rows = torch.from_numpy(ROWS)
    limit = Scheme(bits).limit
    width = sigmas * rows.std(dim=1, keepdim=True) if sigmas else rows.abs().amax(1, keepdim=True)
    steps = (width / limit).clamp(SMALLEST_STEP, LARGEST_STEP).half().to(rows.dtype)
    expected = (rows / steps).round().clamp(-limit, limit) * steps
    assert torch.equal(round_rows(rows, bits, sigmas), expected)
