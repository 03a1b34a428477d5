"""Attention of lanes in Triton: one program per lane, key head and tile of queries.

A tile holds queries of C tokens times the G query heads that share the key head. A program reads
the keys of its lane once, as FlashAttention does (arXiv:2205.14135). The backward pass follows
arXiv:2307.08691; only keys of the chunk have gradients.
"""

# mypy: disallow-untyped-defs=False

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import triton
import triton.language as tl
from torch import Tensor

if TYPE_CHECKING:
    from underpar.kernels.lane_attention.op import Gradients, Place

# Largest number of queries of a tile, and number of keys that are read at a time.
QUERIES, KEYS = 64, 64


@triton.jit
def _rows(lane, head, first, width, G: tl.constexpr, H: tl.constexpr, M: tl.constexpr):
    """Tokens of the queries of a tile, their rows among all N * H, and which of them exist."""
    index = first + tl.arange(0, M)
    token = index // G
    exists = token < width
    row = (lane.to(tl.int64) * width + token) * H + head * G + index % G
    return token, row, exists


@triton.jit
def _scores(q, k, place, key, end, scale, WINDOW: tl.constexpr):
    """Scaled scores (M, B); -inf if the query does not see the key."""
    back = place[:, None] - key[None, :]
    seen = (back >= 0) & (key[None, :] < end)
    if WINDOW > 0:
        seen = seen & (back <= WINDOW)
    s = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
    return tl.where(seen, s, -float("inf"))


