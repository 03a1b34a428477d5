"""What a step of lanes asks of the model: log-probabilities, and the loss of what they leave open.

Plain, or compiled in regions as training is (`compile/regions.py`), for one width of a step or with
one set of graphs for all: the number of lanes is fixed, the number of tokens a lane may differ.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor

from underpar.compile.regions import DynamoBranches, DynamoRun, DynamoVisits, mark_sized
from underpar.model.gpt import GPT
from underpar.seams import KVCache, Stream


@dataclass(frozen=True, eq=False)
class Given:
    """What a step of L lanes, C tokens each, is given: n targets among N = L * C inputs."""

    inputs: Tensor  # (N,), lane by lane
    counts: Tensor  # (L,) inputs of a lane that are real
    places: Tensor | None
    """(n,) rows that the targets are predicted from; None: all of them, n = N."""
    wanted: Tensor
    """(n, 1 + K) targets and further tokens whose probability is asked; -1 for none."""
    weights: Tensor
    """(n,) of each target in the loss."""

    @property
    def width(self) -> int:
        """C."""
        return len(self.inputs) // len(self.counts)


# Log-probabilities (n, 1 + K), and the loss: a sum over targets.
Answer = tuple[Tensor, Tensor]
Pricing = Callable[[GPT, Given, KVCache], Answer]


def price_rows(model: GPT, given: Given, cache: KVCache) -> Answer:
    """The answer, computed step by step."""
    hidden = model.hidden(given.inputs, cache)
    return _answer(model, hidden, given.places, given.wanted, given.weights)


class CompiledPricing:
    """The same, compiled; `vary`: steps have several widths, as those that read windows again do.

    These are long, and whole visits are fused; others are short, and compile in half the time.
    """

    def __init__(self, vary: bool) -> None:
        self.regions: DynamoRun = DynamoVisits() if vary else DynamoBranches()
        self._vary = vary

    def __call__(self, model: GPT, given: Given, cache: KVCache) -> Answer:
        """The answer."""
        # A compiler takes sizes of one for constants: those of a lane, and of all but its last.
        if self._vary and min(len(given.inputs), len(given.wanted)) < 3 * len(given.counts):
            return price_rows(model, given, cache)
        rest = (given.places, given.wanted, given.weights)
        if self._vary:
            mark_sized(*rest)
        stream = model.run_blocks(given.inputs, cache, self.regions)
        answer: Answer = self.regions.end(_finish, model, stream, *rest)
        return answer


def _finish(
    model: GPT, stream: Stream, places: Tensor | None, wanted: Tensor, weights: Tensor
) -> Answer:
    return _answer(model, model.finish(stream), places, wanted, weights, fused=True)


def _answer(
    model: GPT,
    hidden: Tensor,
    places: Tensor | None,
    wanted: Tensor,
    weights: Tensor,
    fused: bool = False,
) -> Answer:
    if places is not None:
        # Not by plain indexing, which sorts in its backward pass.
        hidden = hidden.index_select(0, places)
    # Sums over the vocabulary in fp32, whatever products run in.
    logits = model.head(hidden, fused).float()
    log_p = F.log_softmax(logits, dim=-1).gather(1, wanted.clamp(min=0))
    return log_p, -(log_p[:, 0] * weights).sum()
