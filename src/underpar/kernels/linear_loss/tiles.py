"""The loss of a chunk of logits in Triton: one program per token reads and writes its row once.

The whole row is in registers. The cap bounds the logits, so exp needs no maximum.
"""

# mypy: disallow-untyped-defs=False

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _loss_in_place(
    logits_ptr, targets_ptr, nats_ptr, cap, share, V: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
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


def turn_into_gradients(
    logits: Tensor, targets: Tensor, nats: Tensor, cap: float, share: float
) -> None:
    """As in `reference.py`."""
    block = triton.next_power_of_2(logits.size(1))
    sizes = (cap, share, logits.size(1), block)
    # 512 threads with 16 logits each for 8,192 words: two programs fit a multiprocessor.
    warps = min(16, max(1, block // 512))
    _loss_in_place[(len(logits),)](logits, targets, nats, *sizes, num_warps=warps)
