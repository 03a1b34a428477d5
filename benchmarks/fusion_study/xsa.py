"""XSA and the gate of each head in one pass, forward and backward.

With v the value of the token's own head group, y the output of a head and g its gate:

    out = g (y - s v),  s = <y, v> / <v, v>

A program takes some tokens of one value head with all heads that share it, so that v is read once.
Dividing by <v, v> needs no square root and no normalized copy of v. The backward pass computes s
again: two sums over 64 channels in registers are cheaper than storing it.

The kernels are packaged twice, as a registered operator and as an `autograd.Function`: PR 1615 and
PR 670 blame the second for breaking the graph of a compiled step.

Sources: Triton XSA of PR 1615 (one program per head and token: 5 % slower training), XSA with its
gate in PR 2014, no normalizing in modded-nanogpt record 86.

Why it could win: the compiler's XSA takes 1.8 times the time of its bytes (PR 670). Why it could
lose: the compiler fuses the gate, and the sum of the two gradients of v, with their neighbours.
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
from underpar.model.gpt import GPT
from underpar.recipe import Recipe

# Tokens of a tile: with two heads of 64 channels, 16 of each tensor in each of 128 threads.
ROWS = 16
# Squared length below which a value is not divided by its length, as in F.normalize.
SMALLEST = 1e-24


def plain(y: Tensor, v: Tensor, gate: Tensor) -> Tensor:
    """Remove from y (N, H, D) its part along v (N, K, D); then gate the heads by gate (N, H)."""
    unit = F.normalize(v, dim=-1, eps=SMALLEST**0.5)[:, :, None]
    groups = y.unflatten(1, (v.size(1), -1))
    along = (groups * unit).sum(-1, keepdim=True)
    return (groups - along * unit).flatten(1, 2) * gate[:, :, None]


def gated_xsa(y: Tensor, v: Tensor, gate: Tensor) -> Tensor:
    """As `plain`, by the registered operator."""
    if not runs_triton(y):
        return plain(y, v, gate)
    out: Tensor = torch.ops.fusion_study.gated_xsa(y, v, gate)
    return out


@triton.jit
def _places(num_tokens, H: tl.constexpr, K: tl.constexpr, D: tl.constexpr, T: tl.constexpr):
    """Offsets into y (T, G, D), v (T, D) and gates (T, G), and their masks."""
    head = tl.program_id(0)
    token = tl.program_id(1) * T + tl.arange(0, T)
    row = token.to(tl.int64)
    member, channel = tl.arange(0, H // K), tl.arange(0, D)
    at_gate = (row * H + head * (H // K))[:, None] + member[None, :]
    at_y = at_gate[:, :, None] * D + channel[None, None, :]
    at_v = ((row * K + head) * D)[:, None] + channel[None, :]
    exists = token < num_tokens
    return at_y, at_v, at_gate, exists[:, None, None], exists[:, None]


@triton.jit
def _forward(
    y_ptr, v_ptr, gate_ptr, out_ptr, num_tokens, smallest,
    H: tl.constexpr, K: tl.constexpr, D: tl.constexpr, T: tl.constexpr,
):  # fmt: skip
    at_y, at_v, at_gate, mask3, mask2 = _places(num_tokens, H, K, D, T)
    y = tl.load(y_ptr + at_y, mask3, 0.0).to(tl.float32)
    v = tl.load(v_ptr + at_v, mask2, 0.0).to(tl.float32)
    gate = tl.load(gate_ptr + at_gate, mask2, 0.0).to(tl.float32)
    square = tl.maximum(tl.sum(v * v, 1), smallest)
    along = tl.sum(y * v[:, None, :], 2) / square[:, None]
    out = gate[:, :, None] * (y - along[:, :, None] * v[:, None, :])
    tl.store(out_ptr + at_y, out.to(out_ptr.dtype.element_ty), mask3)


@triton.jit
def _backward(
    y_ptr, v_ptr, gate_ptr, grad_ptr, dy_ptr, dv_ptr, dgate_ptr, num_tokens, smallest,
    H: tl.constexpr, K: tl.constexpr, D: tl.constexpr, T: tl.constexpr,
):  # fmt: skip
    at_y, at_v, at_gate, mask3, mask2 = _places(num_tokens, H, K, D, T)
    y = tl.load(y_ptr + at_y, mask3, 0.0).to(tl.float32)
    grad = tl.load(grad_ptr + at_y, mask3, 0.0).to(tl.float32)
    v = tl.load(v_ptr + at_v, mask2, 0.0).to(tl.float32)
    gate = tl.load(gate_ptr + at_gate, mask2, 0.0).to(tl.float32)
    # Where v is too short to be divided by its length, <v, v> is a constant.
    length = tl.sum(v * v, 1)
    square = tl.maximum(length, smallest)
    along = tl.sum(y * v[:, None, :], 2) / square[:, None]
    down = tl.sum(grad * v[:, None, :], 2) / square[:, None]
    dgate = tl.sum(grad * y, 2) - along * down * length[:, None]
    tl.store(dgate_ptr + at_gate, dgate.to(dgate_ptr.dtype.element_ty), mask2)
    f, u = gate[:, :, None] * grad, gate * down
    dy = f - u[:, :, None] * v[:, None, :]
    tl.store(dy_ptr + at_y, dy.to(dy_ptr.dtype.element_ty), mask3)
    both = tl.where(length > smallest, 2.0 * tl.sum(u * along, 1), 0.0)
    dv = both[:, None] * v - tl.sum(u[:, :, None] * y + along[:, :, None] * f, 1)
    tl.store(dv_ptr + at_v, dv.to(dv_ptr.dtype.element_ty), mask2)


def _launch(y: Tensor, v: Tensor) -> tuple[tuple[int, int], tuple[Any, ...]]:
    num, num_q, dim = y.shape
    num_k = v.size(1)
    return (num_k, triton.cdiv(num, ROWS)), (num, SMALLEST, num_q, num_k, dim, ROWS)


def _run_forward(y: Tensor, v: Tensor, gate: Tensor) -> Tensor:
    y, v, gate = y.contiguous(), v.contiguous(), gate.contiguous()
    out = torch.empty_like(y)
    grid, sizes = _launch(y, v)
    _forward[grid](y, v, gate, out, *sizes)
    return out


def _run_backward(
    y: Tensor, v: Tensor, gate: Tensor, grad: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    y, v, gate, grad = y.contiguous(), v.contiguous(), gate.contiguous(), grad.contiguous()
    dy, dv, dgate = torch.empty_like(y), torch.empty_like(v), torch.empty_like(gate)
    grid, sizes = _launch(y, v)
    _backward[grid](y, v, gate, grad, dy, dv, dgate, *sizes)
    return dy, dv, dgate


_gated_xsa = torch.library.custom_op("fusion_study::gated_xsa", _run_forward, mutates_args=())
_gated_xsa_backward = torch.library.custom_op(
    "fusion_study::gated_xsa_backward", _run_backward, mutates_args=()
)


@_gated_xsa.register_fake
def _(y: Tensor, v: Tensor, gate: Tensor) -> Tensor:
    return y.new_empty(y.shape)


@_gated_xsa_backward.register_fake
def _(y: Tensor, v: Tensor, gate: Tensor, grad: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return y.new_empty(y.shape), v.new_empty(v.shape), gate.new_empty(gate.shape)


def _save(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _differentiate(ctx: Any, grad: Tensor) -> tuple[Tensor, ...]:
    gradients: tuple[Tensor, ...]
    gradients = torch.ops.fusion_study.gated_xsa_backward(*ctx.saved_tensors, grad)
    return gradients


_gated_xsa.register_autograd(_differentiate, setup_context=_save)


class AsFunction(torch.autograd.Function):
    """The same kernels, launched from an `autograd.Function`."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, v: Tensor, gate: Tensor) -> Tensor:
        """The output of the heads."""
        ctx.save_for_backward(y, v, gate)
        return _run_forward(y, v, gate)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Gradients of y, v and gate."""
        y, v, gate = ctx.saved_tensors
        return _run_backward(y, v, gate, grad)


def _as_function(y: Tensor, v: Tensor, gate: Tensor) -> Tensor:
    out: Tensor = AsFunction.apply(y, v, gate) if runs_triton(y) else plain(y, v, gate)
    return out


def apply(network: GPT, recipe: Recipe) -> None:
    """Replace the levers xsa and sparse_attn_gate by one operator."""
    found = [n for n, lever in network.levers.items() if hasattr(lever, "attn_out")]
    xsa: Any = network.levers["xsa"] if "xsa" in found else None
    if sorted(found) != ["sparse_attn_gate", "xsa"] or xsa.strength != 1.0:
        raise BenchError(
            f"xsa takes the levers xsa (strength 1) and sparse_attn_gate, not {', '.join(found)}"
        )
    if list(xsa.layers) != list(range(network.spec.num_layers)):
        raise BenchError("xsa acts in all layers; leave levers.xsa.layers empty")
    network.hooks.attn_out[:] = [types.MethodType(_attn_out, network)]


def _attn_out(network: Any, layer: int, y: Tensor, x: Tensor, v: Tensor) -> Tensor:
    lever = network.levers["sparse_attn_gate"]
    weight = lever.gate[layer].to(y.dtype)
    gate = torch.sigmoid(lever.scale * (x[:, : lever.width].to(y.dtype) @ weight.T))
    return gated_xsa(y, v, gate.to(y.dtype))


def _inputs(device: torch.device, tokens: int) -> tuple[Tensor, Tensor, Tensor]:
    on_gpu = device.type == "cuda"
    dtype = torch.bfloat16 if on_gpu else torch.float32
    num_q, num_k, dim = (8, 4, 64) if on_gpu else (4, 2, 16)
    y, v = (torch.randn(tokens, heads, dim, device=device).to(dtype) for heads in (num_q, num_k))
    gate = torch.rand(tokens, num_q, device=device).to(dtype)
    return y.requires_grad_(), v.requires_grad_(), gate.requires_grad_()


def _operator(what: str, plain: Any, fused: Any, plain_halves: int) -> Operator:
    half = 2 * TOKENS * 256
    return Operator(
        what=what,
        source="PR 1615, PR 670, PR 2014, modded-nanogpt record 86",
        plain=plain,
        fused=fused,
        inputs=_inputs,
        flops=0.0,
        # y, v, out; y, v, the gradient of out, dy, dv. Gates have a 64th of the size.
        bytes=(2 + 1 + 2 + 2 + 1 + 2 + 2 + 1) * half,
        plain_bytes=plain_halves * half,
    )


OPERATORS = {
    # Unit values are written, read, kept for the backward pass and read there.
    "xsa": _operator("XSA and gate", plain, gated_xsa, 17),
    "xsa.function": _operator("operator; plain: autograd.Function", _as_function, gated_xsa, 13),
}


def check(device: torch.device) -> None:
    """Output and gradients of both packages against fp64."""
    for version in (gated_xsa, _as_function):
        _operator("XSA and gate", plain, version, 0).check(device)
