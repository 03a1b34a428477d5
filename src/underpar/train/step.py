"""The gradients of one global batch: this rank's micro-batches, then the sum over ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from underpar.core.dist import sum_over_ranks
from underpar.core.runtime import Runtime
from underpar.data.batch import Batch
from underpar.data.loader import MicroBatch, make_step
from underpar.model.kv_cache import PackedCache
from underpar.schema import TrainPart
from underpar.seams import Penalty


def step_of(part: TrainPart) -> list[MicroBatch]:
    """The micro-batches of one global step; with stages, cut at the longest."""
    stages = [int(context) for context, _ in part.context_stages]
    contexts = part.contexts or (max(stages, default=part.context),)
    return make_step(
        part.num_micro_batches, part.micro_sizes or (part.micro_batch_tokens,), contexts
    )


# Model and micro-batch -> mean nats a target.
LossOf = Callable[[nn.Module, Batch], Tensor]


def mean_loss(model: nn.Module, batch: Batch) -> Tensor:
    """Mean nats a target of one micro-batch."""
    logits = model(batch.inputs, PackedCache(batch.segments))
    return F.cross_entropy(logits.float(), batch.targets)


def precision(runtime: Runtime) -> AbstractContextManager[None]:
    """bf16 products on a GPU, fp32 elsewhere."""
    if runtime.dtype == torch.float32:
        return nullcontext()
    return torch.autocast(runtime.device.type, dtype=runtime.dtype)


def sum_penalties(
    penalties: Sequence[Penalty], model: nn.Module, step: int, p: float
) -> Tensor | None:
    """What all `penalties` add to the loss after `step` steps, at p of the budget."""
    found = (lever.penalty(model, step, p) for lever in penalties)
    values = [value for value in found if value is not None]
    return torch.stack(values).sum() if values else None


def accumulate(
    model: nn.Module,
    batches: Iterator[Batch],
    num_micro_batches: int,
    runtime: Runtime,
    loss_of: LossOf = mean_loss,
    penalty: Callable[[], Tensor | None] | None = None,
) -> Tensor:
    """Leave the global batch's gradients on every rank; returns its mean loss in nats a token.

    The gradients are those of the loss and of what `penalty` gives; the loss returned is without.
    """
    total = torch.zeros((), device=runtime.device)
    for _ in range(num_micro_batches // runtime.world):
        batch = next(batches).to(runtime.device, non_blocking=True)
        with precision(runtime):
            loss = loss_of(model, batch) / num_micro_batches
        loss.backward()
        total += loss.detach()
    # The last rank has the step's last micro-batch: the sum over ranks counts the penalty once.
    if penalty is not None and runtime.rank == runtime.world - 1:
        extra = penalty()
        if extra is not None:
            extra.backward()
    grads = [p.grad for p in model.parameters() if p.grad is not None]
    sum_over_ranks([*grads, total], runtime)
    return total
