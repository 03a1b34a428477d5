"""The gradients of one global batch: this rank's micro-batches, then the sum over ranks."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from underpar.data.loader import Batch
from underpar.model.past import PackedPast
from underpar.runtime import Runtime
from underpar.train.dist import sum_over_ranks


def mean_loss(model: nn.Module, batch: Batch) -> Tensor:
    """Mean nats a target of one micro-batch."""
    past = PackedPast(batch.segments.cu)
    logits = model(batch.inputs, batch.segments.positions, past)
    return F.cross_entropy(logits.float(), batch.targets)


def precision(runtime: Runtime) -> AbstractContextManager[None]:
    """bf16 products on a GPU, fp32 elsewhere."""
    if runtime.device.type != "cuda":
        return nullcontext()
    return torch.autocast("cuda", dtype=torch.bfloat16)


def accumulate(
    model: nn.Module, batches: Iterator[Batch], num_micro_batches: int, runtime: Runtime
) -> Tensor:
    """Leave the global batch's gradients on every rank; returns its mean loss in nats a token."""
    total = torch.zeros((), device=runtime.device)
    for _ in range(num_micro_batches // runtime.world):
        batch = next(batches).to(runtime.device, non_blocking=True)
        with precision(runtime):
            loss = mean_loss(model, batch) / num_micro_batches
        loss.backward()
        total += loss.detach()
    grads = [p.grad for p in model.parameters() if p.grad is not None]
    sum_over_ranks([*grads, total], runtime)
    return total
