"""A quantization job: the weights of one model, and everything that decides how they are rounded.

Only a constant is open: that of the grids (`quant.allocate`), or the factor of the other steps.
`QuantJob.round` takes it, and is called again with other constants until the packed file fits its
cap (`artifact.fit`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import torch

from underpar.quant import awq, lqer
from underpar.quant.allocate import Layout, RateCurve, rate_curve, sensitivities
from underpar.quant.files import Measured
from underpar.quant.logsteps import to_index
from underpar.quant.rounding import fixed_rate_curve
from underpar.quant.rules import match_rules, refine, round_model
from underpar.quant.schemes import QuantizedModel, Scheme
from underpar.quant.solve import Solver
from underpar.schema import QuantPart


@dataclass(frozen=True, eq=False)
class QuantJob:
    """Weights by name, the [quant] section of the recipe, and the calibration of the weights.

    `measured` and `solver` are None if no scheme needs a calibration.
    """

    weights: Mapping[str, np.ndarray]
    part: QuantPart
    measured: Measured | None = None
    solver: Solver | None = None

    @cached_property
    def schemes(self) -> dict[str, Scheme]:
        """How each tensor is stored, in the order of names."""
        schemes = match_rules(sorted(self.weights), self.part.rules)
        if self.solver is None or not self.part.finer_matrices:
            return schemes
        hessians = self.solver.calibration.hessians
        inputs = {name: float(hessian.trace()) for name, hessian in hessians.items()}
        return refine(schemes, self.part.finer_matrices, inputs)

    @cached_property
    def grids(self) -> dict[str, np.ndarray]:
        """The matrices whose steps follow the constant."""
        return {name: self.weights[name] for name, s in self.schemes.items() if s.states}

    @cached_property
    def widened(self) -> dict[str, np.ndarray]:
        """The matrices without a grid whose steps are multiplied by the constant."""
        if self.grids or not self.part.fit:
            return {}
        return {name: self.weights[name] for name, s in self.schemes.items() if s.calibrated}

    def round(self, constant: float) -> QuantizedModel:
        """All tensors rounded with this constant, and the low-rank corrections added."""
        solve = None
        if self.solver is not None:
            factor = constant if self.widened else 1.0
            solve = replace(self.solver, constant=constant, factor=factor).solve
        tensors = round_model(self.weights, self.schemes, solve)
        if self.solver is None:
            return tensors
        return lqer.correct(
            tensors,
            self.weights,
            self.solver.calibration,
            self.solver.sensitivity,
            lqer.settings_of(self.part),
            self.solver.device,
        )

    def rate_curve(self) -> RateCurve:
        """The predicted bits of the matrices that follow the constant, as its function."""
        assert self.solver is not None
        if not self.grids:
            return fixed_rate_curve(self.widened, self.schemes)
        layouts = {
            name: Layout(columns=self.schemes[name].columns, num_states=self.schemes[name].states)
            for name in self.grids
        }
        return rate_curve(self.grids, self.solver.sensitivity, layouts)

    def activations(self) -> dict[str, int]:
        """Matrix -> log step of its largest input, as far as inputs were calibrated."""
        largest = self.measured.calibration.largest if self.measured else {}
        return {name: int(to_index(np.array(value))) for name, value in largest.items()}


def open_job(
    weights: Mapping[str, np.ndarray],
    part: QuantPart,
    measured: Measured | None,
    device: torch.device,
) -> QuantJob:
    """The job of rounding `weights` by `part`, with their calibration if a scheme needs one."""
    if measured is None:
        return QuantJob(weights, part)
    costs = sensitivities(measured.calibration, measured.fisher)
    schemes = match_rules(list(weights), part.rules)
    matrices = [name for name, scheme in schemes.items() if scheme.bits and scheme.columns]
    protected = awq.choose(
        weights, measured.calibration, matrices, part.awq_groups, part.awq_group_columns
    )
    solver = Solver(measured.calibration, costs, 1.0, device, protected=protected)
    return QuantJob(weights, part, measured, solver)
