"""Exact arithmetic: close to long doubles, and the same bits for every order and thread count."""

from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from underpar.core.runtime import threads
from underpar.infer import exact_math as em

Reference = Callable[[np.ndarray], np.ndarray]
# Function, reference in long doubles, range, and the largest relative and absolute errors.
FUNCTIONS: dict[str, tuple[Callable[[Tensor], Tensor], Reference, tuple[float, float], float]] = {
    "exp": (em.exp, np.exp, (-600.0, 600.0), 1e-15),
    "exp near 0": (em.exp, np.exp, (-1.0, 1.0), 4e-16),
    "log": (em.log, np.log, (1e-300, 1e3), 4e-16),
    "log near 1": (em.log, np.log, (0.6, 1.9), 4e-16),
    "tanh": (em.tanh, np.tanh, (-30.0, 30.0), 4e-16),
    "tanh of a table": (em.tanh_of_table, np.tanh, (-30.0, 30.0), 4e-7),
    "sigmoid": (em.sigmoid, lambda x: 1 / (1 + np.exp(-x)), (-300.0, 300.0), 1e-15),
    "cos": (lambda x: em.cos_sin(x)[0], np.cos, (-1e5, 1e5), 1e-15),
    "sin": (lambda x: em.cos_sin(x)[1], np.sin, (-1e5, 1e5), 1e-15),
    "power": (lambda x: em.power(10_000.0, x), lambda x: 10_000.0**x, (-4.0, 4.0), 2e-14),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions_are_as_good_as_those_of_a_math_library(name: str) -> None:
    function, reference, (low, high), tolerance = FUNCTIONS[name]
    x = np.random.default_rng(0).uniform(low, high, 20_000)
    x = np.concatenate((x, [low, high, 1.0, (low + high) / 2]))
    expected = reference(x.astype(np.longdouble))
    actual = function(torch.from_numpy(x)).numpy()
    # Near a root the error is that of the argument, so the smallest scale is 1 but for exp.
    scale = (
        np.abs(expected) if name in ("exp", "sigmoid", "power") else np.maximum(abs(expected), 1)
    )
    assert float(np.max(np.abs(actual - expected) / scale)) <= tolerance


def test_log_of_exp_and_special_values() -> None:
    assert em.exp(torch.tensor([0.0, -1e9])).tolist()[0] == 1.0
    assert em.exp(torch.tensor(-1e9, dtype=torch.float64)) > 0
    assert em.log(torch.tensor([1.0, 2.0, 0.5])).tolist() == [0.0, np.log(2.0), -np.log(2.0)]
    assert em.sigmoid(torch.tensor([-200.0, 200.0], dtype=torch.float64))[1] == 1.0
    assert torch.equal(em.power(torch.tensor([3.0, -2.0]), 2), torch.tensor([9.0, 4.0]))
    x = torch.linspace(-5, 5, 1001, dtype=torch.float64)
    assert float((em.erf(x) - torch.erf(x)).abs().max()) < 2e-7


@settings(deadline=None, max_examples=60)
@given(
    seed=st.integers(0, 2**32 - 1),
    rows=st.integers(1, 9),
    length=st.sampled_from([1, 2, 3, 64, 511, 4096]),
    spread=st.sampled_from([1.0, 1e-3, 1e8]),
)
def test_products_do_not_depend_on_the_order_of_summation(
    seed: int, rows: int, length: int, spread: float
) -> None:
    rng = np.random.default_rng(seed)
    a = torch.from_numpy(spread * rng.standard_normal((rows, length)))
    b = torch.from_numpy(rng.standard_normal((length, 5)) ** 3)
    order = torch.from_numpy(rng.permutation(length))
    product = em.matmul(a, b)
    assert torch.equal(product, em.matmul(a[:, order], b[order]))
    # A row alone, as a vector, and among others.
    assert torch.equal(product[:1], em.matmul(a[:1], b))
    assert torch.equal(product[0], em.matmul(a[0], b))
    assert torch.equal(product[:, 0], em.matmul(a, b[:, 0]))
    assert torch.equal(em.total(a), em.total(a[:, order]))
    assert torch.equal(em.mean_square(a), em.mean_square(a[:, order]))
    # Two factors of 20 bits: an error of 2^-20 of the largest terms, in each of them.
    bound = length * 2.0**-19 * a.abs().amax() * b.abs().amax()
    assert float((product - a @ b).abs().max()) <= float(bound)
    assert float((em.total(a) - a.sum(-1)).abs().max()) <= 1e-9 * float(a.abs().sum())


def test_sums_stay_below_the_bound() -> None:
    for length in (1, 2, 3, 4, 5, 4096, 4097, 1 << 20):
        bits = em.bits_of_factors(length)
        assert length << 2 * bits <= 1 << em.SUM_BITS
    worst = torch.full((1, 4096), 7.0)
    integers, step = em.to_integers(worst, em.bits_of_factors(4096))
    assert float(integers.max()) == 2.0 ** em.bits_of_factors(4096)
    assert torch.equal(integers * step, worst.double())
    assert em.to_integers(torch.zeros(2, 3), 20)[0].eq(0).all()


@pytest.mark.parametrize("count", [2, 3])
def test_threads_change_no_bit(count: int) -> None:
    x = torch.from_numpy(np.random.default_rng(1).standard_normal((300, 700)))

    def results() -> list[Tensor]:
        products = [em.matmul(x, x.T), em.total(x), em.mean_square(x)]
        return [*products, em.exp(x), em.tanh(x), em.log(x.abs()), *em.cos_sin(100 * x)]

    with threads(1):
        alone = results()
    with threads(count):
        assert all(torch.equal(a, b) for a, b in zip(alone, results(), strict=True))


@pytest.mark.gpu
def test_a_gpu_gives_the_same_bits() -> None:
    x = torch.from_numpy(np.random.default_rng(1).standard_normal((300, 700)))
    for function in (lambda t: em.matmul(t, t.T), em.total, em.mean_square, em.exp, em.tanh,
                     em.erf, lambda t: em.log(t.abs()), lambda t: em.cos_sin(100 * t)[1],
                     lambda t: em.divide(t, 3.0), lambda t: em.divide(3.0, t)):  # fmt: skip
        assert torch.equal(function(x), function(x.cuda()).cpu())
