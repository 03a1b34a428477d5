"""Head and soft-capped cross-entropy as one registered operator that never stores all logits.

The operator reads the tokens in chunks. Of each chunk it makes

    logits   (R, V)   one product
    nats     (R,)     one pass over the logits, which turns them into their gradients in place
    dx       (R, D)   one product
    dweight  (V, D)   one product; the chunks are summed at the end in fp32

so the forward pass has the gradients already, and the backward pass only scales them. It is

    capped_cross_entropy(soft_cap(x @ weight.T, cap), targets, cap)    (kernels/capped.py)

Sources: gradients in the forward pass, Liger Kernel (arXiv:2410.10989); the fused soft-capped loss
of PR 1787 and PR 2014; loss and gradient in one kernel, modded-nanogpt record 79.

The logits of 98,304 tokens and 8,192 words are 1.6 GB. They are written once and read five times
without the operator; a part of a chunk stays in the L2 cache.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.library import define, impl, register_autograd, register_fake

from underpar.kernels.capped import SAFE_CAP
from underpar.kernels.linear_loss import reference

# Tokens of a chunk: on an H200 4 % faster than half as many. Four times as many gain 1 % more, and
# their logits take 0.5 GB.
ROWS = 8192
# A program holds all logits of a token in registers.
MOST_WORDS = 16_384


def linear_loss(x: Tensor, weight: Tensor, targets: Tensor, cap: float, rows: int = ROWS) -> Tensor:
    """Mean nats of targets (N,) after hidden states x (N, D) under the head's weight (V, D).

    Products run in the precision of x, or in that of autocast.
    """
    assert 0 < cap <= SAFE_CAP and x.is_floating_point()
    kind = x.device.type
    if kind != "meta" and torch.is_autocast_enabled(kind):
        x = x.to(torch.get_autocast_dtype(kind))
    out: Tensor = torch.ops.underpar.linear_loss(x, weight, targets, cap, rows)[0]
    return out


def refuse(device: torch.device, dtype: torch.dtype, num_words: int, cap: float) -> str:
    """Why the operator is not for this device, precision, vocabulary or cap; empty if it is."""
    if device.type != "cuda":
        return "runs on CUDA only"
    if dtype == torch.float16:
        return "gradients of one token among many underflow in fp16"
    if num_words > MOST_WORDS:
        return f"takes at most {MOST_WORDS:,} words, not {num_words:,}"
    if not 0 < cap <= SAFE_CAP:
        return f"takes a cap of the logits above 0 and up to {SAFE_CAP:g}, not {cap:g}"
    return ""


# Defined by a schema, because the first call of torch.library.custom_op imports the compiler.
define(
    "underpar::linear_loss",
    "(Tensor x, Tensor weight, Tensor targets, float cap, int rows) -> (Tensor, Tensor, Tensor)",
)


@impl("underpar::linear_loss", "CompositeExplicitAutograd")
def _linear_loss(
    x: Tensor, weight: Tensor, targets: Tensor, cap: float, rows: int
) -> tuple[Tensor, Tensor, Tensor]:
    with torch.autocast(x.device.type, enabled=False):
        x, narrow = x.contiguous(), weight.to(x.dtype)
        logits = x.new_empty(min(rows, len(x)), len(weight))
        nats = x.new_empty(len(x), dtype=torch.float32)
        dx = torch.empty_like(x)
        # Each chunk has its own sum over tokens, rounded once: no product waits to add to another.
        parts = x.new_empty(-(-len(x) // rows), *weight.shape)
        turn_into_gradients = _backend(x).turn_into_gradients
        for place, start in enumerate(range(0, len(x), rows)):
            chunk = slice(start, start + rows)
            few = logits[: len(x[chunk])]
            torch.mm(x[chunk], narrow.T, out=few)
            turn_into_gradients(few, targets[chunk], nats[chunk], cap, 1.0 / len(x))
            torch.mm(few, narrow, out=dx[chunk])
            torch.mm(few.T, x[chunk], out=parts[place])
        return nats.mean(), dx, parts.sum(0, dtype=torch.float32).to(weight.dtype)


def _backend(x: Tensor) -> Any:
    if x.device.type != "cuda":
        return reference
    from underpar.kernels.linear_loss import tiles

    return tiles


@register_fake("underpar::linear_loss")
def _(
    x: Tensor, weight: Tensor, targets: Tensor, cap: float, rows: int
) -> tuple[Tensor, Tensor, Tensor]:
    return x.new_empty((), dtype=torch.float32), x.new_empty(x.shape), torch.empty_like(weight)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    ctx.save_for_backward(*output[1:])
    ctx.mark_non_differentiable(*output[1:])


def _differentiate(ctx: Any, grad: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
    dx, dweight = ctx.saved_tensors
    return grad * dx, grad * dweight, None, None, None


register_autograd("underpar::linear_loss", _differentiate, setup_context=_save)
