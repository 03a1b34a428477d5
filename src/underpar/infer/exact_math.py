"""Arithmetic whose results are the same on every machine, bit for bit: the base of exact mode.

Two kinds of operations of torch are the same everywhere, and nothing else is used here:

- Elementwise operations of IEEE 754 in float64: +, -, *, /, sqrt, round, comparisons, conversions,
  shifts of bits. Each is an operation of its own, so that no compiler can fuse a product and a sum.
- Sums and products of matrices whose operands are integers in float64. All partial sums stay below
  2^53, so each is exact, and the order of summation, blocking and fused multiply-adds do not matter
  (the idea of reproducible sums: Demmel and Nguyen 2013, doi:10.1109/ARITH.2013.9).

Reductions therefore round their operands to integers first: to as many bits as fit, relative to the
largest element of the row. Functions such as exp are range reductions and Taylor series of these
operations, because each math library rounds its own functions in another way.
"""

from __future__ import annotations

import math
from functools import cache

import torch
from torch import Tensor

# Partial sums of integers stay at or below this power of two.
SUM_BITS = 52
# The largest element of a row of zeros, in place of 0.
TINY = 1e-200
# A float64 has this many stored bits of its fraction, and this bias of its exponent.
_FRACTION_BITS, _BIAS = 52, 1023
_PER_LN2 = 1.4426950408889634
# ln 2 and pi / 2 in parts: a small integer times a part but the last is exact (as in fdlibm).
_LN2 = (6.93147180369123816490e-01, 1.90821492927058770002e-10)
_HALF_PI = (1.57079632673412561417e00, 6.07710050630396597660e-11, 2.02226624879595063154e-21)
# Beyond this exp is 0 or infinite for all purposes here.
_LARGEST_EXPONENT = 700.0
_EXP = tuple(1.0 / math.factorial(k) for k in range(14))
_LOG = tuple(2.0 / (2 * k + 1) for k in range(12))
_SIN = tuple((-1.0) ** k / math.factorial(2 * k + 1) for k in range(9))
_COS = tuple((-1.0) ** k / math.factorial(2 * k) for k in range(9))
# The table of tanh: points per unit (a power of two), and its range; beyond it tanh is 1.
_TANH_POINTS, _TANH_RANGE = 512, 16
# Abramowitz and Stegun 7.1.26: an error of at most 1.5e-7.
_ERF_P = 0.3275911
_ERF = (0.0, 0.254829592, -0.284496736, 1.421413741, -1.453152027, 1.061405429)


def divide(a: Tensor | float, b: Tensor | float) -> Tensor:
    """a / b, correctly rounded. torch multiplies by a reciprocal if one is a number of the host."""
    if isinstance(a, float) and a == 1.0:
        assert isinstance(b, Tensor)
        return b.double().reciprocal()
    like = a if isinstance(a, Tensor) else b
    assert isinstance(like, Tensor)
    return _beside(a, like) / _beside(b, like)


def _beside(x: Tensor | float, like: Tensor) -> Tensor:
    if isinstance(x, Tensor) and x.device == like.device:
        return x.double()
    return _filled(float(x), like)


def _filled(value: float, like: Tensor) -> Tensor:
    return torch.full((), value, dtype=torch.float64, device=like.device)


def _polynomial(x: Tensor, coefficients: tuple[float, ...]) -> Tensor:
    """Sum of coefficients[k] x^k by Horner's rule; x is a float64."""
    y = torch.full_like(x, coefficients[-1])
    for coefficient in coefficients[-2::-1]:
        y.mul_(x).add_(coefficient)
    return y


def _power_of_two(n: Tensor) -> Tensor:
    """2^n of integers n in float64, from -1022 to 1023, made of its bits."""
    return (n.to(torch.int64) + _BIAS).bitwise_left_shift_(_FRACTION_BITS).view(torch.float64)


def exp(x: Tensor) -> Tensor:
    """e^x; x is limited to +-700."""
    x = x.double().clamp(-_LARGEST_EXPONENT, _LARGEST_EXPONENT)
    n = (x * _PER_LN2).round_()
    high, low = _LN2
    rest = (x - n * high) - n * low
    return _polynomial(rest, _EXP).mul_(_power_of_two(n))


def log(x: Tensor) -> Tensor:
    """ln x of normal numbers above 0."""
    bits = x.double().contiguous().view(torch.int64)
    exponent = (bits >> _FRACTION_BITS) - _BIAS
    fraction = bits & ((1 << _FRACTION_BITS) - 1) | _BIAS << _FRACTION_BITS
    m = fraction.view(torch.float64)  # 1 <= m < 2
    # The series converges fast around 1.
    is_large = m > 1.4142135623730951
    m = torch.where(is_large, m * 0.5, m)
    n = (exponent + is_large).double()
    s = (m - 1.0) / (m + 1.0)
    high, low = _LN2
    return n * low + _polynomial(s * s, _LOG) * s + n * high


