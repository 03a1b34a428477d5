"""Attention of lanes in plain torch: all lanes are padded to the longest one, and masked."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

if TYPE_CHECKING:
    from underpar.kernels.lane_attention.op import Gradients, Place


def forward(q: Tensor, cache: Tensor, place: Place, window: int) -> tuple[Tensor, Tensor]:
    """Outputs (N, H, D) of q (N, H, D); the second tensor of the operator is zeros, not needed."""
    span = _span(cache, place)
    keys, values = cache[:, :, :span]
    out = _attend(q, keys, values, place, window)
    return out, q.new_zeros(q.shape[:2], dtype=torch.float32)


def backward(
    grad: Tensor, saved: list[Tensor], cache: Tensor, place: Place, window: int
) -> Gradients:
    """Gradients of the queries (N, H, D), keys and values (N, K, D) of the chunk."""
    span = _span(cache, place)
    # Autograd is off inside an operator. It must be on here, and inference mode off.
    with torch.inference_mode(False), torch.enable_grad():
        q, keys, values = (t.detach().requires_grad_() for t in (saved[0], *cache[:, :, :span]))
        out = _attend(q, keys, values, place, window)
        dq, *kept = torch.autograd.grad(out, (q, keys, values), grad)
    width = len(grad) // len(place.starts)
    offsets = torch.arange(width, device=grad.device)
    lanes = torch.arange(len(place.starts), device=grad.device)[:, None]
    # Padding may be beyond the span; no token has seen it.
    places = (place.starts[:, None] + offsets).clamp(max=span - 1)
    real = (offsets < place.counts[:, None])[:, :, None, None]
    dk, dv = ((d[lanes, places] * real).flatten(0, 1) for d in kept)
    return dq, dk, dv


def _span(cache: Tensor, place: Place) -> int:
    """Number of keys of the longest lane that reads in this step."""
    ends = (place.starts + place.counts) * (place.counts > 0)
    return min(max(1, int(ends.max())), cache.size(2))


def _attend(q: Tensor, keys: Tensor, values: Tensor, place: Place, window: int) -> Tensor:
    """q (N, H, D) over keys and values (L, span, K, D)."""
    num_lanes, span, num_heads, _ = keys.shape
    grouped = (num_lanes, len(q) // num_lanes, num_heads, -1, q.size(-1))
    rows = q.reshape(grouped).transpose(1, 2)  # (L, K, C, G, D)
    width, group = rows.shape[2:4]
    offsets = torch.arange(width, device=q.device)
    back = (place.starts[:, None] + offsets)[:, :, None] - torch.arange(span, device=q.device)
    seen = (back >= 0) & (back <= window) if window else back >= 0  # (L, C, span)
    # Padding sees every key: a row without any key would be NaN, and so would its gradient.
    hidden = (offsets < place.counts[:, None])[:, :, None] & ~seen
    bias = torch.zeros(hidden.shape, dtype=q.dtype, device=q.device)
    bias = bias.masked_fill_(hidden, -math.inf)[:, :, None].expand(-1, -1, group, -1)
    # Query heads that share a key head become further queries of it: no kernel for grouped heads
    # takes a mask.
    with torch.autocast(q.device.type, enabled=False):
        y = F.scaled_dot_product_attention(
            rows.flatten(2, 3),
            keys.transpose(1, 2),
            values.transpose(1, 2),
            attn_mask=bias.flatten(1, 2)[:, None],
        )
    return y.unflatten(2, (width, -1)).transpose(1, 2).reshape(q.shape)