@triton.jit
def _forward(
    q_ptr, cache_ptr, out_ptr, lse_ptr, starts_ptr, counts_ptr,
    width, room, num_kept, scale, WINDOW: tl.constexpr,
    K: tl.constexpr, G: tl.constexpr, D: tl.constexpr, M: tl.constexpr, B: tl.constexpr,
):  # fmt: skip
    lane, head = tl.program_id(0) // K, tl.program_id(0) % K
    token, row, exists = _rows(lane, head, tl.program_id(1) * M, width, G, K * G, M)
    start, count = tl.load(starts_ptr + lane), tl.load(counts_ptr + lane)
    end = start + count
    # Padding sees what the last real token sees, so that no row is without keys.
    place = start + tl.minimum(token, tl.maximum(count - 1, 0))
    d = tl.arange(0, D)
    q = tl.load(q_ptr + row[:, None] * D + d[None, :], exists[:, None], 0.0)
    last = tl.minimum(start + (tl.program_id(1) * M + M - 1) // G, end - 1)
    first = start * 0
    if WINDOW > 0:
        first = tl.maximum(start + tl.program_id(1) * M // G - WINDOW, 0)
    top = tl.full((M,), -float("inf"), tl.float32)
    total = tl.zeros((M,), tl.float32)
    acc = tl.zeros((M, D), tl.float32)
    for begin in range(first // B * B, last + 1, B):
        key = begin + tl.arange(0, B)
        at = ((lane.to(tl.int64) * room + key) * K + head)[:, None] * D + d[None, :]
        k = tl.load(cache_ptr + at, (key < end)[:, None], 0.0)
        v = tl.load(cache_ptr + num_kept + at, (key < end)[:, None], 0.0)
        s = _scores(q, k, place, key, end, scale, WINDOW)
        higher = tl.maximum(top, tl.max(s, 1))
        safe = tl.where(higher == -float("inf"), 0.0, higher)
        p = tl.exp(s - safe[:, None])
        shrink = tl.exp(top - safe)
        total = total * shrink + tl.sum(p, 1)
        acc = acc * shrink[:, None] + tl.dot(p.to(v.dtype), v, input_precision="ieee")
        top = higher
    # A lane without tokens has no keys; its output is zero.
    sums = tl.where(total > 0, total, 1.0)
    out = acc / sums[:, None]
    tl.store(out_ptr + row[:, None] * D + d[None, :], out.to(q.dtype), exists[:, None])
    tl.store(lse_ptr + row, tl.where(total > 0, top, 0.0) + tl.log(sums), exists)


@triton.jit
def _queries_backward(
    grad_ptr, q_ptr, out_ptr, lse_ptr, dq_ptr, cache_ptr, starts_ptr, counts_ptr,
    width, room, num_kept, scale, WINDOW: tl.constexpr,
    K: tl.constexpr, G: tl.constexpr, D: tl.constexpr, M: tl.constexpr, B: tl.constexpr,
):  # fmt: skip
    lane, head = tl.program_id(0) // K, tl.program_id(0) % K
    token, row, exists = _rows(lane, head, tl.program_id(1) * M, width, G, K * G, M)
    start, count = tl.load(starts_ptr + lane), tl.load(counts_ptr + lane)
    end = start + count
    real = exists & (token < count)
    place = start + token
    d = tl.arange(0, D)
    at_row = row[:, None] * D + d[None, :]
    q = tl.load(q_ptr + at_row, real[:, None], 0.0)
    grad = tl.load(grad_ptr + at_row, real[:, None], 0.0)
    out = tl.load(out_ptr + at_row, real[:, None], 0.0)
    lse = tl.load(lse_ptr + row, real, 0.0)
    delta = tl.sum(grad.to(tl.float32) * out.to(tl.float32), 1)
    last = tl.minimum(start + (tl.program_id(1) * M + M - 1) // G, end - 1)
    first = start * 0
    if WINDOW > 0:
        first = tl.maximum(start + tl.program_id(1) * M // G - WINDOW, 0)
    dq = tl.zeros((M, D), tl.float32)
    for begin in range(first // B * B, last + 1, B):
        key = begin + tl.arange(0, B)
        at = ((lane.to(tl.int64) * room + key) * K + head)[:, None] * D + d[None, :]
        k = tl.load(cache_ptr + at, (key < end)[:, None], 0.0)
        v = tl.load(cache_ptr + num_kept + at, (key < end)[:, None], 0.0)
        s = _scores(q, k, place, key, end, scale, WINDOW)
        p = tl.exp(s - lse[:, None])
        dp = tl.dot(grad, tl.trans(v), input_precision="ieee")
        ds = p * (dp - delta[:, None]) * scale
        dq += tl.dot(ds.to(k.dtype), k, input_precision="ieee")
    tl.store(dq_ptr + at_row, tl.where(real[:, None], dq, 0.0).to(q.dtype), exists[:, None])


@triton.jit
def _keys_backward(
    grad_ptr, q_ptr, out_ptr, lse_ptr, dk_ptr, dv_ptr, cache_ptr, starts_ptr, counts_ptr,
    width, room, num_kept, scale, WINDOW: tl.constexpr,
    K: tl.constexpr, G: tl.constexpr, D: tl.constexpr, M: tl.constexpr, B: tl.constexpr,
):  # fmt: skip
    lane, head = tl.program_id(0) // K, tl.program_id(0) % K
    index = tl.program_id(1) * B + tl.arange(0, B)
    start, count = tl.load(starts_ptr + lane), tl.load(counts_ptr + lane)
    end = start + count
    key = start + index
    d = tl.arange(0, D)
    at = ((lane.to(tl.int64) * room + key) * K + head)[:, None] * D + d[None, :]
    k = tl.load(cache_ptr + at, (index < count)[:, None], 0.0)
    v = tl.load(cache_ptr + num_kept + at, (index < count)[:, None], 0.0)
    dk = tl.zeros((B, D), tl.float32)
    dv = tl.zeros((B, D), tl.float32)
    # From the first query that sees a key of this tile.
    for begin in range(tl.program_id(1) * B * G // M * M, count * G, M):
        token, row, exists = _rows(lane, head, begin, width, G, K * G, M)
        real = exists & (token < count)
        at_row = row[:, None] * D + d[None, :]
        q = tl.load(q_ptr + at_row, real[:, None], 0.0)
        grad = tl.load(grad_ptr + at_row, real[:, None], 0.0)
        out = tl.load(out_ptr + at_row, real[:, None], 0.0)
        lse = tl.load(lse_ptr + row, real, 0.0)
        delta = tl.sum(grad.to(tl.float32) * out.to(tl.float32), 1)
        s = _scores(q, k, start + token, key, end, scale, WINDOW)
        p = tl.where(real[:, None], tl.exp(s - lse[:, None]), 0.0)
        dv += tl.dot(tl.trans(p.to(grad.dtype)), grad, input_precision="ieee")
        dp = tl.dot(grad, tl.trans(v), input_precision="ieee")
        ds = p * (dp - delta[:, None]) * scale
        dk += tl.dot(tl.trans(ds.to(q.dtype)), q, input_precision="ieee")
    to = ((lane.to(tl.int64) * width + index) * K + head)[:, None] * D + d[None, :]
    tl.store(dk_ptr + to, dk.to(k.dtype), (index < width)[:, None])
    tl.store(dv_ptr + to, dv.to(k.dtype), (index < width)[:, None])


def forward(q: Tensor, cache: Tensor, place: Place, window: int) -> tuple[Tensor, Tensor]:
    """Outputs (N, H, D), and the logsumexp of the scores of each query (N, H)."""
    out, lse = torch.empty_like(q), q.new_empty(q.shape[:2], dtype=torch.float32)
    grid, sizes, kinds = _launch(q, cache, window)
    _forward[grid](q, cache, out, lse, *place, *sizes, **kinds)
    return out, lse


def backward(
    grad: Tensor, saved: list[Tensor], cache: Tensor, place: Place, window: int
) -> Gradients:
    """Gradients of the queries (N, H, D), keys and values (N, K, D) of the chunk."""
    q, out, lse = (t.contiguous() for t in saved)
    dq, dk = torch.empty_like(q), q.new_empty(len(q), *cache.shape[3:])
    dv = torch.empty_like(dk)
    grid, sizes, kinds = _launch(q, cache, window)
    width = sizes[0]
    common = (grad, q, out, lse)
    _queries_backward[grid](*common, dq, cache, *place, *sizes, **kinds)
    tiles = (grid[0], triton.cdiv(width, KEYS))
    _keys_backward[tiles](*common, dk, dv, cache, *place, *sizes, **kinds)
    return dq, dk, dv


def _launch(
    q: Tensor, cache: Tensor, window: int
) -> tuple[tuple[int, int], tuple[int | float, ...], dict[str, Any]]:
    """The grid, run-time numbers and compile-time constants of a kernel over tiles of queries."""
    _, num_lanes, room, num_heads, channels = cache.shape
    width, group = len(q) // num_lanes, q.size(1) // num_heads
    rows = min(QUERIES, max(16, triton.next_power_of_2(width * group)))
    grid = (num_lanes * num_heads, triton.cdiv(width * group, rows))
    sizes = (width, room, cache[0].numel(), channels**-0.5)
    kinds = {"WINDOW": window, "K": num_heads, "G": group, "D": channels, "M": rows, "B": KEYS}
    return grid, sizes, kinds
