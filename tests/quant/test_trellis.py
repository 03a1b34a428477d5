"""The trellis: the machine as published, exact search, and what it saves."""

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from trellis_paths import is_legal, nearest_path, parities
from underpar.errors import RecipeError
from underpar.quant.trellis import PARITY_CHECKS, next_state
from underpar.quant.viterbi import Viterbi, previous_state

SIZES = sorted(PARITY_CHECKS)


def step_by_bits(state: int, code: int, num_states: int) -> int:
    """The definition: bit i is s_(i+1) xor h0_(i+1) z xor h1_(i+1) x."""
    h0, h1 = PARITY_CHECKS[num_states]
    parity, branch_bit = state & 1, (code // 2) % 2
    following = 0
    for i in range(num_states.bit_length() - 1):
        s, a, b = ((word >> (i + 1)) & 1 for word in (state, h0, h1))
        following |= (s ^ a * parity ^ b * branch_bit) << i
    return following


def entropy_bits(codes: np.ndarray) -> float:
    shares = np.unique(codes, return_counts=True)[1] / codes.size
    return float(-(shares * np.log2(shares)).sum())


def trellis_rate_bits(codes: np.ndarray) -> float:
    """Entropy of n given the parity of its state."""
    odd = codes[codes % 2 == 1]
    even = codes[codes % 2 == 0]
    return (entropy_bits(odd) * odd.size + entropy_bits(even) * even.size) / codes.size


def scalar_rate_bits(samples: torch.Tensor, mse: float) -> float:
    """Entropy of rounding with the step that leaves this error."""
    low, high = 0.05, 2.0
    for _ in range(24):
        step = (low + high) / 2
        error = ((samples / step).round() * step - samples).square().mean().item()
        low, high = (step, high) if error < mse else (low, step)
    return entropy_bits((samples / low).round().numpy())


@pytest.mark.parametrize("num_states", SIZES)
def test_every_legal_integer_has_one_next_state(num_states: int) -> None:
    table = next_state(num_states)
    assert table.shape == (num_states, 2)
    for state, code in itertools.product(range(num_states), range(-9, 9)):
        if code % 2 == state % 2:
            assert table[state, (code >> 1) & 1] == step_by_bits(state, code, num_states)
    # Two ways into each state, one for each branch bit, from states of equal parity.
    before = previous_state(num_states)
    for branch_bit in range(2):
        assert np.array_equal(table[before[:, branch_bit], branch_bit], np.arange(num_states))
    assert np.array_equal(before[:, 0] % 2, before[:, 1] % 2)
    assert (before[:, 0] != before[:, 1]).all()


@pytest.mark.parametrize("num_states", [0, 2, 3, 32])
def test_other_sizes_are_refused(num_states: int) -> None:
    with pytest.raises(RecipeError, match=f"{num_states} states"):
        next_state(num_states)


@pytest.mark.parametrize(("num_states", "limit"), [(1, 9), (8, 1)])
def test_a_search_needs_states_and_integers(num_states: int, limit: int) -> None:
    with pytest.raises(RecipeError, match=f"{num_states} states up to {limit}"):
        Viterbi(num_states, limit, torch.device("cpu"))


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(SIZES), st.integers(0, 2**32 - 1), st.integers(1, 40))
def test_halves_decode_to_the_integers(num_states: int, seed: int, num_cols: int) -> None:
    rng = np.random.default_rng(seed)
    samples = torch.from_numpy(rng.normal(0, 4, (3, num_cols)))
    codes = nearest_path(samples, num_states).numpy()
    assert is_legal(codes, num_states)
    halves = codes >> 1
    assert np.array_equal(2 * halves + parities(halves, num_states), codes)
    codes[1, rng.integers(num_cols)] ^= 1
    assert not is_legal(codes, num_states)


@pytest.mark.parametrize("num_states", [4, 8, 16])
def test_the_search_finds_the_best_of_all_paths(num_states: int) -> None:
    num_cols = 6
    samples = torch.randn(20, num_cols, generator=torch.Generator().manual_seed(num_states))
    samples = samples.double() * 1.2
    path = nearest_path(samples, num_states)
    # Every path near the samples: n = 2 half + parity with halves of -3 ... 2.
    halves = np.array(list(itertools.product(range(-3, 3), repeat=num_cols)))
    paths = torch.from_numpy(2 * halves + parities(halves, num_states)).double()
    best = torch.cdist(samples, paths).square().amin(dim=1)
    assert path.abs().max() <= 4
    assert torch.allclose((path - samples).square().sum(dim=1), best)


def test_one_state_rounds() -> None:
    samples = torch.randn(30, 40, generator=torch.Generator().manual_seed(0)) * 5
    codes = nearest_path(samples, 1)
    assert codes.dtype == torch.int16
    assert torch.equal(codes, samples.round().to(torch.int16))
    assert is_legal(codes.numpy(), 1)


@pytest.mark.parametrize(
    ("num_states", "saved_bits"), [(4, 0.15), (8, 0.165), (16, 0.175), (64, 0.19)]
)
def test_saving_at_equal_error(num_states: int, saved_bits: float) -> None:
    samples = torch.randn(512, 512, generator=torch.Generator().manual_seed(1))
    # Half of the 12.85-sigma step of 31 levels: the rate of that rounding, 3.33 bits.
    step = 12.85 / 31 / 2
    codes = nearest_path(samples / step, num_states)
    rate = trellis_rate_bits(codes.numpy())
    assert 3.28 < rate < 3.36
    mse = (codes * step - samples).square().mean().item()
    assert scalar_rate_bits(samples, mse) - rate >= saved_bits
