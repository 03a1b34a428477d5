"""The search for the cheapest path through a trellis (trellis.py), one column at a time."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from underpar.errors import RecipeError
from underpar.quant.trellis import next_state


def previous_state(num_states: int) -> np.ndarray:
    """The state before, (S, 2) int64, by [state, branch bit that led to it]."""
    table = next_state(num_states)
    before = np.empty_like(table)
    for branch_bit in range(2):
        before[table[:, branch_bit], branch_bit] = np.arange(num_states)
    return before


class Viterbi:
    """Finds the cheapest path into each state, column by column; tensors end in (S, R).

    `limit` is the largest |n|. Candidates have the branch bit as their leading axis.
    """

    def __init__(self, num_states: int, limit: int, device: torch.device) -> None:
        if num_states == 1 or limit < 2:
            raise RecipeError(
                f"a trellis of {num_states} states up to {limit}: expected 4 or more states and a "
                "limit of 2 or more"
            )
        self.num_states = num_states
        self._before = torch.from_numpy(previous_state(num_states)).to(device)
        # Branch bit x out of state s allows n = 4 k + offset: one of four subsets of the integers.
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
        """The integer of each branch (2, ..., S, R) nearest to values (..., S, R), in steps."""
        extra = (1,) * (values.dim() - 2)
        offsets, lowest, highest = (
            t.view(2, *extra, self.num_states, 1)
            for t in (self._offsets, self._lowest, self._highest)
        )
        quarters = values.sub(offsets).div_(4).round_()
        return quarters.clamp_(lowest, highest).mul_(4).add_(offsets)

    def arrive(self, costs: Tensor) -> tuple[Tensor, Tensor]:
        """The least of branch costs (2, ..., S, R) into each state, and the bit of its branch."""
        first, second = self._enter(costs)
        return torch.minimum(first, second), second < first

    def follow(self, values: Tensor, bits: Tensor) -> Tensor:
        """Of values by branch (2, ..., S, R), those of the branch taken into each state."""
        first, second = self._enter(values)
        return torch.where(bits, second, first)

    def sources(self, bits: Tensor) -> Tensor:
        """The state (..., S, R) int64 from which each state was reached."""
        return torch.where(bits, self._before[:, 1, None], self._before[:, 0, None])

    def _enter(self, values: Tensor) -> tuple[Tensor, Tensor]:
        first, second = (values[x].index_select(-2, self._before[:, x]) for x in range(2))
        return first, second


def trace(costs: Tensor, codes: Sequence[Tensor], sources: Sequence[Tensor]) -> Tensor:
    """The integers (..., C, R) int16 of the cheapest path of each row.

    `codes` and `sources` (..., S, R) have, per column, the integer and the state that led into each
    state.
    """
    states = costs.argmin(dim=-2, keepdim=True)  # (..., 1, R)
    path = []
    for column_codes, column_sources in zip(reversed(codes), reversed(sources), strict=True):
        path.append(column_codes.gather(-2, states))
        states = column_sources.gather(-2, states).long()
    return torch.cat(path[::-1], dim=-2)
