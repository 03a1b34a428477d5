"""A low-rank correction of a rounded matrix: two thin factors of small integers.

The correction is the same on every machine. Factors are multiplied and summed one rank at a time,
element by element in fp32, so that no library chooses the order of the sum.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from underpar.quant.logsteps import from_index


@dataclass(frozen=True, eq=False)
class Factor:
    """Integers (m, n) int8; each run of `group` integers, in row order, shares a log step."""

    codes: np.ndarray
    steps: np.ndarray
    """int16, one per group; the last group may be short."""
    group: int

    def values(self) -> np.ndarray:
        """The factor (m, n) in fp32."""
        steps = np.repeat(from_index(self.steps), self.group)[: self.codes.size]
        return self.codes.astype(np.float32) * steps.reshape(self.codes.shape)


@dataclass(frozen=True, eq=False)
class LowRank:
    """left (R, r) times right (r, C), which is added to the dequantized matrix."""

    left: Factor
    right: Factor

    def product(self) -> np.ndarray:
        """The correction (R, C) in fp32."""
        left, right = self.left.values(), self.right.values()
        total = np.zeros((len(left), right.shape[1]), dtype=np.float32)
        for rank in range(len(right)):
            total += left[:, rank, None] * right[rank]
        return total
