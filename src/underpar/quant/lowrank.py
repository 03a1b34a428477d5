"""A low-rank correction of a rounded matrix: two thin factors of small integers.

What is added is the same on every machine: factors are multiplied and summed one rank at a time,
in fp32, element by element, so that no library chooses an order.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from underpar.quant.logsteps import from_index


@dataclass(frozen=True, eq=False)
class Factor:
    """Integers (m, n) int8; each run of `group` of them, in row order, shares a log step."""

    codes: np.ndarray
    steps: np.ndarray
    """int16, one a group; the last group may be short."""
    group: int

    def values(self) -> np.ndarray:
        """The factor (m, n) in fp32."""
        steps = np.repeat(from_index(self.steps), self.group)[: self.codes.size]
        return self.codes.astype(np.float32) * steps.reshape(self.codes.shape)


@dataclass(frozen=True, eq=False)
class LowRank:
    """left (R, r) times right (r, C), added to what the integers of a matrix stand for."""

    left: Factor
    right: Factor

    def product(self) -> np.ndarray:
        """The correction (R, C) in fp32."""
        left, right = self.left.values(), self.right.values()
        total = np.zeros((len(left), right.shape[1]), dtype=np.float32)
        for rank in range(len(right)):
            total += left[:, rank, None] * right[rank]
        return total