def power(base: Tensor | float, exponent: Tensor | float) -> Tensor:
    """base ** exponent: a product for exponents 1 and 2, else exp(exponent ln base), base > 0."""
    if isinstance(exponent, (int, float)) and exponent in (1, 2):
        assert isinstance(base, Tensor)
        return base * base if exponent == 2 else base
    like = base if isinstance(base, Tensor) else exponent
    assert isinstance(like, Tensor)
    base = base if isinstance(base, Tensor) else _filled(base, like)
    return exp(log(base) * exponent)


def sigmoid(x: Tensor) -> Tensor:
    """1 / (1 + e^-x)."""
    return divide(1.0, exp(-x) + 1.0)


def tanh(x: Tensor) -> Tensor:
    """1 - 2 / (e^2x + 1), within 1e-16 of tanh."""
    return 1.0 - divide(2.0, exp(x * 2.0) + 1.0)


@cache
def _tanh_table(device: torch.device) -> tuple[Tensor, Tensor]:
    """Values of tanh at the points, and the rises from each to the next."""
    num = _TANH_RANGE * _TANH_POINTS
    x = torch.arange(-num, num + 2, device=device).double() * (1.0 / _TANH_POINTS)
    values = tanh(x)
    return values[:-1], values[1:] - values[:-1]


def tanh_of_table(x: Tensor) -> Tensor:
    """tanh, from a table and straight lines between its points: within 4e-7.

    A quarter of the operations of `tanh`, for the logits of a whole vocabulary.
    """
    values, rises = _tanh_table(x.device)
    place = x.double().clamp(-_TANH_RANGE, _TANH_RANGE).mul_(_TANH_POINTS)
    point = place.floor()
    index = point.long().add_(_TANH_RANGE * _TANH_POINTS)
    return place.sub_(point).mul_(rises.take(index)).add_(values.take(index))


def erf(x: Tensor) -> Tensor:
    """The error function, to 1.5e-7."""
    size = x.double().abs()
    t = divide(1.0, size * _ERF_P + 1.0)
    y = 1.0 - _polynomial(t, _ERF) * exp(-(size * size))
    return torch.where(x < 0, -y, y)


def cos_sin(x: Tensor) -> tuple[Tensor, Tensor]:
    """Cosine and sine of angles up to 2^20 radians."""
    n = (x * (2.0 / math.pi)).round_()
    rest = x.double()
    for part in _HALF_PI:
        rest = rest - n * part
    square = rest * rest
    cos, sin = _polynomial(square, _COS), _polynomial(square, _SIN) * rest
    # A quarter turn: (cos, sin) -> (-sin, cos).
    quarter = n.to(torch.int64) & 3
    is_odd = quarter % 2 == 1
    cos, sin = torch.where(is_odd, -sin, cos), torch.where(is_odd, cos, sin)
    sign = 1.0 - (quarter >= 2).double() * 2.0
    return cos * sign, sin * sign


def to_integers(x: Tensor, bits: int, dim: int | tuple[int, ...] = -1) -> tuple[Tensor, Tensor]:
    """Integers in float64 of at most 2^bits, and their step: x is about integers * step.

    One step for all elements along `dim`. It is the largest of them times 2^-bits, which is exact.
    """
    x = x.double()
    step = _largest(x, dim).clamp_(min=TINY).mul_(math.ldexp(1.0, -bits))
    return (x * step.reciprocal()).round_(), step


def _largest(x: Tensor, dim: int | tuple[int, ...]) -> Tensor:
    """The largest magnitude along `dim`, which is kept."""
    if x.is_cuda:
        # One kernel in place of two. On a CPU the norm is the slower way.
        return torch.linalg.vector_norm(x, math.inf, dim, keepdim=True)
    return x.abs().amax(dim, keepdim=True)


def bits_of_factors(length: int) -> int:
    """The bits of both factors of sums of `length` products."""
    return (SUM_BITS - (length - 1).bit_length()) // 2


def total(x: Tensor, dim: int | tuple[int, ...] = -1, keepdim: bool = False) -> Tensor:
    """The sum of x along `dim`; its operands are rounded to integers."""
    dims = (dim,) if isinstance(dim, int) else dim
    length = math.prod(x.size(d) for d in dims)
    integers, step = to_integers(x, SUM_BITS - (length - 1).bit_length(), dim)
    summed = integers.sum(dim, keepdim=True) * step
    return summed if keepdim else summed.squeeze(dim)


def mean_square(x: Tensor) -> Tensor:
    """The mean of x^2 along the last dimension, which is kept."""
    integers, step = to_integers(x, bits_of_factors(x.size(-1)))
    summed = (integers * integers).sum(-1, keepdim=True)
    return summed.mul_(step).mul_(step).mul_(1.0 / x.size(-1))


def matmul(a: Tensor, b: Tensor) -> Tensor:
    """a @ b, as torch.matmul; rows of `a` and columns of `b` are rounded to integers."""
    if a.dim() == 1:
        return matmul(a[None], b).squeeze(-1 if b.dim() == 1 else -2)
    if b.dim() == 1:
        return matmul(a, b[:, None]).squeeze(-1)
    bits = bits_of_factors(a.size(-1))
    rows, row_step = to_integers(a, bits)
    columns, column_step = to_integers(b, bits, -2)
    return (rows @ columns).mul_(row_step).mul_(column_step)
