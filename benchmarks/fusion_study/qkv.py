"""One product for queries, keys and values; then norm, partial rotation and gain in one pass.

The weights of the three projections stay parameters of their own, so that Muon sees what it saw;
their bf16 copies are joined in the graph (1 MB). The pass after the product reads its output once:

    q, k    x / rms(x), rotated in the first channels, q times the gain of its head; all in fp32
    v       copied out of the product, because attention wants rows of its own

The backward pass computes norm and rotation again from the product, and writes the gradient of the
whole product in one pass: one product then makes the gradient of the input, not three with sums.

Sources: fused QKV of PR 1615 (+0.4 % tokens per second there, within noise) and PR 670 (slower,
because of copies); norm and rotation as an epilogue, PR 1316; partial rotation, PR 315.

Why it could win: the input is read once, and its gradient written once. Why it could lose: values
are copied, the compiler makes one pass of norm and rotation as well, and it has rotated in bf16
without harm.
"""

# mypy: disallow-untyped-defs=False

from __future__ import annotations

import types
from typing import Any

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from underpar.errors import BenchError
from underpar.lab.operators import TOKENS, Operator, runs_triton
from underpar.model.gpt import GPT, frequencies_of, rotate
from underpar.recipe import Recipe
from underpar.seams import Stream, Visit

# As F.rms_norm of bf16, which computes in fp32.
EPS = torch.finfo(torch.float32).eps
# Tokens of a tile, each with one head of 64 channels, in 128 threads. On an H200 twice as many are
# 14 % slower in the backward pass, and 3 % in the forward pass.
ROWS = 16
# Tiles of the backward pass that a program takes before it writes its sums of gain gradients.
TILES = 8

Angles = tuple[Tensor, Tensor]


def plain(packed: Tensor, angles: Angles, gain: Tensor, dim: int) -> tuple[Tensor, Tensor, Tensor]:
    """q (N, H, D), k and v (N, K, D) of a product (N, (H + 2 K) D); gain (H,), `dim` D."""
    heads = packed.unflatten(-1, (-1, dim))
    num_q = len(gain)
    num_k = (heads.size(1) - num_q) // 2
    q, k, v = heads.split((num_q, num_k, num_k), 1)
    q, k = (F.rms_norm(t, (dim,)).to(v.dtype) for t in (q, k))
    q, k = rotate(q, angles), rotate(k, angles)
    return q * gain.to(q.dtype)[:, None], k, v


def split_norm_rotate(
    packed: Tensor, angles: Angles, gain: Tensor, dim: int
) -> tuple[Tensor, Tensor, Tensor]:
    """As `plain`; the angles get no gradient."""
    if not runs_triton(packed):
        return plain(packed, angles, gain, dim)
    cos, sin = (angle.flatten(1) for angle in angles)
    q, k, v = torch.ops.fusion_study.split_norm_rotate(packed, cos, sin, gain, dim)
    return q, k, v


@triton.jit
def _partner(channel, HALF: tl.constexpr):
    """The channel with which each is rotated, and whether it is rotated."""
    rotated = channel < 2 * HALF
    return tl.where(channel < HALF, channel + HALF, channel - HALF), rotated


@triton.jit
def _turn(x, other, cos_ptr, sin_ptr, token, channel, exists, inverse, HALF: tl.constexpr):
    """Rotate pairs (x, other), or rotate them back if `inverse` is -1; other channels stay."""
    _, rotated = _partner(channel, HALF)
    mask = exists[:, None] & rotated[None, :]
    at = token.to(tl.int64)[:, None] * HALF + (channel % HALF)[None, :]
    cos = tl.load(cos_ptr + at, mask, 1.0).to(tl.float32)
    sin = tl.load(sin_ptr + at, mask, 0.0).to(tl.float32)
    sign = tl.where(channel < HALF, inverse, -inverse)[None, :]
    return x * cos + sign * sin * other


