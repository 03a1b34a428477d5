"""The gradients of one global batch: this rank's micro-batches, then the sum over ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from underpar.compile.rewrites import LINEAR_LOSS
from underpar.core.dist import sum_over_ranks
from underpar.core.runtime import Runtime
from underpar.data.batch import Batch
from underpar.data.loader import Loader, MicroBatch, join, make_step
from underpar.data.shards import Shard
from underpar.kernels.capped import capped_cross_entropy
from underpar.kernels.linear_loss import linear_loss
from underpar.model.kv_cache import PackedCache
from underpar.model.network import EAGER, Eager, Network, products
from underpar.schema import TrainPart
from underpar.seams import MoreTargets, Penalty, Stream, Weigher


def step_of(part: TrainPart, world_size: int = 1) -> list[MicroBatch]:
    """The micro-batches of one global step; with stages, cut at the longest.

    A rank alone joins small micro-batches of whole sequences, up to `micro_batch_tokens` tokens.
    """
    stages = [int(context) for context, _ in part.context_stages]
    contexts = part.contexts or (max(stages, default=part.context),)
    sizes = part.micro_sizes or (part.micro_batch_tokens,)
    plan = make_step(part.num_micro_batches, sizes, contexts)
    is_whole = part.order == "sequences" and not any(size % max(contexts) for size in sizes)
    return join(plan, part.micro_batch_tokens) if world_size == 1 and is_whole else plan


def open_loader(shard: Shard, part: TrainPart, world_size: int = 1) -> Loader:
    """The batches of a run."""
    plan = step_of(part, world_size)
    return Loader(shard, plan, part.seed, part.order, piece_tokens=part.piece_tokens)


# Levers that change the loss.
LossLever = Weigher | MoreTargets


def stream_loss(
    network: Network,
    stream: Stream,
    targets: Tensor,
    fused: bool,
    levers: Sequence[LossLever] = (),
) -> Tensor:
    """Mean nats per target (N,), from the stream after the last block.

    `fused`: with the formulas made for compilers (`kernels/capped.py`).
    """
    # A copy, because `finish` changes the stream.
    logits = network.head(network.finish(replace(stream)), fused)
    loss = _token_loss(network, logits, stream, targets, fused, levers)
    return _with_auxiliary(network, stream, loss)


def linear_stream_loss(
    network: Network,
    stream: Stream,
    targets: Tensor,
    fused: bool,
    levers: Sequence[LossLever] = (),
) -> Tensor:
    """The same without logits, where the rewrite `linear_loss` fits (`compile/rewrites.py`)."""
    assert not levers
    hidden, weight = network.finish(replace(stream)), network.get_parameter(network.head_name)
    loss = linear_loss(hidden, weight, targets, network.spec.softcap)
    return _with_auxiliary(network, stream, loss)


def loss_for(run: Eager) -> Callable[..., Tensor]:
    """The function that makes the loss of the stream in passes of a runner."""
    return linear_stream_loss if LINEAR_LOSS in run.rewrites else stream_loss


def _with_auxiliary(network: Network, stream: Stream, loss: Tensor) -> Tensor:
    extra = network.auxiliary_loss(stream)
    # Logs, the guard and forecasts read the same loss with and without what a network adds.
    return loss if extra is None else loss + extra - extra.detach()


def _token_loss(
    network: Network,
    logits: Tensor,
    stream: Stream,
    targets: Tensor,
    fused: bool,
    levers: Sequence[LossLever],
) -> Tensor:
    """Mean nats per target; with `levers`, its gradient is that of their weighted mean."""
    if not levers:
        return capped_cross_entropy(logits, targets, network.spec.softcap, fused)

    def nats_of(targets: Tensor) -> Tensor:
        return capped_cross_entropy(logits, targets, network.spec.softcap, fused, mean=False)

    nats = nats_of(targets)
    weights = torch.ones_like(nats)
    for lever in levers:
        if hasattr(lever, "weigh"):
            weights = weights * lever.weigh(logits.detach(), targets)
    total, weight_sum = (weights * nats).sum(), weights.sum()
    for lever in levers:
        if hasattr(lever, "more_targets"):
            for others, share in lever.more_targets(targets, stream.cache.positions):
                total = total + (weights * share * nats_of(others)).sum()
                weight_sum = weight_sum + (weights * share).sum()
    weighted = total / weight_sum
    # Logs, the guard and forecasts read the same loss with and without levers.
    return nats.detach().mean() + weighted - weighted.detach()


def mean_loss(
    network: Network,
    batch: Batch,
    run: Eager = EAGER,
    levers: Sequence[LossLever] = (),
    loss_of: Callable[..., Tensor] | None = None,
) -> Tensor:
    """Mean nats per target of one micro-batch. A compiled `run` compiles every part.

    With `levers` the gradient is that of their weighted mean; the value is still the plain mean.
    `loss_of` makes the loss of the stream after the last block, in place of the runner's own.
    """
    stream = network.run_blocks(batch.inputs, PackedCache(batch.segments), run)
    network.watch(stream)
    rest = (batch.targets, run.fused, tuple(levers))
    loss: Tensor = run.end(loss_of or loss_for(run), network, stream, *rest)
    return loss


def sum_penalties(
    penalties: Sequence[Penalty], model: nn.Module, step: int, p: float
) -> Tensor | None:
    """The sum of what `penalties` add to the loss after `step` steps; None: nothing."""
    terms = (lever.penalty(model, step, p) for lever in penalties)
    values = [value for value in terms if value is not None]
    return torch.stack(values).sum() if values else None


def accumulate(
    network: Network,
    batches: Iterator[Batch],
    weights: Sequence[float],
    runtime: Runtime,
    run: Eager = EAGER,
    penalty: Callable[[], Tensor | None] | None = None,
    levers: Sequence[LossLever] = (),
    loss_of: Callable[..., Tensor] | None = None,
) -> Tensor:
    """Leave the global batch's gradients on every rank; returns its mean loss in nats per token.

    `weights` are those of this rank's micro-batches. The gradients include those of `penalty` and
    of the `levers`; the loss that is returned does not.
    """
    total = torch.zeros((), device=runtime.device)
    for weight in weights:
        batch = next(batches).to(runtime.device, non_blocking=True)
        with products(runtime.device, runtime.dtype):
            loss = mean_loss(network, batch, run, levers, loss_of) * weight
        loss.backward()
        total += loss.detach()
    # Only one rank adds the penalty, so the sum over ranks counts it once: the rank that has the
    # step's last micro-batch.
    if penalty is not None and runtime.rank == runtime.world - 1:
        extra = penalty()
        if extra is not None:
            extra.backward()
    grads = [p.grad for p in network.parameters() if p.grad is not None]
    sum_over_ranks([*grads, total], runtime)
    return total
