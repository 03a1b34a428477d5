"""Between the products of a block: residual mix, skip, scale of a branch and next norm in one pass.

A block writes and reads its stream in three places:

    entry, all blocks    x <- m0 x + m1 x0;                     h = norm(x)
    entry with a skip    x <- m0 (g x + (1 - g) w u) + m1 x0;   h = norm(x)
    after attention      x <- x + scale y;                      h = norm(x)

All three are one operator: a sum of streams with a factor per channel, and its norm. The factors of
a skip are multiplied once per channel, not per token: (m0 g) x + (m0 (1 - g) w) u + m1 x0. The
backward pass makes the gradients of streams and factors in one kernel; each program sums the
gradients of its factors in registers.

Sources: skips, mix and norm scale of PR 2014; PR 670 (a norm with its residual, equal to the
compiler's); PR 1420 (the compiler's fusion of norms with sums over tokens costs 8 % of a step).

Why it could win: the compiler sums the gradients of factors in kernels of their own, which read the
streams again, and skips are compiled apart (2.4 % of a step). Why it could lose: the compiler
already makes one kernel of each of these places in the forward pass, and fuses more into it.
"""

# mypy: disallow-untyped-defs=False

from __future__ import annotations

import types
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from underpar.errors import BenchError
from underpar.lab.operators import TOKENS, Operator, runs_triton
from underpar.model.gpt import GPT
from underpar.model.network import EAGER, Eager
from underpar.recipe import Recipe
from underpar.seams import Stream, Visit

# As F.rms_norm of bf16, which computes in fp32.
EPS = torch.finfo(torch.float32).eps
# Tokens of a tile, and programs of a multiprocessor: the fastest of those tried on an H200. With
# 512 channels and 128 threads, a thread has 4 channels per token. The backward pass keeps all
# streams and the sums of their factors in registers: its tiles depend on their number.
FORWARD = (4, 16)
BACKWARD = {1: (4, 3), 2: (4, 3), 3: (1, 12)}


