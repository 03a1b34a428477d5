"""Head and soft-capped cross-entropy as one operator that never stores all logits.

The operator reads the tokens in chunks. Of each chunk it makes

    logits   (R, V)   one cuBLAS product
    nats     (R,)     one Triton pass, which also turns the logits into their gradients in place
    dx       (R, D)   one cuBLAS product
    dweight  (V, D)   one cuBLAS product; the chunks are summed at the end in fp32

so the forward pass has the gradients already, and the backward pass only scales them.

Sources: gradients in the forward pass, Liger Kernel (arXiv:2410.10989); the fused soft-capped loss
of PR 1787 and PR 2014; loss and gradient in one kernel, modded-nanogpt record 79. The cap bounds
the logits, so exp needs no maximum.

Why it could win: the logits of 98,304 tokens are 1.6 GB. They are written once and read five times
without the operator; a part of a chunk stays in the L2 cache. Why it could lose: products of a
chunk fill the device less well than one of all tokens, and nothing is fused with the products.
"""

# mypy: disallow-untyped-defs=False

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from underpar.errors import BenchError
from underpar.kernels.capped import SAFE_CAP, capped_cross_entropy, soft_cap
from underpar.lab.operators import TOKENS, Operator, runs_triton
from underpar.model.gpt import GPT
from underpar.recipe import Recipe
from underpar.seams import Stream

# Tokens of a chunk: on an H200 4 % faster than half as many. Four times as many gain 1 % more, and
# their logits take 0.5 GB.
ROWS = 8192


def plain(x: Tensor, weight: Tensor, targets: Tensor, cap: float, rows: int = ROWS) -> Tensor:
    """Mean nats of targets (N,) after hidden states x (N, D) under the head's weight (V, D)."""
    logits = soft_cap(F.linear(x, weight.to(x.dtype)), cap, fused=True)
    return capped_cross_entropy(logits, targets, cap, fused=True)