@triton.jit
def _forward(
    packed_ptr, cos_ptr, sin_ptr, gain_ptr, q_ptr, k_ptr, v_ptr, num_tokens, eps,
    H: tl.constexpr, K: tl.constexpr, D: tl.constexpr, HALF: tl.constexpr, T: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(0)
    token = tl.program_id(1) * T + tl.arange(0, T)
    channel = tl.arange(0, D)
    exists = token < num_tokens
    row = token.to(tl.int64)[:, None]
    at = (row * (H + 2 * K) + head) * D + channel[None, :]
    raw = tl.load(packed_ptr + at, exists[:, None], 0.0)
    if head >= H + K:
        to = (row * K + (head - H - K)) * D + channel[None, :]
        tl.store(v_ptr + to, raw, exists[:, None])
    else:
        x = raw.to(tl.float32)
        inverse = tl.rsqrt(tl.sum(x * x, 1) / D + eps)[:, None]
        partner, rotated = _partner(channel, HALF)
        other_at = (row * (H + 2 * K) + head) * D + partner[None, :]
        mask = exists[:, None] & rotated[None, :]
        other = tl.load(packed_ptr + other_at, mask, 0.0).to(tl.float32)
        out = _turn(
            x * inverse, other * inverse, cos_ptr, sin_ptr, token, channel, exists, 1.0, HALF
        )
        if head < H:
            out = out * tl.load(gain_ptr + head)
            to = (row * H + head) * D + channel[None, :]
            tl.store(q_ptr + to, out.to(q_ptr.dtype.element_ty), exists[:, None])
        else:
            to = (row * K + (head - H)) * D + channel[None, :]
            tl.store(k_ptr + to, out.to(k_ptr.dtype.element_ty), exists[:, None])


@triton.jit
def _backward(
    packed_ptr, cos_ptr, sin_ptr, gain_ptr, dq_ptr, dk_ptr, dv_ptr, dpacked_ptr, sums_ptr,
    num_tokens, eps, H: tl.constexpr, K: tl.constexpr, D: tl.constexpr, HALF: tl.constexpr,
    T: tl.constexpr, TILES: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(0)
    channel = tl.arange(0, D)
    partner, rotated = _partner(channel, HALF)
    kind = dpacked_ptr.dtype.element_ty
    sums = tl.zeros((T,), tl.float32)
    for tile in range(tl.program_id(1) * TILES, (tl.program_id(1) + 1) * TILES):
        token = tile * T + tl.arange(0, T)
        exists = token < num_tokens
        row = token.to(tl.int64)[:, None]
        at = (row * (H + 2 * K) + head) * D + channel[None, :]
        if head >= H + K:
            value_at = (row * K + (head - H - K)) * D + channel[None, :]
            dv = tl.load(dv_ptr + value_at, exists[:, None], 0.0)
            tl.store(dpacked_ptr + at, dv, exists[:, None])
        else:
            mask = exists[:, None] & rotated[None, :]
            x = tl.load(packed_ptr + at, exists[:, None], 0.0).to(tl.float32)
            if head < H:
                begin = (row * H + head) * D
                grad = tl.load(dq_ptr + begin + channel[None, :], exists[:, None], 0.0)
                other = tl.load(dq_ptr + begin + partner[None, :], mask, 0.0)
            else:
                begin = (row * K + (head - H)) * D
                grad = tl.load(dk_ptr + begin + channel[None, :], exists[:, None], 0.0)
                other = tl.load(dk_ptr + begin + partner[None, :], mask, 0.0)
            inverse = tl.rsqrt(tl.sum(x * x, 1) / D + eps)[:, None]
            n = x * inverse
            e = _turn(
                grad.to(tl.float32),
                other.to(tl.float32),
                cos_ptr,
                sin_ptr,
                token,
                channel,
                exists,
                -1.0,
                HALF,
            )
            along = tl.sum(e * n, 1)
            # A rotation changes no dot product: this is the gradient of the gain.
            sums += along
            dx = inverse * (e - n * (along / D)[:, None])
            if head < H:
                dx = dx * tl.load(gain_ptr + head)
            tl.store(dpacked_ptr + at, dx.to(kind), exists[:, None])
    if head < H:
        tl.store(sums_ptr + tl.program_id(1) * H + head, tl.sum(sums, 0))


@torch.library.custom_op("fusion_study::split_norm_rotate", mutates_args=())
def _split_norm_rotate(
    packed: Tensor, cos: Tensor, sin: Tensor, gain: Tensor, dim: int
) -> tuple[Tensor, Tensor, Tensor]:
    packed, cos, sin = packed.contiguous(), cos.contiguous(), sin.contiguous()
    num, num_q, num_k = _sizes(packed, gain, dim)
    q, k = packed.new_empty(num, num_q, dim), packed.new_empty(num, num_k, dim)
    v = torch.empty_like(k)
    grid = (num_q + 2 * num_k, triton.cdiv(num, ROWS))
    sizes = (num, EPS, num_q, num_k, dim, cos.size(1), ROWS)
    _forward[grid](packed, cos, sin, gain, q, k, v, *sizes)
    return q, k, v


def _sizes(packed: Tensor, gain: Tensor, dim: int) -> tuple[int, int, int]:
    """Tokens, query heads and key heads."""
    return len(packed), len(gain), (packed.size(1) // dim - len(gain)) // 2


@_split_norm_rotate.register_fake
def _(
    packed: Tensor, cos: Tensor, sin: Tensor, gain: Tensor, dim: int
) -> tuple[Tensor, Tensor, Tensor]:
    num, num_q, num_k = _sizes(packed, gain, dim)
    like_k = (num, num_k, dim)
    return packed.new_empty(num, num_q, dim), packed.new_empty(like_k), packed.new_empty(like_k)


@torch.library.custom_op("fusion_study::split_norm_rotate_backward", mutates_args=())
def _split_norm_rotate_backward(
    packed: Tensor, cos: Tensor, sin: Tensor, gain: Tensor, dq: Tensor, dk: Tensor, dv: Tensor
) -> tuple[Tensor, Tensor]:
    packed, cos, sin = packed.contiguous(), cos.contiguous(), sin.contiguous()
    num, num_q, num_k = _sizes(packed, gain, dq.size(2))
    programs = triton.cdiv(num, ROWS * TILES)
    dpacked = torch.empty_like(packed)
    sums = gain.new_empty(programs, num_q, dtype=torch.float32)
    given = (packed, cos, sin, gain, dq.contiguous(), dk.contiguous(), dv.contiguous())
    sizes = (num, EPS, num_q, num_k, dq.size(2), cos.size(1), ROWS, TILES)
    _backward[(num_q + 2 * num_k, programs)](*given, dpacked, sums, *sizes)
    return dpacked, sums.sum(0).to(gain.dtype)


@_split_norm_rotate_backward.register_fake
def _(
    packed: Tensor, cos: Tensor, sin: Tensor, gain: Tensor, dq: Tensor, dk: Tensor, dv: Tensor
) -> tuple[Tensor, Tensor]:
    return packed.new_empty(packed.shape), gain.new_empty(gain.shape)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    ctx.save_for_backward(*inputs[:4])


def _differentiate(ctx: Any, dq: Tensor, dk: Tensor, dv: Tensor) -> tuple[Tensor | None, ...]:
    packed, cos, sin, gain = ctx.saved_tensors
    made = torch.ops.fusion_study.split_norm_rotate_backward(packed, cos, sin, gain, dq, dk, dv)
    return made[0], None, None, made[1], None


_split_norm_rotate.register_autograd(_differentiate, setup_context=_save)


def joined(x: Tensor, weights: tuple[Tensor, Tensor, Tensor]) -> Tensor:
    """Three projections of x (N, dim) as one product, in the precision of x."""
    return F.linear(x, torch.cat([weight.to(x.dtype) for weight in weights]))


def apply(network: GPT, recipe: Recipe) -> None:
    """Replace attention up to its backend; of levers on queries and keys only the gain is known."""
    hooks = network.hooks
    others = [n for n, lever in network.levers.items() if hasattr(lever, "qkv") and n != "qk_gain"]
    if others or hooks.adjust or hooks.attend is not None:
        what = others[0] if others else "a lever that adjusts projections or attention"
        raise BenchError(f"qkv does not know {what}; switch it off")
    for block in network.blocks:
        attn: Any = block.attn
        # In a tuple: the levers' weights are not those of attention.
        attn.gain_levers = (network.levers,)
        attn.forward = types.MethodType(_attention_forward, attn)


def _attention_forward(attn: Any, x: Tensor, visit: Visit, stream: Stream) -> Tensor:
    (levers,) = attn.gain_levers
    packed = joined(x, (attn.q.weight, attn.k.weight, attn.v.weight))
    num_q = attn.q.out_features // attn.head_dim
    gain = torch.ones(num_q, device=x.device)
    if "qk_gain" in levers:
        gain = levers["qk_gain"].gain[attn.layer]
    q, k, v = split_norm_rotate(packed, stream.angles, gain, attn.head_dim)
    y = stream.cache.attend(visit.slot, q, k, v, attn.window)
    for hook in attn.hooks.attn_out:
        y = hook(attn.layer, y, x, v)
    out: Tensor = attn.o(y.flatten(-2))
    return out


def _inputs(device: torch.device, tokens: int) -> tuple[Any, ...]:
    on_gpu = device.type == "cuda"
    dtype = torch.bfloat16 if on_gpu else torch.float32
    width, num_q, num_k, dim, rotated = (512, 8, 4, 64, 16) if on_gpu else (24, 4, 2, 16, 8)
    x = torch.randn(tokens, width, device=device).to(dtype).requires_grad_()
    weights = [
        (torch.randn(heads * dim, width, device=device) / width**0.5).to(dtype).float()
        for heads in (num_q, num_k, num_k)
    ]
    angle = torch.arange(tokens, device=device)[:, None, None] * frequencies_of(rotated, 1e4).to(
        device
    )
    # bf16 holds them: the plain version rounds cosines, sines and gains.
    cos, sin = (a.to(dtype).float() for a in (angle.cos(), angle.sin()))
    gain = (5.0 + torch.randn(num_q, device=device)).to(dtype).float()
    return x, *(weight.requires_grad_() for weight in weights), gain.requires_grad_(), cos, sin, dim


def _plain_of_three(x: Tensor, wq: Tensor, wk: Tensor, wv: Tensor, *rest: Any) -> Any:
    gain, cos, sin, dim = rest
    packed = torch.cat([F.linear(x, weight.to(x.dtype)) for weight in (wq, wk, wv)], 1)
    return plain(packed, (cos, sin), gain, dim)


def _fused(x: Tensor, wq: Tensor, wk: Tensor, wv: Tensor, *rest: Any) -> Any:
    gain, cos, sin, dim = rest
    return split_norm_rotate(joined(x, (wq, wk, wv)), (cos, sin), gain, dim)


def _plain_of_one(x: Tensor, wq: Tensor, wk: Tensor, wv: Tensor, *rest: Any) -> Any:
    gain, cos, sin, dim = rest
    return plain(joined(x, (wq, wk, wv)), (cos, sin), gain, dim)


def _operator(what: str, plain: Any, plain_streams: float) -> Operator:
    stream = 2 * TOKENS * 512
    return Operator(
        what=what,
        source="PR 1615, PR 670, PR 1316",
        plain=plain,
        fused=_fused,
        inputs=_inputs,
        flops=3 * 2 * TOKENS * 512 * 1024,
        # Forward: input, product written and read, q, k, v. Backward: their gradients, q and k of
        # the product, its gradient written and read twice, input, its gradient.
        bytes=(1 + 2 + 2 + 2 + 2 + 1.5 + 2 + 2 + 2 + 1 + 1) * stream,
        plain_bytes=plain_streams * stream,
    )


OPERATORS = {
    # The input is read three times more, three of its gradients are written and added, and values
    # are not copied.
    "qkv": _operator("product, norm, rotation, gain; plain: three products", _plain_of_three, 26.5),
    # Queries and keys are read again for the gradient of the gain. Gradients are joined.
    "qkv.pass": _operator("the same; plain: one product", _plain_of_one, 21.5),
}


def check(device: torch.device) -> None:
    """Queries, keys, values and gradients against fp64."""
    OPERATORS["qkv"].check(device)