def plain(streams: Sequence[Tensor], factors: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    """Sum (N, D) of streams times factors (streams, D), and its RMS norm times `scale` ()."""
    terms = [stream * factors[i].to(stream.dtype) for i, stream in enumerate(streams)]
    x = sum(terms[1:], terms[0])
    return x, F.rms_norm(x, (x.size(-1),)).to(x.dtype) * scale.to(x.dtype)


def mix_norm(streams: Sequence[Tensor], factors: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    """As `plain`: up to three streams; `scale` gets no gradient."""
    assert len(streams) == len(factors) <= 3
    if not runs_triton(factors):
        return plain(streams, factors, scale)
    x, h = torch.ops.fusion_study.mix_norm(list(streams), factors, scale)
    return x, h


@triton.jit
def _term(z_ptr, factors_ptr, at, column, mask, K: tl.constexpr, D):
    """A stream as fp32, and its factors."""
    factor = tl.load(factors_ptr + K * D + column, column < D, 0.0)[None, :]
    return tl.load(z_ptr + at, mask, 0.0).to(tl.float32), factor


@triton.jit
def _forward(
    z0_ptr, z1_ptr, z2_ptr, factors_ptr, scale_ptr, x_ptr, h_ptr,
    num_tokens, D, eps, K: tl.constexpr, T: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    column = tl.arange(0, BLOCK)
    scale = tl.load(scale_ptr)
    for tile in range(tl.program_id(0), tl.cdiv(num_tokens, T), tl.num_programs(0)):
        token = tile * T + tl.arange(0, T)
        at = token[:, None].to(tl.int64) * D + column[None, :]
        mask = (token < num_tokens)[:, None] & (column < D)[None, :]
        z, factor = _term(z0_ptr, factors_ptr, at, column, mask, 0, D)
        x = z * factor
        if K > 1:
            z, factor = _term(z1_ptr, factors_ptr, at, column, mask, 1, D)
            x += z * factor
        if K > 2:
            z, factor = _term(z2_ptr, factors_ptr, at, column, mask, 2, D)
            x += z * factor
        # The norm of what is stored, which the backward pass sees again.
        x = x.to(x_ptr.dtype.element_ty)
        tl.store(x_ptr + at, x, mask)
        x = x.to(tl.float32)
        h = x * (scale * tl.rsqrt(tl.sum(x * x, 1) / D + eps))[:, None]
        tl.store(h_ptr + at, h.to(h_ptr.dtype.element_ty), mask)


@triton.jit
def _backward(
    z0_ptr, z1_ptr, z2_ptr, factors_ptr, scale_ptr, dx_ptr, dh_ptr,
    dz0_ptr, dz1_ptr, dz2_ptr, sums_ptr,
    num_tokens, D, eps, K: tl.constexpr, T: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    column = tl.arange(0, BLOCK)
    scale = tl.load(scale_ptr)
    sum0 = tl.zeros((T, BLOCK), tl.float32)
    sum1 = tl.zeros((T, BLOCK), tl.float32)
    sum2 = tl.zeros((T, BLOCK), tl.float32)
    kind = dz0_ptr.dtype.element_ty
    for tile in range(tl.program_id(0), tl.cdiv(num_tokens, T), tl.num_programs(0)):
        token = tile * T + tl.arange(0, T)
        at = token[:, None].to(tl.int64) * D + column[None, :]
        mask = (token < num_tokens)[:, None] & (column < D)[None, :]
        z0, factor0 = _term(z0_ptr, factors_ptr, at, column, mask, 0, D)
        x = z0 * factor0
        if K > 1:
            z1, factor1 = _term(z1_ptr, factors_ptr, at, column, mask, 1, D)
            x += z1 * factor1
        if K > 2:
            z2, factor2 = _term(z2_ptr, factors_ptr, at, column, mask, 2, D)
            x += z2 * factor2
        x = x.to(kind).to(tl.float32)
        inverse = tl.rsqrt(tl.sum(x * x, 1) / D + eps)[:, None]
        dh = scale * tl.load(dh_ptr + at, mask, 0.0).to(tl.float32)
        n = x * inverse
        g = inverse * (dh - n * (tl.sum(dh * n, 1) / D)[:, None])
        g += tl.load(dx_ptr + at, mask, 0.0).to(tl.float32)
        tl.store(dz0_ptr + at, (g * factor0).to(kind), mask)
        sum0 += g * z0
        if K > 1:
            tl.store(dz1_ptr + at, (g * factor1).to(kind), mask)
            sum1 += g * z1
        if K > 2:
            tl.store(dz2_ptr + at, (g * factor2).to(kind), mask)
            sum2 += g * z2
    to = sums_ptr + tl.program_id(0) * K * D + column
    tl.store(to, tl.sum(sum0, 0), column < D)
    if K > 1:
        tl.store(to + D, tl.sum(sum1, 0), column < D)
    if K > 2:
        tl.store(to + 2 * D, tl.sum(sum2, 0), column < D)


def _num_programs(x: Tensor, each: int, rows: int) -> int:
    # The interpreter has few, so that they take several tiles as on a GPU.
    programs = 3
    if x.is_cuda:
        programs = each * torch.cuda.get_device_properties(x.device).multi_processor_count
    return min(programs, triton.cdiv(len(x), rows))


def _three(streams: Sequence[Tensor]) -> list[Tensor]:
    """The kernels take three pointers and use as many as there are streams."""
    return [*streams, *[streams[0]] * (3 - len(streams))]


@torch.library.custom_op("fusion_study::mix_norm", mutates_args=())
def _mix_norm(streams: list[Tensor], factors: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    streams = [stream.contiguous() for stream in streams]
    x, h = torch.empty_like(streams[0]), torch.empty_like(streams[0])
    rows, each = FORWARD
    sizes = (*x.shape, EPS, len(streams), rows, triton.next_power_of_2(x.size(1)))
    grid = (_num_programs(x, each, rows),)
    _forward[grid](*_three(streams), factors.contiguous(), scale, x, h, *sizes)
    return x, h


@_mix_norm.register_fake
def _(streams: list[Tensor], factors: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    like = streams[0]
    return like.new_empty(like.shape), like.new_empty(like.shape)


@torch.library.custom_op("fusion_study::mix_norm_backward", mutates_args=())
def _mix_norm_backward(
    streams: list[Tensor], factors: Tensor, scale: Tensor, dx: Tensor, dh: Tensor
) -> tuple[list[Tensor], Tensor]:
    streams = [stream.contiguous() for stream in streams]
    like = streams[0]
    made = [torch.empty_like(like) for _ in streams]
    rows, each = BACKWARD[len(streams)]
    programs = _num_programs(like, each, rows)
    sums = like.new_empty(programs, len(streams), like.size(1), dtype=torch.float32)
    sizes = (*like.shape, EPS, len(streams), rows, triton.next_power_of_2(like.size(1)))
    given = (*_three(streams), factors.contiguous(), scale, dx.contiguous(), dh.contiguous())
    _backward[(programs,)](*given, *_three(made), sums, *sizes)
    return made, sums.sum(0).to(factors.dtype)


@_mix_norm_backward.register_fake
def _(
    streams: list[Tensor], factors: Tensor, scale: Tensor, dx: Tensor, dh: Tensor
) -> tuple[list[Tensor], Tensor]:
    return [z.new_empty(z.shape) for z in streams], factors.new_empty(factors.shape)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    streams, factors, scale = inputs
    ctx.save_for_backward(*streams, factors, scale)


def _differentiate(ctx: Any, dx: Tensor, dh: Tensor) -> tuple[Any, ...]:
    *streams, factors, scale = ctx.saved_tensors
    gradients = torch.ops.fusion_study.mix_norm_backward(streams, factors, scale, dx, dh)
    return *gradients, None


_mix_norm.register_autograd(_differentiate, setup_context=_save)


def apply(network: GPT, recipe: Recipe) -> None:
    """Replace the blocks that no lever rewires, and move their skips into them."""
    for seam, known in {"mix": "x0_mix", "normed": "norm_scale", "branch": None}.items():
        others = [n for n, lever in network.levers.items() if hasattr(lever, seam) and n != known]
        if others:
            raise BenchError(f"block_epilogue does not know {others[0]}; switch it off")
    if "unet" in network.levers:
        levers = [getattr(hook, "__self__", None) for hook in network.hooks.before]
        place = levers.index(network.levers["unet"])
        network.hooks.before[place] = types.MethodType(_keep_skip, network)
    for block in network.blocks:
        if block.wiring is None:
            # In a tuple: the levers' weights are not those of the block.
            block.epilogue_levers = (network.levers,)
            block.forward = types.MethodType(_block_forward, block)


def _keep_skip(network: GPT, visit: Visit, stream: Stream) -> None:
    """Leave a skip to the block, if the block knows how to read it."""
    unet: Any = network.levers["unet"]
    stack = stream.kept.setdefault("unet", ())
    if network.blocks[visit.layer].wiring is not None:
        unet.before(visit, stream)
    elif 0 <= visit.decoder < unet.skips and stack:
        stream.kept["skip"], stream.kept["unet"] = stack


def _block_forward(block: Any, visit: Visit, stream: Stream, run: Eager = EAGER) -> None:
    (levers,) = block.epilogue_levers
    scale = torch.ones((), device=stream.x.device)
    if "norm_scale" in levers:
        scale = levers["norm_scale"].scale[block.layer]
    x, h = mix_norm(*_entry(levers, visit, stream), scale)
    y = block.attn(h, visit, stream)
    factors = torch.stack((torch.ones_like(block.attn_scale), block.attn_scale))
    x, h = mix_norm([x, y], factors, scale)
    y = block.mlp(h, visit)
    stream.x = x + block.mlp_scale.to(y.dtype) * y


def _entry(levers: Any, visit: Visit, stream: Stream) -> tuple[list[Tensor], Tensor]:
    """The streams that a block begins with, and their factors."""
    streams = [stream.x]
    factors = [torch.ones_like(stream.x[0], dtype=torch.float32)]
    if "x0_mix" in levers:
        factors = list(levers["x0_mix"].weight[visit.layer].unbind())
        streams.append(stream.start)
    if "skip" in stream.kept:
        unet = levers["unet"]
        streams.append(stream.kept.pop("skip"))
        factors.append(factors[0] * unet.weight[visit.decoder])
        if unet.gate is not None:
            gate = torch.sigmoid(unet.gate[visit.decoder])
            factors[-1] = factors[-1] * (1.0 - gate)
            factors[0] = factors[0] * gate
    return streams, torch.stack(factors)


def _inputs_of(num_streams: int) -> Any:
    def inputs(device: torch.device, tokens: int) -> tuple[Any, ...]:
        dtype, dim = (torch.bfloat16, 512) if device.type == "cuda" else (torch.float32, 48)
        streams = [torch.randn(tokens, dim, device=device).to(dtype) for _ in range(num_streams)]
        factors = 1.0 + 0.3 * torch.randn(num_streams, dim, device=device)
        # bf16 holds the factors and the scale: the plain version rounds them.
        factors, scale = factors.to(dtype).float(), torch.tensor(0.375, device=device)
        return factors.requires_grad_(), scale, *(stream.requires_grad_() for stream in streams)

    return inputs


def _operator(what: str, num_streams: int) -> Operator:
    stream = 2 * TOKENS * 512
    return Operator(
        what=what,
        source="PR 2014, PR 670, PR 1420",
        plain=lambda factors, scale, *streams: plain(streams, factors, scale),
        fused=lambda factors, scale, *streams: mix_norm(streams, factors, scale),
        inputs=_inputs_of(num_streams),
        flops=0.0,
        # Streams, sum and norm; then streams and two gradients read, a gradient of each written.
        bytes=(num_streams + 2 + 2 * num_streams + 2) * stream,
        # Sums over tokens read the gradient of the sum, which is written for them, and all streams.
        plain_bytes=(num_streams + 2 + 2 * num_streams + 2 + 2 + num_streams) * stream,
    )


OPERATORS = {
    "block_epilogue.branch": _operator("residual, scale of a branch, norm", 2),
    "block_epilogue.skip": _operator("residual mix, gated skip, norm", 3),
}


def check(device: torch.device) -> None:
    """Sums, norms and gradients of two and three streams against fp64."""
    for operator in OPERATORS.values():
        operator.check(device)
