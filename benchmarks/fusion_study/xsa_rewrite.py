"""XSA without normalized values, in plain torch: y - <y, v> / <v, v> v, then the gate.

The same function as the lever `xsa`, which divides v by its length first. The compiler then has
one tensor less to keep for the backward pass, and no square root.

Source: modded-nanogpt record 86 (0.3 % of a step).

Why it could win: a pass less over the values in each direction. Why it could lose: nothing, if the
compiler has not already found it.
"""

from __future__ import annotations

import types
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from underpar.errors import BenchError
from underpar.lab.operators import TOKENS, Operator
from underpar.model.gpt import GPT
from underpar.recipe import Recipe

# Squared length below which a value is not divided by its length, as in F.normalize.
SMALLEST = 1e-24


def plain(y: Tensor, v: Tensor) -> Tensor:
    """Remove from y (N, H, D) its part along v (N, K, D)."""
    unit = F.normalize(v, dim=-1, eps=SMALLEST**0.5)[:, :, None]
    groups = y.unflatten(1, (v.size(1), -1))
    return (groups - (groups * unit).sum(-1, keepdim=True) * unit).flatten(1, 2)


def rewritten(y: Tensor, v: Tensor) -> Tensor:
    """As `plain`."""
    wide = v[:, :, None].float()
    groups = y.unflatten(1, (v.size(1), -1))
    square = wide.square().sum(-1, keepdim=True).clamp_min(SMALLEST)
    along = (groups * wide).sum(-1, keepdim=True) / square
    return (groups - along * wide).to(y.dtype).flatten(1, 2)


def apply(network: GPT, recipe: Recipe) -> None:
    """Replace the hook of the lever xsa."""
    xsa: Any = dict(network.levers).get("xsa")
    if xsa is None or xsa.strength != 1.0:
        raise BenchError("xsa_rewrite replaces the lever xsa of strength 1; switch it on")
    hooks = network.hooks.attn_out
    levers = [getattr(hook, "__self__", None) for hook in hooks]
    hooks[levers.index(xsa)] = types.MethodType(_attn_out, xsa)


def _attn_out(xsa: Any, layer: int, y: Tensor, x: Tensor, v: Tensor) -> Tensor:
    return rewritten(y, v) if layer in xsa.layers else y


def _inputs(device: torch.device, tokens: int) -> tuple[Tensor, ...]:
    on_gpu = device.type == "cuda"
    dtype = torch.bfloat16 if on_gpu else torch.float32
    shapes = ((8, 64), (4, 64)) if on_gpu else ((4, 16), (2, 16))
    tensors = (torch.randn(tokens, *shape, device=device).to(dtype) for shape in shapes)
    return tuple(tensor.requires_grad_() for tensor in tensors)


OPERATORS = {
    "xsa_rewrite": Operator(
        what="XSA in plain torch, without normalized values",
        source="modded-nanogpt record 86",
        plain=plain,
        fused=rewritten,
        inputs=_inputs,
        flops=0.0,
        bytes=13 * 2 * TOKENS * 256,
        # Unit values are written, read, kept for the backward pass and read there.
        plain_bytes=17 * 2 * TOKENS * 256,
    )
}


def check(device: torch.device) -> None:
    """Output and gradients against fp64."""
    OPERATORS["xsa_rewrite"].check(device)
