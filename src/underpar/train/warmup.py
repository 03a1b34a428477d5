"""Before the clock starts: compile every graph of the schedule on made-up tokens.

Nothing else is touched: no step is taken, so weights, moments and the order of the data are those
of a run that began without it (the published scripts keep the momentum of their warm-up).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from underpar.data.loader import Loader, MicroBatch
from underpar.data.made_up import made_up_batch
from underpar.model.gpt import GPT
from underpar.parts import TrainPart
from underpar.runtime import Runtime
from underpar.train.step import LossOf, precision

# Moments of training at which the order of visits is looked up.
MOMENTS = tuple(i / 20 for i in range(21))


def warm_up(model: GPT, loader: Loader, part: TrainPart, runtime: Runtime, loss_of: LossOf) -> int:
    """One forward and backward pass for each graph; how many there were."""
    rng = np.random.default_rng(0)
    shapes = shapes_of(loader.plan, part)
    seen = set()
    for p in MOMENTS:
        model.set_progress(p)
        if model.plan in seen:
            continue
        seen.add(model.plan)
        for micro in shapes:
            batch = made_up_batch(micro, model.spec.vocab_size, rng, part.order, loader.longest)
            with precision(runtime):
                loss = loss_of(model, batch.to(runtime.device))
            loss.backward()
    model.zero_grad(set_to_none=True)
    runtime.synchronize()
    return len(seen) * len(shapes)


def shapes_of(plan: Sequence[MicroBatch], part: TrainPart) -> list[MicroBatch]:
    """Every size and context that the schedule will use, once each."""
    stages = [int(context) for context, _ in part.context_stages]
    found = {(m.tokens, c) for m in plan for c in stages or [m.context]}
    return [MicroBatch(tokens, context) for tokens, context in sorted(found)]
