"""Training batches as a pure function of (seed, step, micro-batch)."""

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import accumulate

import torch

from underpar.data.batch import Batch, segments_from_starts
from underpar.data.order import make_order
from underpar.data.shards import Shard
from underpar.errors import RecipeError

# Entries of `Segments.cu` come in multiples of this, so that a compiler meets few shapes (PR 2014).
CU_BUCKET = 64

_PREFETCH_DEPTH = 2

# Step, micro-batch and, where it is not the plan's, the context.
Place = tuple[int, int] | tuple[int, int, int | None]


@dataclass(frozen=True)
class MicroBatch:
    """The size of one micro-batch and the length at which it is cut, in tokens."""

    tokens: int
    context: int

    def __post_init__(self) -> None:
        for name in ("tokens", "context"):
            value = getattr(self, name)
            if value < 1:
                raise RecipeError(f"{name} of a micro-batch is {value}, expected at least 1")


def make_step(
    num_micro_batches: int, sizes: Sequence[int], contexts: Sequence[int]
) -> list[MicroBatch]:
    """A step of micro-batches that take sizes, in tokens, and contexts in turn.

    With as many contexts as ranks each rank keeps to one: mixed sequence lengths over ranks
    (PR 1212, PR 1219).
    """
    return [
        MicroBatch(sizes[m % len(sizes)], contexts[m % len(contexts)])
        for m in range(num_micro_batches)
    ]


class Loader:
    """Batches over an endless stream of documents or of sequences, in the order of a seed.

    `plan` names the micro-batches of every step, over all ranks. Micro-batch m of step s starts at
    token s * (tokens of the plan) + (tokens of the plan before m) of the stream. Nothing is
    remembered between calls, so ranks only choose which m they ask for, and resuming is asking for
    the next step. Sequences are as long as the largest context of the plan; a shorter context cuts
    them further, a longer one changes nothing.
    """

    def __init__(
        self,
        shard: Shard,
        plan: Sequence[MicroBatch],
        seed: int,
        order: str = "documents",
        cu_bucket: int = CU_BUCKET,
    ) -> None:
        if not plan:
            raise RecipeError("a step has 0 micro-batches, expected at least 1")
        self.plan = tuple(plan)
        self.step_tokens = sum(micro.tokens for micro in plan)
        self.longest = max(micro.context for micro in plan)
        self.cu_bucket = cu_bucket
        self._offsets = list(accumulate((micro.tokens for micro in plan), initial=0))
        self._order = make_order(order, shard, seed, self.longest)

    @property
    def num_micro_batches(self) -> int:
        """Micro-batches of a step, over all ranks."""
        return len(self.plan)

    def batch(self, step: int, micro: int, context: int | None = None) -> Batch:
        """Micro-batch `micro` of the global step `step`, cut at `context` or as planned."""
        assert step >= 0 and 0 <= micro < len(self.plan)
        own = self.plan[micro]
        begin = step * self.step_tokens + self._offsets[micro]
        inputs, targets, is_start = self._order.span(begin, begin + own.tokens)
        cut = own.context if context is None else context
        return Batch(
            inputs=torch.from_numpy(inputs),
            targets=torch.from_numpy(targets),
            segments=segments_from_starts(is_start, own.tokens, cut, self.cu_bucket, self.longest),
        )

    def num_epochs(self, step: int) -> float:
        """Passes over the shard made before `step`."""
        return step * self.step_tokens / self._order.epoch_tokens


def micros_of_rank(num_micro_batches: int, rank: int, world_size: int) -> range:
    """The micro-batches of every step that one of `world_size` ranks works on."""
    if num_micro_batches % world_size:
        raise RecipeError(
            f"{num_micro_batches} micro-batches a step cannot be shared by {world_size} ranks, "
            "use a multiple of the number of ranks"
        )
    assert 0 <= rank < world_size
    return range(rank, num_micro_batches, world_size)


def prefetch(loader: Loader, places: Iterable[Place], pin: bool = False) -> Iterator[Batch]:
    """Batches in the order asked for, prepared (and pinned) two ahead on a background thread."""

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
