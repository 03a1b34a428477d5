"""The MLP as two kernels: products whose epilogues are the activation and its gradient.

    forward     h = x W1'         stores phi = leaky(h)^2 and what the backward pass needs of h
                out = phi W2'     cuBLAS
    backward    dh = (g W2) A     A = phi'(h), which only the first product's epilogue computes
                dW2 = g' phi, dW1 = dh' x, dx = dh W1     cuBLAS

so h and the gradient of phi are never written. PR 1894 names five variants, which differ in what
they store, where they round, and whether the RMS norm before the MLP is part of the kernels:

| variant | stored    | phi from          | norm                                   |
|---------|-----------|-------------------|----------------------------------------|
| v1      | h         | h in bf16         | rows of x are scaled inside the K loop |
| v2      | h         | h in bf16         | before the kernels                     |
| v3      | h         | fp32 accumulator  | before the kernels                     |
| v4      | h         | fp32 accumulator  | rows of h are scaled in the epilogue   |
| v5      | A         | fp32 accumulator  | before the kernels                     |

Sources: PR 1530 and PR 2014 (v2, with operands loaded by the tensor memory accelerator), PR 1105
(v5; 3.7 % of a step), PR 1420, PR 1894; one kernel for the whole MLP loses 41 % of a step, PR 1316.

Why it could win: 1.2 GB per layer are neither written nor read. Why it could lose: the products are
Triton's instead of cuBLAS's, and have only 8 steps of 64 to hide the epilogue behind.
"""

# mypy: disallow-untyped-defs=False

from __future__ import annotations

import types
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from underpar.errors import BenchError
from underpar.lab.operators import TOKENS, Operator, runs_triton
from underpar.model.gpt import GPT
from underpar.recipe import Recipe
from underpar.seams import Visit

# As F.rms_norm of bf16, which computes in fp32.
EPS = torch.finfo(torch.float32).eps


@dataclass(frozen=True)
class Tiles:
    """Sizes of a tile of the output, steps of the inner dimension, and how a program runs."""

    rows: int
    columns: int
    inner: int = 64
    warps: int = 8
    stages: int = 3
    programs: int = 0
    """Programs of a multiprocessor, each taking many tiles and loading the next one while it stores
    one; 0: one program per tile."""


# The fastest of nine on an H200; 128 x 128 in 2 stages takes 13 and 6 % longer. The backward pass
# reads a tile of what is kept: with one program for many tiles it does not fit the shared memory.
FORWARD = Tiles(128, 256, programs=1)
BACKWARD = Tiles(256, 128)

# Variant -> is A stored, is h rounded first, are rows scaled (1: in the loop, 2: in the epilogue).
VARIANTS = {1: (0, 1, 1), 2: (0, 1, 0), 3: (0, 0, 0), 4: (0, 0, 2), 5: (1, 0, 0)}
BEST = 5


def plain(x: Tensor, up: Tensor, down: Tensor, slope: float) -> Tensor:
    """leaky(x up')^2 down' of x (N, dim), already normed; up (hidden, dim), down (dim, hidden)."""
    return F.linear(F.leaky_relu(F.linear(x, up), slope).square(), down)


def fused_mlp(
    x: Tensor, up: Tensor, down: Tensor, slope: float, variant: int = BEST, norm: bool = False
) -> Tensor:
    """As `plain`, with weights in the precision of x; `norm`: x is not normed yet."""
    in_kernels = norm and VARIANTS[variant][2] > 0 and runs_triton(x)
    scale = torch.ones((), device=x.device)
    if in_kernels:
        scale = (x.detach().float().square().mean(-1) + EPS).rsqrt()
    elif norm:
        x = F.rms_norm(x, (x.size(-1),)).to(x.dtype)
    if not runs_triton(x):
        return plain(x, up, down, slope)
    out: Tensor = torch.ops.fusion_study.mlp(x, scale, up, down, slope, variant)[0]
    return out


@triton.jit
def _forward(
    x_desc, up_desc, phi_desc, kept_desc, scale_ptr, num_rows, num_columns, num_inner, slope,
    A: tl.constexpr, ROUND: tl.constexpr, SCALE: tl.constexpr,
    M: tl.constexpr, N: tl.constexpr, K: tl.constexpr, FLAT: tl.constexpr,
):  # fmt: skip
    """A tile: rows of x against rows of `up`. Columns come first: x is read from memory once."""
    across = tl.cdiv(num_columns, N)
    kind = phi_desc.dtype
    num_tiles = tl.cdiv(num_rows, M) * across
    for tile in tl.range(tl.program_id(0), num_tiles, tl.num_programs(0), flatten=FLAT):
        row, column = tile // across * M, tile % across * N
        inside = row + tl.arange(0, M)
        scale = tl.full((M,), 1.0, tl.float32)
        if SCALE > 0:
            scale = tl.load(scale_ptr + inside, inside < num_rows, 0.0)
        h = tl.zeros((M, N), tl.float32)
        for k in range(0, num_inner, K):
            x = x_desc.load([row, k])
            if SCALE == 1:
                x = (x.to(tl.float32) * scale[:, None]).to(kind)
            h = tl.dot(x, up_desc.load([column, k]).T, h, input_precision="ieee")
        if SCALE == 2:
            h = h * scale[:, None]
        if ROUND:
            h = h.to(kind).to(tl.float32)
        bent = tl.where(h > 0, h, slope * h)
        phi_desc.store([row, column], (bent * bent).to(kind))
        if A:
            h = 2.0 * tl.where(h > 0, h, slope * slope * h)
        kept_desc.store([row, column], h.to(kind))


