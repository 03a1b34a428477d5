"""HQClip: rows whose weights meet large inputs get wider steps.

Source: PR 1412, also an option of PR 1894. The importance of a row is the mean of its |weights|,
weighted by the mean squares of their inputs. The published gain is within the noise of a seed, and
importances of two seeds hardly agree: a candidate of `lab.quant_curves`, in no recipe.
"""

from __future__ import annotations

import numpy as np
from torch import Tensor

from underpar.quant.gptq import damp

# How far steps follow the importance; 0: not at all.
SHARE = 0.175


def step_factors(weight: np.ndarray, hessian: Tensor, damping: float) -> np.ndarray:
    """The factor (R,) on the step of each row of a matrix (R, C), by the Hessian of its inputs."""
    damped, _ = damp(hessian[None], damping)
    squares = damped[0].diagonal().double().cpu().numpy()  # (C,)
    importance = (np.abs(weight) * (squares / squares.mean())).mean(axis=1)
    mean = importance.mean()
    return 1 + SHARE * (importance / mean - 1) if mean > 0 else np.ones_like(importance)
