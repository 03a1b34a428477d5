"""Training batches as a pure function of (seed, step, micro-batch)."""

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from itertools import accumulate

import torch

from underpar.data.batch import Batch, segments_from_starts
from underpar.data.order import make_order
from underpar.data.shards import Shard
from underpar.errors import RecipeError

# The length of `Segments.cu` is a multiple of this, so that a compiler meets few shapes (PR 2014).
CU_BUCKET = 64

_PREFETCH_DEPTH = 2

# Step and micro-batch; a third element replaces the context of the plan.
Place = tuple[int, int] | tuple[int, int, int | None]


@dataclass(frozen=True)
class MicroBatch:
    """Size of one micro-batch and the context at which its documents are cut, both in tokens.

    `share`: how many micro-batches of the recipe it stands for; its loss weighs as much as theirs.
    """

    tokens: int
    context: int
    share: int = 1

    def __post_init__(self) -> None:
        for name in ("tokens", "context", "share"):
            value = getattr(self, name)
            if value < 1:
                raise RecipeError(f"{name} of a micro-batch is {value}, expected at least 1")


def make_step(
    num_micro_batches: int, sizes: Sequence[int], contexts: Sequence[int]
) -> list[MicroBatch]:
    """The micro-batches of a step; they take `sizes` (tokens) and `contexts` in turn.

    With as many contexts as ranks, each rank always has the same context: mixed sequence lengths
    over ranks (PR 1212, PR 1219).
    """
    return [
        MicroBatch(sizes[m % len(sizes)], contexts[m % len(contexts)])
        for m in range(num_micro_batches)
    ]


def join(plan: Sequence[MicroBatch], most: int) -> list[MicroBatch]:
    """Neighbours of the same size and context as one micro-batch of at most `most` tokens.

    Small micro-batches leave a GPU idle. The loss is the same where a micro-batch holds whole
    sequences, because then nothing else is cut at its end.
    """
    joined: list[MicroBatch] = []
    for micro in plan:
        if joined:
            last = joined[-1]
            is_like = (last.tokens, last.context) == (micro.tokens * last.share, micro.context)
            if is_like and last.tokens + micro.tokens <= most:
                micro = replace(last, tokens=last.tokens + micro.tokens, share=last.share + 1)
                joined.pop()
        joined.append(micro)
    return joined


def weights_of(plan: Sequence[MicroBatch]) -> list[float]:
    """The weight of each micro-batch in the loss of a step."""
    total = sum(micro.share for micro in plan)
    return [micro.share / total for micro in plan]


class Loader:
    """Batches from an endless shuffled stream of documents or of sequences.

    `plan` lists the micro-batches of every step, over all ranks. Micro-batch m of step s starts at
    token s * (tokens of the plan) + (tokens of the plan before m) of the stream. The loader keeps
    no state between calls. So a rank only chooses which m it asks for, and a resumed run asks for
    the next step. A sequence is as long as the largest context of the plan; a shorter context cuts
    the sequence further, a longer context changes nothing. Documents of more than `piece_tokens`
    (0: none) are cut into pieces that are shuffled.
    """

    def __init__(
        self,
        shard: Shard,
        plan: Sequence[MicroBatch],
        seed: int,
        order: str = "documents",
        cu_bucket: int = CU_BUCKET,
        piece_tokens: int = 0,
    ) -> None:
        if not plan:
            raise RecipeError("a step has 0 micro-batches, expected at least 1")
        self.plan = tuple(plan)
        self.step_tokens = sum(micro.tokens for micro in plan)
        self.longest = max(micro.context for micro in plan)
        self.cu_bucket = cu_bucket
        self._offsets = list(accumulate((micro.tokens for micro in plan), initial=0))
        self._order = make_order(order, shard, seed, self.longest, piece_tokens)

    @property
    def num_micro_batches(self) -> int:
        """Micro-batches of a step, over all ranks."""
        return len(self.plan)

    def batch(self, step: int, micro: int, context: int | None = None) -> Batch:
        """Micro-batch `micro` of the global step `step`, cut at `context` or as planned."""
        assert step >= 0 and 0 <= micro < len(self.plan)
        planned = self.plan[micro]
        begin = step * self.step_tokens + self._offsets[micro]
        inputs, targets, is_start = self._order.span(begin, begin + planned.tokens)
        cut = planned.context if context is None else context
        return Batch(
            inputs=torch.from_numpy(inputs),
            targets=torch.from_numpy(targets),
            segments=segments_from_starts(
                is_start, planned.tokens, cut, self.cu_bucket, self.longest
            ),
        )

    def num_epochs(self, step: int) -> float:
        """Passes over the shard before `step`."""
        return step * self.step_tokens / self._order.epoch_tokens


def micros_of_rank(num_micro_batches: int, rank: int, world_size: int) -> range:
    """The micro-batches of every step that one of `world_size` ranks works on."""
    if num_micro_batches % world_size:
        raise RecipeError(
            f"{num_micro_batches} micro-batches per step cannot be shared by {world_size} ranks, "
            "use a multiple of the number of ranks"
        )
    assert 0 <= rank < world_size
    return range(rank, num_micro_batches, world_size)


def prefetch(loader: Loader, places: Iterable[Place], pin: bool = False) -> Iterator[Batch]:
    """The batches at `places`, in order; a background thread prepares (and pins) two ahead."""

    def make(place: Place) -> Batch:
        batch = loader.batch(*place)
        return batch.pin() if pin else batch

    pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="underpar-loader")
    ahead: deque[Future[Batch]] = deque()
    try:
        for place in places:
            ahead.append(pool.submit(make, place))
            if len(ahead) > _PREFETCH_DEPTH:
                yield ahead.popleft().result()
        while ahead:
            yield ahead.popleft().result()
    finally:
        pool.shutdown(cancel_futures=True)
