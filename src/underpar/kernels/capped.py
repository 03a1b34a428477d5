"""Bounded logits: the soft cap, and a cross-entropy that needs no maximum because of it."""

from __future__ import annotations

from contextvars import ContextVar

import torch
import torch.nn.functional as F
from torch import Tensor

# Set where a graph is made and torch does not know (`compile/tracer.py`): in one thread alone, as
# kernels that another one tries out would take torch's own flag for theirs.
recorded = ContextVar("recorded", default=False)

# Were a learned cap to double, a sum of thousands of exp would still fit into fp32.
SAFE_CAP = 36.0


def soft_cap(logits: Tensor, cap: float | Tensor, scale: float | Tensor | None = None) -> Tensor:
    """cap tanh(logits / cap) in fp32 or more, as in Gemma 2 (arXiv:2408.00118); `scale` is 2 / cap.

    Compiled, for training, with a sigmoid: a third of a tanh's instructions on a GPU, and off by no
    more than 1e-7 of the cap.
    """
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    scale = 2.0 / cap if scale is None else scale
    if torch.compiler.is_compiling() or recorded.get():
        return cap * (2.0 * torch.sigmoid(logits * scale) - 1.0)
    return cap * torch.tanh(logits * (scale / 2.0))


def capped_cross_entropy(logits: Tensor, targets: Tensor, cap: float) -> Tensor:
    """Mean nats of targets (N,) under capped logits (N, V): one pass, no running maximum.

    The bound makes exp safe (Parameter Golf PR 1787 fuses the same by hand).
    """
    if cap > SAFE_CAP:
        return F.cross_entropy(logits, targets)
    # A mask, where a gather would leave its gradient, as large as the logits, in memory.
    is_target = torch.arange(logits.size(1), device=logits.device) == targets[:, None]
    chosen = torch.where(is_target, logits, 0.0).sum(-1)
    return (logits.exp().sum(-1).log() - chosen).mean()
