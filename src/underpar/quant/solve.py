"""Rounding that knows what errors cost: the matrices of a model by scheme and calibration."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch

from underpar.errors import ArtifactError, RecipeError
from underpar.quant import gptq
from underpar.quant.allocate import Sensitivity, allocate
from underpar.quant.calibration import Calibration
from underpar.quant.schemes import QuantizedTensor, Scheme, as_rows, row_steps


@dataclass(frozen=True)
class Solver:
    """Calibration, sensitivities, and the one constant that sets the size of all grids."""

    calibration: Calibration
    sensitivity: Mapping[str, Sensitivity]
    constant: float
    device: torch.device

    def solve(self, name: str, weight: np.ndarray, scheme: Scheme) -> QuantizedTensor:
        """Round one matrix with feedback."""
        if name not in self.calibration.hessians:
            raise RecipeError(
                f"quant.rules: {scheme} for {name!r}, whose inputs are not calibrated; use intB:k"
            )
        if not np.isfinite(weight).all():
            raise ArtifactError("a weight is NaN or infinite; the run diverged, nothing to pack")
        if scheme.states:
            found = allocate(self.sensitivity[name], self.constant, columns=scheme.columns)
            codes = self._codes(
                name, weight, found.values(), gptq.Options(num_states=scheme.states)
            )
            return QuantizedTensor(weight.shape, scheme, found.rows, codes, found.columns)
        steps = row_steps(as_rows(weight), scheme)
        options = gptq.Options(limit=scheme.limit, act_order=True)
        codes = self._codes(name, weight, steps.astype(np.float32)[:, None], options)
        return QuantizedTensor(weight.shape, scheme, steps, codes.astype(np.int8))

    def _codes(
        self, name: str, weight: np.ndarray, steps: np.ndarray, options: gptq.Options
    ) -> np.ndarray:
        w, s = (torch.from_numpy(np.ascontiguousarray(a)).to(self.device) for a in (weight, steps))
        hessian = self.calibration.hessians[name].to(self.device)
        codes: np.ndarray = gptq.solve(w, hessian, s, options).codes.cpu().numpy()
        return codes
