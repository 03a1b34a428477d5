"""Attention of a chunk of tokens in each lane, over the lane's kept keys and its own, as one
registered operator that is opaque to compilers.

Gradients reach the chunk's own keys and values and stop at the kept ones, as in Transformer-XL (Dai
et al. 2019, arXiv:1901.02860), so their part is small: keys of this step and queries of this step.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.library import define, impl, register_autograd, register_fake

from underpar.kernels.lane_attention import reference

Gradients = tuple[Tensor, Tensor, Tensor]


class Place(NamedTuple):
    """Where a step's tokens belong in their lanes."""

    starts: Tensor
    """(L,) tokens that each lane has kept."""
    counts: Tensor
    """(L,) tokens of the step that are real, from a lane's first; the others are padding."""


def attend_lanes(
    q: Tensor, k: Tensor, v: Tensor, /, cache: Tensor, place: Place, window: int = 0
) -> Tensor:
    """Causal softmax attention in each lane; q (N, H, D), k and v (N, K, D) -> (N, H, D).

    N = L * C, lane by lane. `cache` (2, L, room, K, D) holds the lanes' keys and values; k and v
    are written behind what is kept, which needs room for one token more. Query head h reads key
    head h // (H / K), the scale is 1 / sqrt(D), and a `window` above 0 lets a query see that many
    tokens before its own. Padding sees anything: finite numbers that nobody reads.
    """
    assert q.dtype == k.dtype == v.dtype == cache.dtype and q.size(1) % k.size(1) == 0
    assert q.size(0) % cache.size(1) == 0 and window >= 0
    own = torch.ops.underpar.attend_lanes
    out: Tensor = own(q, k, v, cache, list(place), window)[0]
    return out


# The write to the cache is not in the schema: no other operator of a step looks there, and to
# write the same again changes nothing.
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
    """Put k and v (N, K, D) behind what lanes keep."""
    _, num_lanes, room, *rest = cache.shape
    offsets = torch.arange(len(k) // num_lanes, device=k.device)
    # Padding that has no room goes to the last row, which is never a token's.
    rows = (starts[:, None] + offsets).clamp(max=room - 1)
    rows += room * torch.arange(num_lanes, device=k.device)[:, None]
    for kept, own in zip(cache.view(2, -1, *rest), (k, v), strict=True):
        kept.index_copy_(0, rows.flatten(), own)


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
    found: Gradients = _backend(grad).backward(
        grad.contiguous(), saved, cache, Place(*place), window
    )
    return found


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
    own = torch.ops.underpar.attend_lanes_backward
    gradients = own(grad, [q, out, lse], cache, place, ctx.window)
    return *gradients, None, [None] * len(place), None


register_autograd("underpar::attend_lanes", _differentiate, setup_context=_save)
