"""Attention of a chunk of tokens per lane, as one registered operator.

A query sees the keys that its lane kept from earlier chunks, and the earlier keys of its own chunk.
Gradients flow to keys and values of the chunk and stop at the kept ones, as in Transformer-XL (Dai
et al. 2019, arXiv:1901.02860). The backward pass is therefore small.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.library import define, impl, register_autograd, register_fake

from underpar.kernels.lane_attention import reference

Gradients = tuple[Tensor, Tensor, Tensor]


class Place(NamedTuple):
    """Which tokens of the lanes a step reads."""

    starts: Tensor
    """(L,) tokens that each lane has kept."""
    counts: Tensor
    """(L,) how many tokens of each lane's chunk are real; the rest of the chunk is padding."""


def attend_lanes(
    q: Tensor, k: Tensor, v: Tensor, /, cache: Tensor, place: Place, window: int = 0
) -> Tensor:
    """Causal softmax attention in each lane; q (N, H, D), k and v (N, K, D) -> (N, H, D).

    N = L * C, lane by lane. `cache` (2, L, room, K, D) holds the keys and values of the lanes; k
    and v are written to it after the kept tokens. `room` must be one token more than is ever kept.
    Query head h reads key head h // (H / K). The scale is 1 / sqrt(D). With a `window` above 0 a
    query sees its own token and that many before it. Results of padding are finite and have no
    meaning.
    """
    assert q.dtype == k.dtype == v.dtype == cache.dtype and q.size(1) % k.size(1) == 0
    assert q.size(0) % cache.size(1) == 0 and window >= 0
    out: Tensor = torch.ops.underpar.attend_lanes(q, k, v, cache, list(place), window)[0]
    return out


# The schema does not declare the write to the cache: no other operator of a step reads the cache,
# and writing the same values twice changes nothing.
define(
    "underpar::attend_lanes",
    "(Tensor q, Tensor k, Tensor v, Tensor cache, Tensor[] place, int window) -> (Tensor, Tensor)",
)
define(
    "underpar::attend_lanes_backward",
    "(Tensor grad, Tensor[] saved, Tensor cache, Tensor[] place, int window)"
    " -> (Tensor, Tensor, Tensor)",
)


@impl("underpar::attend_lanes", "CompositeExplicitAutograd")
def _attend(
    q: Tensor, k: Tensor, v: Tensor, cache: Tensor, place: list[Tensor], window: int
) -> tuple[Tensor, Tensor]:
    with torch.no_grad():
        _write(cache, k, v, place[0])
    return _backend(q).forward(q.contiguous(), cache, Place(*place), window)


def _write(cache: Tensor, k: Tensor, v: Tensor, starts: Tensor) -> None:
    """Write k and v (N, K, D) after the tokens that the lanes have kept."""
    _, num_lanes, room, *rest = cache.shape
    offsets = torch.arange(len(k) // num_lanes, device=k.device)
    # Padding beyond the end goes to the last row, which never holds a token.
    rows = (starts[:, None] + offsets).clamp(max=room - 1)
    rows += room * torch.arange(num_lanes, device=k.device)[:, None]
    for kept, new in zip(cache.view(2, -1, *rest), (k, v), strict=True):
        kept.index_copy_(0, rows.flatten(), new)


def _backend(q: Tensor) -> Any:
    if q.device.type != "cuda":
        return reference
    from underpar.kernels.lane_attention import tiles

    return tiles


@register_fake("underpar::attend_lanes")
def _(
    q: Tensor, k: Tensor, v: Tensor, cache: Tensor, place: list[Tensor], window: int
) -> tuple[Tensor, Tensor]:
    return q.new_empty(q.shape), q.new_empty(q.shape[:2], dtype=torch.float32)


@impl("underpar::attend_lanes_backward", "CompositeExplicitAutograd")
def _attend_backward(
    grad: Tensor, saved: list[Tensor], cache: Tensor, place: list[Tensor], window: int
) -> Gradients:
    gradients: Gradients = _backend(grad).backward(
        grad.contiguous(), saved, cache, Place(*place), window
    )
    return gradients


@register_fake("underpar::attend_lanes_backward")
def _(
    grad: Tensor, saved: list[Tensor], cache: Tensor, place: list[Tensor], window: int
) -> Gradients:
    shape = (grad.size(0), *cache.shape[3:])
    return grad.new_empty(grad.shape), grad.new_empty(shape), grad.new_empty(shape)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, _, _, cache, place, ctx.window = inputs
    ctx.save_for_backward(q, *output, cache, *place)
    ctx.mark_non_differentiable(output[1])


def _differentiate(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor | list[None] | None, ...]:
    q, out, lse, cache, *place = ctx.saved_tensors
    backward = torch.ops.underpar.attend_lanes_backward
    gradients = backward(grad, [q, out, lse], cache, place, ctx.window)
    return *gradients, None, [None] * len(place), None


register_autograd("underpar::attend_lanes", _differentiate, setup_context=_save)
