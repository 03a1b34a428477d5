"""Round the matrices whose schemes need a calibration: with GPTQ, many at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from itertools import groupby

import numpy as np
import torch
from torch import Tensor

from underpar.errors import DivergedError, RecipeError
from underpar.quant import gptq
from underpar.quant.allocate import DAMPING, Sensitivity, allocate
from underpar.quant.calibration import Calibration
from underpar.quant.importance import step_factors
from underpar.quant.logsteps import STEPS_PER_OCTAVE
from underpar.quant.rounding import as_rows, clipped_steps, stored_steps
from underpar.quant.schemes import (
    QuantizedModel,
    QuantizedTensor,
    Scheme,
    dequantize,
    steps_of,
)

# Memory that a batch of matrices may take, by kind of device; on others a batch is one matrix.
BATCH_BYTES = {"cuda": 4 << 30}
# Memory that a solve takes per weight, and per weight and state of a trellis.
WEIGHT_BYTES, STATE_BYTES = 24, 12

# Columns that `quant.awq` protects have steps one octave finer. PR 1908: 63/127 of the others.
FINER = -STEPS_PER_OCTAVE
FINER_LIMIT = 127

# The tensor itself is in the key, which keeps it alive.
_Key = tuple[Tensor, float, bool, torch.device]


@dataclass(frozen=True, eq=False)
class Task:
    """A matrix, and its quantized tensor without the integers."""

    name: str
    weight: np.ndarray
    tensor: QuantizedTensor

    @property
    def kind(self) -> tuple[str, tuple[int, ...]]:
        """Tasks of the same kind can be solved in one batch."""
        return str(self.tensor.scheme), self.tensor.shape


@dataclass(frozen=True, eq=False)
class Solver:
    """Rounds matrices by their calibration.

    `constant` sets the steps of all grids. Those of other schemes are multiplied by `factor`.
    """

    calibration: Calibration
    sensitivity: Mapping[str, Sensitivity]
    constant: float
    device: torch.device
    damping: float = DAMPING
    factor: float = 1.0
    protected: Mapping[str, np.ndarray] = field(default_factory=dict)
    """Columns (C,) bool with finer steps, for the schemes with +awq."""
    weigh_bits: bool = True
    """Whether grids are solved with the rate penalty (`quant.gptq`)."""
    batch_bytes: int | None = None
    """Memory that a batch of matrices may take; None: `BATCH_BYTES` of the device."""
    inverses: dict[_Key, gptq.Inverse] = field(default_factory=dict, repr=False)
    """One per Hessian; `replace` keeps the dict, so that solvers of other constants share it."""

    def solve(
        self,
        weights: Mapping[str, np.ndarray],
        schemes: Mapping[str, Scheme],
        on_tensor: Callable[[str], None] | None = None,
    ) -> QuantizedModel:
        """Round matrices with error feedback; returns them in the order of `schemes`.

        `on_tensor` is called with the name of each matrix when it is done.
        """
        batches = self.plan_batches(weights, schemes)
        solved = {}
        for batch, tensors in zip(batches, self._map(batches), strict=True):
            for task, tensor in zip(batch, tensors, strict=True):
                solved[task.name] = tensor
                if on_tensor is not None:
                    on_tensor(task.name)
        return {name: solved[name] for name in schemes}

    def plan_batches(
        self, weights: Mapping[str, np.ndarray], schemes: Mapping[str, Scheme]
    ) -> list[list[Task]]:
        """The matrices, with their steps, in batches of one kind that fit into memory."""
        tasks = [self._plan(name, weights[name], scheme) for name, scheme in schemes.items()]
        batches = []
        for _, alike in groupby(sorted(tasks, key=lambda task: task.kind), lambda t: t.kind):
            group = list(alike)
            per_weight = WEIGHT_BYTES + STATE_BYTES * group[0].tensor.scheme.states
            allowed = self.batch_bytes
            if allowed is None:
                allowed = BATCH_BYTES.get(self.device.type, 0)
            size = max(1, allowed // (per_weight * group[0].weight.size))
            batches += [group[start : start + size] for start in range(0, len(group), size)]
        return batches

    def _plan(self, name: str, weight: np.ndarray, scheme: Scheme) -> Task:
        if name not in self.calibration.hessians:
            raise RecipeError(
                f"quant.rules: {scheme} for {name!r}, whose inputs are not calibrated; use intB:k"
            )
        if not np.isfinite(weight).all():
            raise DivergedError(f"{name}: a weight is NaN or infinite")
        if scheme.states:
            steps = allocate(
                self.sensitivity[name],
                self.constant,
                columns=scheme.columns,
                num_states=scheme.states,
            )
            tensor = QuantizedTensor(weight.shape, scheme, steps.rows, columns=steps.columns)
        else:
            columns = None
            if scheme.columns:
                columns = np.where(self._protected(name, weight), FINER, 0).astype(np.int16)
            factor: float | np.ndarray = self.factor
            if scheme.rule == "hq":
                factor = factor * step_factors(
                    weight, self.calibration.hessians[name], self.damping
                )
            by_row = stored_steps(as_rows(weight, scheme), scheme, factor)
            tensor = QuantizedTensor(weight.shape, scheme, by_row, columns=columns)
        return Task(name, weight, tensor)

    def _protected(self, name: str, weight: np.ndarray) -> np.ndarray:
        return self.protected.get(name, np.zeros(weight.shape[1], dtype=bool))

    def _map(self, batches: Sequence[Sequence[Task]]) -> Iterator[list[QuantizedTensor]]:
        """The tensors of each batch. A CPU solves several batches at a time, one thread each.

        Threads within a batch gain little, because its columns are solved one after the other.
        """
        if self.device.type != "cpu":
            yield from map(self._solve, batches)
            return
        one = (torch.set_num_threads, (1,))
        with ThreadPoolExecutor(torch.get_num_threads(), "solve", *one) as pool:
            yield from pool.map(self._solve, batches)

    def _solve(self, batch: Sequence[Task]) -> list[QuantizedTensor]:
        """The tensors of a batch; with +clip each is the closest of several solutions (PR 1019)."""
        if batch[0].tensor.scheme.rule == "clip":
            return [self._closest(task) for task in batch]
        codes = self._codes(batch)
        return [replace(t.tensor, codes=c) for t, c in zip(batch, codes, strict=True)]

    def _closest(self, task: Task) -> QuantizedTensor:
        """The solution whose weights are closest to the matrix, whatever the inputs."""
        rows, scheme = as_rows(task.weight, task.tensor.scheme), task.tensor.scheme
        tensors = [
            replace(task.tensor, steps=steps) for steps in clipped_steps(rows, scheme, self.factor)
        ]
        tasks = [replace(task, tensor=tensor) for tensor in tensors]
        solved = [replace(t.tensor, codes=self._codes([t])[0]) for t in tasks]
        return min(solved, key=lambda t: float(np.square(dequantize(t) - task.weight).mean()))

    def _codes(self, batch: Sequence[Task]) -> np.ndarray:
        """Integers (B, R, C) of a batch of tasks of the same kind."""
        scheme = batch[0].tensor.scheme
        options = self._options(scheme)
        inverses = [self._inverse(self.calibration.hessians[t.name], options) for t in batch]
        limits = None
        if scheme.columns and not scheme.states:
            finer = [self._protected(t.name, t.weight) for t in batch]
            limits = self._load([np.where(columns, FINER_LIMIT, scheme.limit) for columns in finer])
        codes = gptq.solve(
            self._load([t.weight for t in batch]),
            gptq.Inverse.stack(inverses),
            self._load([steps_of(t.tensor) for t in batch]),
            options,
            limits,
        ).codes
        return codes.cpu().numpy().astype(np.int16 if scheme.states else np.int8)

    def _options(self, scheme: Scheme) -> gptq.Options:
        if scheme.states:
            return gptq.Options(self.damping, num_states=scheme.states, weigh_bits=self.weigh_bits)
        return gptq.Options(self.damping, act_order=True, limit=scheme.limit)

    def _inverse(self, hessian: Tensor, options: gptq.Options) -> gptq.Inverse:
        key = (hessian, options.damping, options.act_order, self.device)
        if key not in self.inverses:
            self.inverses[key] = gptq.invert(hessian.to(self.device), options)
        return self.inverses[key]

    def _load(self, arrays: Sequence[np.ndarray]) -> Tensor:
        """Arrays of one shape as a tensor (B, ...) on the device."""
        return torch.from_numpy(np.stack(arrays)).to(self.device)
