"""The ordinary network in exact arithmetic: inside `ExactMode` its operations give the same bits.

The mode sees every operation of torch that the network and its levers call. Three things may
happen: an operation that is the same everywhere runs as it is, in float64; an operation that is not
(a product of matrices, a sum, a norm, a function) is replaced by its exact form from exact_math.py;
any other operation raises `ExactError`, which names the operation and the lever that called it.

Numbers of Python are rounded to fp32 first, because a lever may have computed them with the math
library of the machine.
"""

from __future__ import annotations

import math
import struct
import sys
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from underpar.errors import ExactError
from underpar.infer import exact_math as em

# Bits of activations in products with a weight; the weight gets the rest.
ACTIVATION_BITS = 18
# Of fp32, in which networks are trained, whatever precision the mode computes in.
EPS = torch.finfo(torch.float32).eps

# Operations that move, compare or select numbers, and elementwise ones of IEEE 754.
_NAMES = """
    __get__ __getitem__ __len__ abs add bitwise_and bitwise_or bitwise_xor __and__ __or__ __xor__
    __eq__ __ne__ cat chunk clamp clone contiguous detach dim embedding eq expand expand_as
    flatten floor gather ge gt index_select is_floating_point le logical_and logical_not
    logical_or lt masked_fill maximum minimum mul narrow ne neg new_ones new_zeros numel ones_like
    permute promote_types relu remainder repeat_interleave reshape rsub __rsub__ select size split
    squeeze stack sub t transpose unbind unflatten unsqueeze view view_as where zeros_like
    """
AS_THEY_ARE = frozenset(_NAMES.split())


def rounded(x: Any) -> Any:
    """A Python float rounded to fp32; anything else as it is."""
    if type(x) is not float or not math.isfinite(x):
        return x
    return struct.unpack("f", struct.pack("f", x))[0]


