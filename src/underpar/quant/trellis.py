"""Trellis-coded integers: a small state machine says which half of the integers may come next.

A row of integers n starts in state 0. State s allows only n of its own parity, s mod 2, and n's
second lowest bit chooses the next state. The allowed points are thus 2 steps apart, yet over many
columns the best path lies as close as points in many dimensions can: about 1 dB less error at
equal rate than rounding. The rate is the entropy of n given the parity, so that a coder needs two
tables, not one.

Sources: trellis-coded quantization (Marcellin and Fischer 1990), its entropy-coded form with one
table for each half (Fischer and Wang 1992; Joshi, Crump and Fischer 1995; JPEG 2000 part 2), states
driven by parity as in VVC (Schwarz et al. 2019), machines of Ungerboeck 1982.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from underpar.errors import RecipeError

# Parity-check polynomials (h0, h1) of Ungerboeck's one-dimensional codes, by number of states.
PARITY_CHECKS = {4: (0o5, 0o2), 8: (0o13, 0o4), 16: (0o23, 0o4), 64: (0o103, 0o24)}
# Numbers of states there are; one is no trellis.
STATES = (1, *PARITY_CHECKS)
# The largest |n|: 16 bits, less a few values that the coder keeps for marks.
LARGEST_CODE = (1 << 15) - 4


def next_state(num_states: int) -> np.ndarray:
    """The state that follows, (S, 2) int64, by [state, branch bit]; 1 state is scalar."""
    if num_states == 1:
        return np.zeros((1, 2), dtype=np.int64)
    if num_states not in PARITY_CHECKS:
        raise RecipeError(f"a trellis of {num_states} states: expected 1, 4, 8, 16 or 64")
    even_check, odd_check = (h >> 1 for h in PARITY_CHECKS[num_states])
    states = np.arange(num_states)[:, None]
    branch_bits = np.arange(2)
    return (states >> 1) ^ even_check * (states & 1) ^ odd_check * branch_bits


def previous_state(num_states: int) -> np.ndarray:
    """The state that led here, (S, 2) int64, by [state, branch bit taken to get here]."""
    table = next_state(num_states)
    before = np.empty_like(table)
    for branch_bit in range(2):
        before[table[:, branch_bit], branch_bit] = np.arange(num_states)
    return before


def parities(halves: np.ndarray, num_states: int) -> np.ndarray:
    """The parity (R, C) int8 of each column's state, from floor(n / 2) (R, C)."""
    table = next_state(num_states)
    found = np.empty(halves.shape, dtype=np.int8)
    states = np.zeros(halves.shape[0], dtype=np.int64)
    for col in range(halves.shape[1]):
        found[:, col] = states & 1
        states = table[states, halves[:, col] & 1]
    return found


def is_legal(codes: np.ndarray, num_states: int) -> bool:
    """Whether every row of integers (R, C) is a path of the machine from state 0."""
    if num_states == 1:
        return True
    return bool(np.array_equal(parities(codes >> 1, num_states), codes & 1))


class Viterbi:
    """One column at a time, the cheapest path into each state; tensors end in (S, R).

    `limit` is the largest |n|. Branch bits are the leading axis of candidates.
    """

    def __init__(self, num_states: int, limit: int, device: torch.device) -> None:
        if num_states == 1 or limit < 2:
            raise RecipeError(
                f"a trellis of {num_states} states up to {limit}: expected 4 or more states and a "
                "limit of 2 or more"
            )
        self.num_states = num_states
        self._before = torch.from_numpy(previous_state(num_states)).to(device)
        # Branch bit x out of state s allows n = 4 k + offset: these are the four subsets.
        states, bits = (torch.arange(n, device=device) for n in (num_states, 2))
        self._offsets = (states % 2 + 2 * bits[:, None])[..., None].float()  # (2, S, 1)
        self._lowest = -((limit + self._offsets) / 4).floor()
        self._highest = ((limit - self._offsets) / 4).floor()

    def start(self, shape: Sequence[int], like: Tensor) -> Tensor:
        """Path costs (..., S, R) of rows that start in state 0."""
        costs = like.new_full((*shape[:-1], self.num_states, shape[-1]), torch.inf)
        costs[..., 0, :] = 0
        return costs

    def nearest(self, values: Tensor) -> Tensor:
        """The nearest n on each branch, (2, ..., S, R), to values in steps, (..., S, R)."""
        extra = (1,) * (values.dim() - 2)
        offsets, lowest, highest = (
            t.view(2, *extra, self.num_states, 1)
            for t in (self._offsets, self._lowest, self._highest)
        )
        quarters = values.sub(offsets).div_(4).round_()
        return quarters.clamp_(lowest, highest).mul_(4).add_(offsets)

    def arrive(self, costs: Tensor) -> tuple[Tensor, Tensor]:
        """Of branch costs (2, ..., S, R): the least into each state, and the bit it came by."""
        first, second = self._enter(costs)
        return torch.minimum(first, second), second < first

    def follow(self, values: Tensor, bits: Tensor) -> Tensor:
        """Values of the branches (2, ..., S, R) that were taken into each state."""
        first, second = self._enter(values)
        return torch.where(bits, second, first)

    def sources(self, bits: Tensor) -> Tensor:
        """The state (..., S, R) int64 that each state was reached from."""
        return torch.where(bits, self._before[:, 1, None], self._before[:, 0, None])

    def _enter(self, values: Tensor) -> tuple[Tensor, Tensor]:
        first, second = (values[x].index_select(-2, self._before[:, x]) for x in range(2))
        return first, second


def trace(costs: Tensor, codes: Sequence[Tensor], sources: Sequence[Tensor]) -> Tensor:
    """The integers (..., C, R) int16 of each row's cheapest path, from those into each state."""
    states = costs.argmin(dim=-2, keepdim=True)  # (..., 1, R)
    path = []
    for column_codes, column_sources in zip(reversed(codes), reversed(sources), strict=True):
        path.append(column_codes.gather(-2, states))
        states = column_sources.gather(-2, states).long()
    return torch.cat(path[::-1], dim=-2)


def quantize(samples: Tensor, num_states: int) -> Tensor:
    """Integers (R, C) int16, a legal path in each row, of least squared error to the samples."""
    if num_states == 1:
        return samples.round().clamp(-LARGEST_CODE, LARGEST_CODE).to(torch.int16)
    viterbi = Viterbi(num_states, LARGEST_CODE, samples.device)
    costs = viterbi.start(samples.shape[:1], samples)
    codes, sources = [], []
    for column in samples.unbind(1):
        near = viterbi.nearest(column.expand(num_states, -1))
        costs, bits = viterbi.arrive(costs + (near - column).square())
        codes.append(viterbi.follow(near, bits).to(torch.int16))
        sources.append(viterbi.sources(bits).to(torch.uint8))
    return trace(costs, codes, sources).T