@triton.jit
def _backward(
    grad_desc, down_desc, kept_desc, dh_desc, scale_ptr, num_rows, num_columns, num_inner, slope,
    A: tl.constexpr, ROUND: tl.constexpr, SCALE: tl.constexpr,
    M: tl.constexpr, N: tl.constexpr, K: tl.constexpr, FLAT: tl.constexpr,
):  # fmt: skip
    """A tile: rows of the gradient against columns of `down`, times the stored derivative."""
    across = tl.cdiv(num_columns, N)
    kind = dh_desc.dtype
    num_tiles = tl.cdiv(num_rows, M) * across
    for tile in tl.range(tl.program_id(0), num_tiles, tl.num_programs(0), flatten=FLAT):
        row, column = tile // across * M, tile % across * N
        dphi = tl.zeros((M, N), tl.float32)
        for k in range(0, num_inner, K):
            grad, down = grad_desc.load([row, k]), down_desc.load([k, column])
            dphi = tl.dot(grad, down, dphi, input_precision="ieee")
        if ROUND:
            dphi = dphi.to(kind).to(tl.float32)
        kept = kept_desc.load([row, column]).to(tl.float32)
        if not A:
            kept = 2.0 * tl.where(kept > 0, kept, slope * slope * kept)
        dh = dphi * kept
        if SCALE > 0:
            inside = row + tl.arange(0, M)
            dh = dh * tl.load(scale_ptr + inside, inside < num_rows, 0.0)[:, None]
        dh_desc.store([row, column], dh.to(kind))


def _describe(matrix: Tensor, rows: int, columns: int) -> Any:
    return TensorDescriptor.from_tensor(matrix, [rows, columns])


def _launch(
    kernel: Any, t: Tiles, left: Tensor, right: Any, made: list[Tensor], *rest: Any
) -> None:
    """Run a kernel over all tiles of the first tensor it makes."""
    num_rows, num_columns = made[0].shape
    tiles = triton.cdiv(num_rows, t.rows) * triton.cdiv(num_columns, t.columns)
    programs = tiles
    if t.programs and left.is_cuda:
        processors = torch.cuda.get_device_properties(left.device).multi_processor_count
        programs = min(tiles, t.programs * processors)
    scale, slope, variant = rest
    described = [_describe(each, t.rows, t.columns) for each in made]
    kernel[(programs,)](
        _describe(left, t.rows, t.inner), right, *described, scale,
        num_rows, num_columns, left.size(1), slope,
        *VARIANTS[variant], t.rows, t.columns, t.inner, t.programs > 0,
        num_warps=t.warps, num_stages=t.stages,
    )  # fmt: skip


@torch.library.custom_op("fusion_study::mlp", mutates_args=())
def _mlp(
    x: Tensor, scale: Tensor, up: Tensor, down: Tensor, slope: float, variant: int
) -> tuple[Tensor, Tensor, Tensor]:
    x, up, down = x.contiguous(), up.contiguous(), down.contiguous()
    phi = x.new_empty(len(x), len(up))
    kept = torch.empty_like(phi)
    right = _describe(up, FORWARD.columns, FORWARD.inner)
    _launch(_forward, FORWARD, x, right, [phi, kept], scale, slope, variant)
    return torch.mm(phi, down.T), phi, kept


@_mlp.register_fake
def _(
    x: Tensor, scale: Tensor, up: Tensor, down: Tensor, slope: float, variant: int
) -> tuple[Tensor, Tensor, Tensor]:
    hidden = (len(x), len(up))
    return x.new_empty(len(x), len(down)), x.new_empty(hidden), x.new_empty(hidden)


@torch.library.custom_op("fusion_study::mlp_backward", mutates_args=())
def _mlp_backward(
    grad: Tensor, saved: list[Tensor], slope: float, variant: int
) -> tuple[Tensor, Tensor, Tensor]:
    x, scale, up, down, phi, kept = saved
    grad, x, up, down = grad.contiguous(), x.contiguous(), up.contiguous(), down.contiguous()
    dh = torch.empty_like(kept)
    right = _describe(down, BACKWARD.inner, BACKWARD.columns)
    _launch(_backward, BACKWARD, grad, right, [kept, dh], scale, slope, variant)
    return torch.mm(dh, up), torch.mm(dh.T, x), torch.mm(grad.T, phi)