class ExactMode(TorchFunctionMode):
    """Inside, every operation on tensors is exact, or refused. Tensors of floats are float64.

    Integers of the weights of linear layers are kept between calls, so they may not change.
    """

    def __init__(self) -> None:
        super().__init__()
        self._weights: dict[nn.Parameter, tuple[Tensor, Tensor]] = {}
        # The last input of a linear layer and the last angles, with what was made of them: queries,
        # keys and values have one input, and a cosine comes with a sine.
        self._rows: tuple[Tensor, tuple[Tensor, Tensor]] | None = None
        self._turns: tuple[Tensor, tuple[Tensor, Tensor]] | None = None

    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        name, kwargs = str(getattr(func, "__name__", func)), dict(kwargs or {})
        if name == "linear":
            return self._linear(*args, **kwargs)
        if name in ("cos", "sin"):
            return self._turn(*args)[name == "sin"]
        if name in AS_THEY_ARE and "alpha" not in kwargs:
            return func(*map(rounded, args), **kwargs)
        exact = EXACT.get(name)
        if exact is None:
            raise ExactError(
                f"exact mode has no exact form of the operation {name!r}, which {_caller()} calls; "
                "leave --exact out"
            )
        try:
            return exact(*map(rounded, args), **kwargs)
        except TypeError as error:
            raise ExactError(
                f"exact mode has no exact form of {name!r} with the arguments that {_caller()} "
                "gives; leave --exact out"
            ) from error

    def _linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """x @ weight.T: rows of x are rounded to integers, and the weight with one step for all."""
        known = self._weights.get(weight) if isinstance(weight, nn.Parameter) else None
        if known is None:
            length = weight.size(-1)
            bits = em.SUM_BITS - ACTIVATION_BITS - (length - 1).bit_length()
            integers, step = em.to_integers(weight, bits, (0, 1))
            known = integers.T.contiguous(), step
            if isinstance(weight, nn.Parameter):
                self._weights[weight] = known
        if self._rows is None or self._rows[0] is not x:
            self._rows = x, em.to_integers(x, ACTIVATION_BITS)
        rows, row_step = self._rows[1]
        y = (rows @ known[0]).mul_(row_step * known[1].view(()))
        return y if bias is None else y + bias

    def _turn(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Cosine and sine."""
        if self._turns is None or self._turns[0] is not x:
            self._turns = x, em.cos_sin(x)
        return self._turns[1]

    def __exit__(self, *problem: Any) -> None:
        """Forget the last input, whose memory others need."""
        self._rows = self._turns = None
        super().__exit__(*problem)


class ExactPowers(TorchFunctionMode):
    """Inside, powers are exact and everything else is as usual.

    A network is built inside, because it computes constants, such as rotary frequencies.
    """

    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        name = getattr(func, "__name__", "")
        if name in ("pow", "__pow__", "__rpow__"):
            return EXACT[name](*map(rounded, args), **(kwargs or {}))
        return func(*args, **(kwargs or {}))


def _caller() -> str:
    """The lever that called the present operation, or the file if it is no lever."""
    frame = sys._getframe(2)
    while frame.f_back is not None:
        module = frame.f_globals.get("__name__", "")
        if module.startswith("underpar.levers."):
            return f"lever {module.removeprefix('underpar.levers.')!r}"
        if module.startswith("underpar.model."):
            return module
        frame = frame.f_back
    return "the network"


def _rms_norm(
    x: Tensor,
    shape: tuple[int, ...],
    weight: None = None,
    eps: float | None = None,
) -> Tensor:
    if tuple(shape) != (x.size(-1),) or weight is not None:
        raise TypeError("another norm than that of the last dimension, without weights")
    size = (em.mean_square(x) + (EPS if eps is None else eps)).sqrt_()
    return x * em.divide(1.0, size)


def _normalize(
    x: Tensor, p: float = 2.0, dim: int = 1, eps: float = 1e-12, out: None = None
) -> Tensor:
    if p != 2 or dim != -1:
        raise TypeError("another norm than the Euclidean one of the last dimension")
    size = em.mean_square(x).mul_(x.size(-1)).sqrt_().clamp_(min=eps)
    return x * em.divide(1.0, size)


def _total(
    x: Tensor, dim: int | tuple[int, ...] | None = None, keepdim: bool = False, dtype: Any = None
) -> Tensor:
    if not x.is_floating_point():
        return x.sum() if dim is None else x.sum(dim, keepdim=keepdim)
    if dim is None:
        return em.total(x.flatten(), -1, keepdim)
    return em.total(x, dim, keepdim)


def _mean(x: Tensor, dim: int, keepdim: bool = False) -> Tensor:
    return em.divide(em.total(x, dim, keepdim), x.size(dim))


def _gelu(x: Tensor, approximate: str = "none") -> Tensor:
    if approximate == "tanh":
        inner = (x * x * x * rounded(0.044715) + x) * rounded(math.sqrt(2 / math.pi))
        return (em.tanh(inner) + 1.0) * x * 0.5
    return (em.erf(x * rounded(math.sqrt(0.5))) + 1.0) * x * 0.5


def _leaky_relu(x: Tensor, negative_slope: float = 0.01, inplace: bool = False) -> Tensor:
    return torch.where(x > 0, x, x * rounded(negative_slope))


def _to(x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """Floats stay float64, whatever type is asked for; other tensors become what is asked."""
    if x.is_floating_point():
        return x.double()
    asked = x.to(*args, **kwargs)
    return asked.double() if asked.is_floating_point() else asked


def _double(x: Tensor) -> Tensor:
    return x.double()


EXACT: dict[str, Callable[..., Any]] = {
    "__matmul__": em.matmul,
    "__pow__": em.power,
    "__rdiv__": lambda x, number: em.divide(number, x),
    "__rpow__": lambda x, base: em.power(base, x),
    "__rtruediv__": lambda x, number: em.divide(number, x),
    "__truediv__": em.divide,
    "div": em.divide,
    "double": _double,
    "erf": em.erf,
    "exp": em.exp,
    "float": _double,
    "gelu": _gelu,
    "leaky_relu": _leaky_relu,
    "lerp": lambda a, b, share: a + (b - a) * share,
    "log": em.log,
    "matmul": em.matmul,
    "mean": _mean,
    "normalize": _normalize,
    "pow": em.power,
    "reciprocal": lambda x: em.divide(1.0, x),
    "rms_norm": _rms_norm,
    "rsqrt": lambda x: em.divide(1.0, x.sqrt()),
    "sigmoid": em.sigmoid,
    "silu": lambda x: x * em.sigmoid(x),
    "sqrt": torch.sqrt,
    "square": lambda x: x * x,
    "sum": _total,
    "tanh": em.tanh_of_table,
    "to": _to,
    "true_divide": em.divide,
}
