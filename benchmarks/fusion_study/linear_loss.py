"""Head and soft-capped cross-entropy without logits: `underpar.kernels.linear_loss` as an operator.

Training uses the kernel (`compile/rewrites.py`). This file times it against the compiler's loss.

Why it could win: the logits of 98,304 tokens are 1.6 GB. They are written once and read five times
without the operator; a part of a chunk stays in the L2 cache. Why it could lose: products of a
chunk fill the device less well than one of all tokens, and nothing is fused with the products.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from underpar.kernels.capped import capped_cross_entropy, soft_cap
from underpar.kernels.linear_loss import ROWS, linear_loss
from underpar.lab.operators import TOKENS, Operator


def plain(x: Tensor, weight: Tensor, targets: Tensor, cap: float, rows: int = ROWS) -> Tensor:
    """Mean nats of targets (N,) after hidden states x (N, D) under the head's weight (V, D)."""
    logits = soft_cap(F.linear(x, weight.to(x.dtype)), cap, fused=True)
    return capped_cross_entropy(logits, targets, cap, fused=True)


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
