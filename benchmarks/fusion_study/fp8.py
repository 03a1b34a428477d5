"""Products of the forward pass in FP8 (e4m3) against bf16: the operator of the lever `fp8`.

Rounding changes what the network computes, so this is no candidate of `bench step`, which accepts
only the same function for equal recipes. The lever is judged by its loss; its step is timed by
`bench step RECIPE RECIPE --set B=levers.fp8=true`.

Sources: those of `levers/fp8.py`.

Why it could win: FP8 products have twice the peak. Why it could lose: at width 512 products are
bound by memory as much as by arithmetic, and factors are rounded in passes of their own.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from underpar.lab.operators import TOKENS, Operator
from underpar.levers.fp8 import LARGEST, fp8_linear, rounded


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


def fused(
    x: Tensor, weight: Tensor, x_scale: Tensor, weight_scale: Tensor
) -> tuple[Tensor, Tensor]:
    """As `plain`."""
    return fp8_linear(x, weight, x_scale, weight_scale), x.detach().abs().amax()


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
        fused=fused,
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