@_mlp_backward.register_fake
def _(
    grad: Tensor, saved: list[Tensor], slope: float, variant: int
) -> tuple[Tensor, Tensor, Tensor]:
    return tuple(saved[i].new_empty(saved[i].shape) for i in (0, 2, 3))  # type: ignore[return-value]


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    x, scale, up, down, ctx.slope, ctx.variant = inputs
    ctx.save_for_backward(x, scale, up, down, *output[1:])
    ctx.mark_non_differentiable(*output[1:])


def _differentiate(ctx: Any, grad: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
    saved = list(ctx.saved_tensors)
    dx, dup, ddown = torch.ops.fusion_study.mlp_backward(grad, saved, ctx.slope, ctx.variant)
    x, scale = saved[:2]
    if VARIANTS[ctx.variant][2]:
        # The norm's own gradient: the compiler fuses it with its neighbours.
        wide, part = x.float(), scale.square()[:, None]
        along = (dx.float() * wide).mean(-1, keepdim=True)
        dx = (dx.float() - wide * part * along).to(x.dtype)
    return dx, None, dup, ddown, None, None


_mlp.register_autograd(_differentiate, setup_context=_save)


def apply(network: GPT, recipe: Recipe) -> None:
    """Replace the MLPs; the activation must be the square of a leaky or plain ReLU."""
    others = [n for n, lever in network.levers.items() if hasattr(lever, "activate")]
    if network.hooks.adjust or others not in ([], ["leaky_square"]):
        raise BenchError("mlp knows no lever on MLPs but leaky_square; switch the others off")
    for block in network.blocks:
        mlp: Any = block.mlp
        mlp.slope = network.levers["leaky_square"].slope if others else 0.0
        mlp.variant = BEST
        mlp.forward = types.MethodType(_mlp_forward, mlp)


def _mlp_forward(mlp: Any, x: Tensor, visit: Visit) -> Tensor:
    up, down = (linear.weight.to(x.dtype) for linear in (mlp.up, mlp.down))
    y = fused_mlp(x, up, down, mlp.slope, mlp.variant)
    for hook in mlp.hooks.mlp_out:
        y = hook(mlp.layer, y, x)
    return y


def _inputs(device: torch.device, tokens: int) -> tuple[Any, ...]:
    on_gpu = device.type == "cuda"
    dtype, dim, hidden = (torch.bfloat16, 512, 2048) if on_gpu else (torch.float32, 64, 256)
    x = torch.randn(tokens, dim, device=device).to(dtype).requires_grad_()
    up = (torch.randn(hidden, dim, device=device) / dim**0.5).to(dtype).float()
    down = (torch.randn(dim, hidden, device=device) / hidden**0.5).to(dtype).float()
    return x, up.requires_grad_(), down.requires_grad_(), 0.5, dtype


def _normed(x: Tensor, up: Tensor, down: Tensor, slope: float, kind: torch.dtype) -> Tensor:
    normed = F.rms_norm(x, (x.size(-1),)).to(x.dtype)
    return plain(normed, up.to(x.dtype), down.to(x.dtype), slope)


def _rounded(x: Tensor, up: Tensor, down: Tensor, slope: float, kind: torch.dtype) -> Tensor:
    """As `_normed`, with h in the precision `kind`: the square doubles what rounding changes.

    The normed x is rounded too, or h would often be rounded to another neighbour than in a kernel.
    """
    normed = _round(F.rms_norm(x, (x.size(-1),)).to(x.dtype), kind)
    h = _round(F.linear(normed, up.to(x.dtype)), kind)
    return F.linear(F.leaky_relu(h, slope).square(), down.to(x.dtype))


def _round(x: Tensor, kind: torch.dtype) -> Tensor:
    return x + (x.to(kind).to(x.dtype) - x).detach()


def _operator(variant: int) -> Operator:
    stream, wide = 2 * TOKENS * 512, 2 * TOKENS * 2048
    _, rounds, scaling = VARIANTS[variant]

    def fused(x: Tensor, up: Tensor, down: Tensor, slope: float, kind: torch.dtype) -> Tensor:
        return fused_mlp(x, up.to(x.dtype), down.to(x.dtype), slope, variant, norm=True)

    return Operator(
        what=f"norm, up, leaky ReLU squared, down: v{variant}",
        source="PR 1894, PR 1105, PR 1420, PR 2014",
        plain=_rounded if rounds else _normed,
        rival=_normed,
        fused=fused,
        inputs=_inputs,
        flops=3 * 2 * 2 * TOKENS * 512 * 2048,
        # phi and the derivative written, phi read; derivative read, dh written, read twice, phi
        # read. Streams: x, out, grad twice, dx, x; a normed copy of x costs four passes more.
        bytes=8 * wide + (7 if scaling else 11) * stream,
        # h written and read, phi written and read; dphi written, h read, dh written, all read.
        plain_bytes=11 * wide + 11 * stream,
        # In fp64 one tensor of all hidden units takes 1.6 GB.
        check_tokens=3 * 4096 + 37,
    )


OPERATORS = {f"mlp.v{variant}": _operator(variant) for variant in (BEST, 4, 3, 2, 1)}


def check(device: torch.device) -> None:
    """Output and gradients of the variant in use against fp64."""
    OPERATORS[f"mlp.v{BEST}"].check(device)