@triton.jit
def _loss_in_place(
    logits_ptr, targets_ptr, nats_ptr, cap, share, V: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """One program per token: its whole row is in registers, read once and written once."""
    token = tl.program_id(0)
    column = tl.arange(0, BLOCK)
    row_ptr = logits_ptr + token.to(tl.int64) * V
    target = tl.load(targets_ptr + token).to(tl.int32)
    # Read before the sum, at which all threads wait: afterwards the row is overwritten.
    at_target = tl.load(row_ptr + target).to(tl.float32)
    raw = tl.load(row_ptr + column, column < V, 0.0).to(tl.float32)
    # tanh(y) as 2 sigmoid(2 y) - 1, as in kernels/capped.py.
    bent = 2.0 * tl.sigmoid(raw * (2.0 / cap)) - 1.0
    powers = tl.exp(cap * bent)
    if V < BLOCK:
        powers = tl.where(column < V, powers, 0.0)
    total = tl.sum(powers, 0)
    chosen = cap * (2.0 * tl.sigmoid(at_target * (2.0 / cap)) - 1.0)
    tl.store(nats_ptr + token, tl.log(total) - chosen)
    gradient = powers * (share / total) - tl.where(column == target, share, 0.0)
    gradient *= 1.0 - bent * bent
    tl.store(row_ptr + column, gradient.to(logits_ptr.dtype.element_ty), column < V)


def _turn_into_gradients(
    logits: Tensor, targets: Tensor, nats: Tensor, cap: float, share: float
) -> None:
    """Write the nats of each token, and `share` times their gradients in place of the logits."""
    if runs_triton(logits):
        block = triton.next_power_of_2(logits.size(1))
        sizes = (cap, share, logits.size(1), block)
        # 512 threads with 16 logits each, if there are 8,192: two programs fit a multiprocessor.
        _loss_in_place[(len(logits),)](logits, targets, nats, *sizes, num_warps=16)
        return
    bent = torch.tanh(logits / cap)
    nats.copy_(F.cross_entropy(cap * bent, targets, reduction="none"))
    is_target = F.one_hot(targets, logits.size(1))
    logits.copy_(((cap * bent).softmax(1) - is_target) * (1.0 - bent.square()) * share)


@torch.library.custom_op("fusion_study::linear_loss", mutates_args=())
def _linear_loss(
    x: Tensor, weight: Tensor, targets: Tensor, cap: float, rows: int
) -> tuple[Tensor, Tensor, Tensor]:
    x, narrow = x.contiguous(), weight.to(x.dtype)
    logits = x.new_empty(min(rows, len(x)), len(weight))
    nats = x.new_empty(len(x), dtype=torch.float32)
    dx = torch.empty_like(x)
    # Each chunk has its own sum over tokens, rounded once: no product waits to add to another.
    parts = x.new_empty(-(-len(x) // rows), *weight.shape)
    for place, start in enumerate(range(0, len(x), rows)):
        chunk = slice(start, start + rows)
        few = logits[: len(x[chunk])]
        torch.mm(x[chunk], narrow.T, out=few)
        _turn_into_gradients(few, targets[chunk], nats[chunk], cap, 1.0 / len(x))
        torch.mm(few, narrow, out=dx[chunk])
        torch.mm(few.T, x[chunk], out=parts[place])
    return nats.mean(), dx, parts.sum(0, dtype=torch.float32).to(weight.dtype)


@_linear_loss.register_fake
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


_linear_loss.register_autograd(_differentiate, setup_context=_save)


def linear_loss(x: Tensor, weight: Tensor, targets: Tensor, cap: float, rows: int = ROWS) -> Tensor:
    """Mean nats, as `plain`; products run in the precision of x."""
    assert 0 < cap <= SAFE_CAP and x.is_floating_point()
    out: Tensor = torch.ops.fusion_study.linear_loss(x, weight, targets, cap, rows)[0]
    return out


def apply(network: GPT, recipe: Recipe) -> None:
    """Refuse a network whose head is more than a product and a constant cap."""
    lever = network.hooks.cap
    caps = [] if lever is None else list(lever.__self__.parameters())  # type: ignore[attr-defined]
    if any(cap.requires_grad or float(cap) != network.spec.softcap for cap in caps):
        raise BenchError("linear_loss takes one constant cap; set train = false in the lever")
    if network.hooks.adjust:
        raise BenchError("linear_loss does not know levers that adjust logits; switch them off")


def loss(
    network: GPT, stream: Stream, targets: Tensor, fused: bool, weighers: Sequence[Any] = ()
) -> Tensor:
    """The training loss in place of `train.step.stream_loss`."""
    if weighers:
        raise BenchError("linear_loss does not weigh tokens; switch entropy_weight off")
    hidden = network.finish(replace(stream))
    return linear_loss(hidden, network.embedding.weight, targets, network.spec.softcap)


def _inputs(device: torch.device, tokens: int) -> tuple[Any, ...]:
    vocab_size, dim, rows = (8192, 512, ROWS) if device.type == "cuda" else (50, 16, 10)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    x = torch.randn(tokens, dim, device=device).to(dtype).requires_grad_()
    # bf16 holds the weight, so that rounding it is no error of the operator. The logits are of the
    # size of trained ones.
    weight = (0.1 * torch.randn(vocab_size, dim, device=device)).to(dtype).float()
    targets = torch.randint(vocab_size, (tokens,), device=device)
    return x, weight.requires_grad_(), targets, 30.0, rows


OPERATORS = {
    "linear_loss": Operator(
        what="head and capped cross-entropy, 8,192 words",
        source="Liger Kernel (arXiv:2410.10989), PR 1787, PR 2014, modded-nanogpt record 79",
        plain=plain,
        fused=linear_loss,
        inputs=_inputs,
        flops=3 * 2 * TOKENS * 512 * 8192,
        # Logits in chunks stay in the cache; hidden states, their gradients and weights do not.
        bytes=4 * 2 * TOKENS * 512,
        # Logits: written, read; read and written as gradients; read twice.
        plain_bytes=6 * 2 * TOKENS * 8192,
        # In fp64 all logits take 6 GB.
        check_tokens=3 * ROWS + 37,
    )
}


def check(device: torch.device) -> None:
    """Loss and gradients against fp64: on a GPU three chunks and a part of one."""
    for operator in OPERATORS.values():
        operator.check(device)
