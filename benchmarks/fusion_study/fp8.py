"""Products of the forward pass in FP8 (e4m3), with scales from earlier steps.

    y = (x / sx) (w / sw)' sx sw      both factors rounded to e4m3, sums in fp32, y in bf16
    dx = g w, dw = g' x               in bf16, as if nothing had been rounded

A scale maps the largest magnitude of the last steps to 448, the largest number of e4m3. So rounding
needs no pass of its own over x before it (delayed scaling); what has grown since is clamped.

Rounding changes what the network computes, so this is no candidate of `bench step`, which accepts
only the same function. It would have to be a lever, judged by its loss.

Sources: delayed scaling, Transformer Engine and arXiv:2209.05433; FP8 head of modded-nanogpt record
20, FP8 MLP of records 84 and 89 (1.6 % of a step at width 768).

Why it could win: FP8 products have twice the peak. Why it could lose: at width 512 products are
bound by memory as much as by arithmetic, and factors are rounded in passes of their own.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from underpar.lab.operators import TOKENS, Operator

E4M3 = torch.float8_e4m3fn
LARGEST = torch.finfo(E4M3).max


class DelayedScale:
    """The scale of a tensor from its largest magnitudes in the last steps."""

    def __init__(self, steps: int = 16, device: torch.device | None = None) -> None:
        self._history = torch.zeros(steps, device=device)
        self._next = 0

    def scale(self) -> Tensor:
        """The scale for this step; 1 before the first."""
        largest = self._history.amax()
        return torch.where(largest > 0, largest / LARGEST, 1.0)

    def record(self, largest: Tensor) -> None:
        """Note the largest magnitude of this step, for the next ones."""
        self._history[self._next % len(self._history)] = largest.detach().float()
        self._next += 1


def rounded(x: Tensor, scale: Tensor) -> Tensor:
    """x / scale as e4m3; what is too large becomes the largest number."""
    return (x.detach().float() / scale).clamp(-LARGEST, LARGEST).to(E4M3)


def plain(x: Tensor, weight: Tensor, x_scale: Tensor, weight_scale: Tensor) -> tuple[Tensor, Any]:
    """The product with emulated rounding, in the precision of x; and the magnitude of x."""
    weight = weight.to(x.dtype)
    x8, weight8 = (
        rounded(t, s).to(x.dtype) * s.to(x.dtype) for t, s in ((x, x_scale), (weight, weight_scale))
    )
    exact = F.linear(x, weight)
    # The value of the one, the gradient of the other.
    return exact + (F.linear(x8, weight8) - exact).detach(), x.detach().abs().amax()


def bf16(x: Tensor, weight: Tensor, x_scale: Tensor, weight_scale: Tensor) -> Tensor:
    """The product that training runs today."""
    return F.linear(x, weight.to(x.dtype))


def fp8_linear(
    x: Tensor, weight: Tensor, x_scale: Tensor, weight_scale: Tensor
) -> tuple[Tensor, Tensor]:
    """As `plain`. Rounding is left to the compiler, which fuses it with what makes x."""
    x8, weight8 = rounded(x, x_scale), rounded(weight, weight_scale)
    y = torch.ops.fusion_study.fp8_linear(
        x, weight.to(x.dtype), x8, weight8, x_scale.float(), weight_scale.float()
    )
    return y, x.detach().abs().amax()


@torch.library.custom_op("fusion_study::fp8_linear", mutates_args=())
def _fp8_linear(
    x: Tensor, weight: Tensor, x8: Tensor, weight8: Tensor, x_scale: Tensor, weight_scale: Tensor
) -> Tensor:
    if not x.is_cuda:
        # Products of e4m3 numbers are exact in fp32.
        return (x8.float() @ weight8.float().T * (x_scale * weight_scale)).to(x.dtype)
    return torch._scaled_mm(
        x8.contiguous(),
        weight8.contiguous().T,
        scale_a=x_scale,
        scale_b=weight_scale,
        out_dtype=x.dtype,
        use_fast_accum=True,
    )


@_fp8_linear.register_fake
def _(
    x: Tensor, weight: Tensor, x8: Tensor, weight8: Tensor, x_scale: Tensor, weight_scale: Tensor
) -> Tensor:
    return x.new_empty(len(x), len(weight))


def _save(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs[:2])


def _differentiate(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    x, weight = ctx.saved_tensors
    return grad @ weight, grad.T @ x, None, None, None, None


_fp8_linear.register_autograd(_differentiate, setup_context=_save)


def _inputs_of(inner: int, outer: int) -> Any:
    def inputs(device: torch.device, tokens: int) -> tuple[Tensor, ...]:
        on_gpu = device.type == "cuda"
        dtype, (rows, columns) = (
            (torch.bfloat16, (outer, inner)) if on_gpu else (torch.float32, (24, 16))
        )
        x = torch.randn(tokens, columns, device=device).to(dtype)
        weight = (torch.randn(rows, columns, device=device) / columns**0.5).to(dtype).float()
        # Of the step before, when the largest were a little smaller: some are clamped.
        scales = [0.9 * t.float().abs().amax() / LARGEST for t in (x, weight)]
        return x.requires_grad_(), weight.requires_grad_(), *scales

    return inputs


def _operator(what: str, inner: int, outer: int) -> Operator:
    left, right = 2 * TOKENS * inner, 2 * TOKENS * outer
    return Operator(
        what=f"{what}: forward in e4m3; plain: bf16",
        source="modded-nanogpt records 20, 84, 89; arXiv:2209.05433",
        plain=plain,
        rival=bf16,
        fused=fp8_linear,
        inputs=_inputs_of(inner, outer),
        # FP8 products count half.
        flops=2.5 * 2 * TOKENS * inner * outer,
        # x read, rounded, read rounded; y; then g twice, x, dx.
        bytes=2 * left + 3 * right + 2 * left,
        plain_bytes=left + 3 * right + 2 * left,
        # In fp64 the logits of all tokens take 6 GB.
        check_tokens=3 * 4096 + 37,
    )


OPERATORS = {
    "fp8.head": _operator("head", 512, 8192),
    "fp8.up": _operator("MLP up", 512, 2048),
    "fp8.down": _operator("MLP down", 2048, 512),
}


def check(device: torch.device) -> None:
    """Products and gradients against emulated rounding in fp64."""
    for operator in OPERATORS.values():
        operator.check(device)
