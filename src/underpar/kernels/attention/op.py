"""Packed attention as one registered operator: compilers see the operator, not its backend."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.library import define, impl, register_autograd, register_fake

from underpar.kernels.attention.backend import Backend, Gradients, Pieces, Saved
from underpar.kernels.attention.select import backend_of
from underpar.kernels.attention.table import find_backend


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    /,
    cu: Tensor,
    max_len: int,
    window: int = 0,
    backend: str | None = None,
) -> Tensor:
    """Causal softmax attention within each piece; q (N, H, D), k and v (N, K, D) -> (N, H, D).

    Piece s holds the tokens cu[s], ..., cu[s + 1] - 1, at most `max_len` of them. Query head h
    reads key head h // (H / K). The scale is 1 / sqrt(D). With a `window` above 0 a query sees its
    own token and that many before it. If no `backend` is named, the process's choice is used. It is
    looked up when the operator runs, so compilers do not wait until backends were tried.
    """
    assert q.dtype == k.dtype == v.dtype and q.size(1) % k.size(1) == 0
    assert cu.dtype == torch.int32 and cu.device == q.device and window >= 0
    out: Tensor = torch.ops.underpar.attend(q, k, v, cu, max_len, window, backend or "")[0]
    return out


# Defined by a schema, because the first call of torch.library.custom_op imports the compiler.
# `saved` are the tensors of Saved. Results have the same shapes with every backend: `lse` is zeros
# if the backend returns none.
define(
    "underpar::attend",
    "(Tensor q, Tensor k, Tensor v, Tensor cu, int max_len, int window, str backend)"
    " -> (Tensor, Tensor)",
)
define(
    "underpar::attend_backward",
    "(Tensor grad, Tensor[] saved, Tensor cu, int max_len, int window, str backend)"
    " -> (Tensor, Tensor, Tensor)",
)


@impl("underpar::attend", "CompositeExplicitAutograd")
def _attend(
    q: Tensor, k: Tensor, v: Tensor, cu: Tensor, max_len: int, window: int, backend: str
) -> tuple[Tensor, Tensor]:
    # The operator computes in the precision of its arguments.
    with torch.autocast(q.device.type, enabled=False):
        out, lse = _chosen(backend, q, window).forward(q, k, v, Pieces(cu, max_len, window))
    return out.contiguous(), lse if lse.numel() else lse.new_zeros(q.size(1), q.size(0))


def _chosen(name: str, q: Tensor, window: int) -> Backend:
    return find_backend(name or backend_of(q.device, q.dtype, window > 0, q.size(-1)))


@register_fake("underpar::attend")
def _(
    q: Tensor, k: Tensor, v: Tensor, cu: Tensor, max_len: int, window: int, backend: str
) -> tuple[Tensor, Tensor]:
    return q.new_empty(q.shape), q.new_empty((q.size(1), q.size(0)), dtype=torch.float32)


@impl("underpar::attend_backward", "CompositeExplicitAutograd")
def _attend_backward(
    grad: Tensor, saved: list[Tensor], cu: Tensor, max_len: int, window: int, backend: str
) -> Gradients:
    with torch.autocast(grad.device.type, enabled=False):
        chosen, pieces = _chosen(backend, saved[0], window), Pieces(cu, max_len, window)
        dq, dk, dv = chosen.backward(grad.contiguous(), Saved(*saved), pieces)
    return dq.contiguous(), dk.contiguous(), dv.contiguous()


@register_fake("underpar::attend_backward")
def _(
    grad: Tensor, saved: list[Tensor], cu: Tensor, max_len: int, window: int, backend: str
) -> Gradients:
    q, k, v, *_ = saved
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, cu, *ctx.rest = inputs
    ctx.save_for_backward(q, k, v, *output, cu)
    ctx.mark_non_differentiable(output[1])


def _differentiate(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
    *saved, cu = ctx.saved_tensors
    gradients = torch.ops.underpar.attend_backward(grad, saved, cu, *ctx.rest)
    return *gradients, None, None, None, None


register_autograd("underpar::attend", _differentiate, setup_context=_save)
