"""Paths of a trellis, for tests: what they are, and the one nearest to given samples."""

import numpy as np
import torch
from torch import Tensor

from underpar.quant.trellis import LARGEST_CODE, next_state
from underpar.quant.viterbi import Viterbi, trace


def parities(halves: np.ndarray, num_states: int) -> np.ndarray:
    """The parity (R, C) int8 of each column's state, from floor(n / 2) (R, C)."""
    table = next_state(num_states)
    of_columns = np.empty(halves.shape, dtype=np.int8)
    states = np.zeros(halves.shape[0], dtype=np.int64)
    for col in range(halves.shape[1]):
        of_columns[:, col] = states & 1
        states = table[states, halves[:, col] & 1]
    return of_columns


def is_legal(codes: np.ndarray, num_states: int) -> bool:
    """Whether every row of integers (R, C) is a path of the machine from state 0."""
    if num_states == 1:
        return True
    return bool(np.array_equal(parities(codes >> 1, num_states), codes & 1))


def nearest_path(samples: Tensor, num_states: int) -> Tensor:
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
