"""Before the clock starts: compile every graph of the schedule on made-up tokens.

No step is taken, so weights, moments and the order of the data are those of a run without warm-up.
(The published scripts keep the momentum of their warm-up.)
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
from torch import Tensor

from underpar.compile.regions import CompiledRun
from underpar.compile.startup import end_warm_up
from underpar.core.runtime import Runtime
from underpar.data.batch import Batch
from underpar.data.loader import Loader, MicroBatch
from underpar.data.made_up import made_up_batch
from underpar.model.network import Eager, Network, products
from underpar.schema import TrainPart
from underpar.train.step import LossLever, mean_loss

# Values of progress at which the order of visits is looked up.
MOMENTS = tuple(i / 20 for i in range(21))


def warm_up(
    model: Network,
    loader: Loader,
    part: TrainPart,
    runtime: Runtime,
    run: Eager,
    levers: Sequence[LossLever] = (),
) -> int:
    """One forward and backward pass per shape and order of visits; returns how many."""
    shapes = shapes_of(loader.plan, part)
    if isinstance(run, CompiledRun):
        # A graph almost never depends on the context, so one context per number of tokens is
        # enough.
        sizes = list({micro.tokens: micro for micro in shapes}.values())
        with run.trace_only():
            for batch in _passes(model, loader, part.order, sizes):
                _lose(model, batch, runtime, run, levers)
    num_graphs = 0
    for batch in _passes(model, loader, part.order, shapes):
        _lose(model, batch, runtime, run, levers).backward()
        num_graphs += 1
    model.zero_grad(set_to_none=True)
    runtime.synchronize()
    end_warm_up()
    return num_graphs


def _passes(
    model: Network, loader: Loader, order: str, shapes: Sequence[MicroBatch]
) -> Iterator[Batch]:
    """A batch per shape and order of visits; the model is set to that order."""
    rng = np.random.default_rng(0)
    seen = set()
    for p in MOMENTS:
        model.set_progress(p)
        if model.variant in seen:
            continue
        seen.add(model.variant)
        for micro in shapes:
            yield made_up_batch(micro, model.spec.vocab_size, rng, order, loader.longest)


def _lose(
    model: Network, batch: Batch, runtime: Runtime, run: Eager, levers: Sequence[LossLever]
) -> Tensor:
    with products(runtime.device, runtime.dtype):
        return mean_loss(model, batch.to(runtime.device), run, levers)


def shapes_of(plan: Sequence[MicroBatch], part: TrainPart) -> list[MicroBatch]:
    """Every size and context that the schedule will use, once each."""
    stages = [int(context) for context, _ in part.context_stages]
    shapes = {(m.tokens, c) for m in plan for c in stages or [m.context]}
    return [MicroBatch(tokens, context) for tokens, context in sorted(shapes)]
