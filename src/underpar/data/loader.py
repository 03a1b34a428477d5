"""Training batches as a pure function of (seed, step, micro-batch), and packs for scoring."""

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from underpar.data.order import make_order
from underpar.data.shards import Shard
from underpar.errors import RecipeError

# Entries of `Segments.cu` come in multiples of this, so that a compiler meets few shapes (PR 2014).
CU_BUCKET = 64

_PREFETCH_DEPTH = 2

# Step, micro-batch and, where it is not the plan's, the context.
Place = tuple[int, int] | tuple[int, int, int | None]


@dataclass(frozen=True, eq=False)
class Segments:
    """Where a flat pack of tokens is cut: attention never crosses a cut.

    The last boundaries may repeat N: empty segments, which only round up their number. `max_len`
    bounds the segments and does not follow the longest one, so that it is the same for every
    batch of one size and context, as a kernel compiled for its value wants it.
    """

    cu: torch.Tensor  # (S + 1,) int32, 0 = first cut, N = end
    max_len: int  # tokens, min(largest context, N)
    positions: torch.Tensor  # (N,) int64, position inside the segment
    context: int  # tokens at which longer documents were cut

    def to(self, device: torch.device | str, non_blocking: bool = False) -> "Segments":
        """The same segments on a device."""
        cu, positions = (t.to(device, non_blocking=non_blocking) for t in (self.cu, self.positions))
        return Segments(cu, self.max_len, positions, self.context)

    def pin(self) -> "Segments":
        """The same segments in host memory that a GPU reads by itself."""
        cu, positions = self.cu.pin_memory(), self.positions.pin_memory()
        return Segments(cu, self.max_len, positions, self.context)


@dataclass(frozen=True, eq=False)
class Batch:
    """A flat pack: predict targets[i] from the inputs of its segment up to i."""

    inputs: torch.Tensor  # (N,) int64
    targets: torch.Tensor  # (N,) int64
    segments: Segments

    def to(self, device: torch.device | str, non_blocking: bool = False) -> "Batch":
        """The same batch on a device; a pinned one need not be waited for (`non_blocking`)."""
        inputs, targets = (
            t.to(device, non_blocking=non_blocking) for t in (self.inputs, self.targets)
        )
        return Batch(inputs, targets, self.segments.to(device, non_blocking))

    def pin(self) -> "Batch":
        """The same batch in host memory that a GPU reads by itself."""
        return Batch(self.inputs.pin_memory(), self.targets.pin_memory(), self.segments.pin())


def segments_from_starts(
    starts: npt.NDArray[Any], num_tokens: int, context: int, cu_bucket: int = 0, longest: int = 0
) -> Segments:
    """Cut at 0, at every document start, and every `context` tokens after each of these cuts.

    `starts` is a mask of shape (num_tokens,) or positions. A `cu_bucket` above 1 pads the
    boundaries to a multiple of it. `longest` is the largest context of a schedule, where there is
    one: the bound on segments is then the same throughout. The rules are those of the
    document-packing loader of Parameter Golf PR 2014.
    """
    assert num_tokens > 0 and context > 0 and cu_bucket >= 0
    positions = np.flatnonzero(starts) if starts.dtype == bool else starts
    cuts = np.unique(np.append(positions.astype(np.int64), 0))
    assert 0 <= cuts[0] <= cuts[-1] < num_tokens
    lengths = np.diff(cuts, append=num_tokens)
    num_pieces = -(-lengths // context)
    piece = _count_up(num_pieces)
    bounds = np.append(np.repeat(cuts, num_pieces) + piece * context, num_tokens)
    padding = -len(bounds) % max(1, cu_bucket)
    cu = np.pad(bounds, (0, padding), constant_values=num_tokens)
    return Segments(
        cu=torch.from_numpy(cu.astype(np.int32)),
        max_len=min(max(context, longest), num_tokens),
        positions=torch.from_numpy(_count_up(np.diff(bounds))),
        context=context,
    )


def _count_up(counts: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """0..c-1 for each count c, one after another."""
    ends = np.cumsum(counts)
    return np.arange(ends[-1]) - np.repeat(ends - counts, counts)


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


def pack_documents(
    docs: Sequence[npt.NDArray[Any]], bos_id: int, context: int
) -> tuple[Batch, npt.NDArray[np.int64]]:
    """Pack whole documents for scoring, and name the document that owns each target.

    A document is its tokens with BOS first; its targets are the tokens after the BOS and then a
    BOS, which says that the document ends here.
    """
    assert docs and all(len(doc) and doc[0] == bos_id for doc in docs)
    lengths = np.array([len(doc) for doc in docs])
    inputs = np.concatenate(docs).astype(np.int64)
    # Each document is followed by the BOS of the next one, and the last by one added here.
    targets = np.append(inputs[1:], bos_id)
    starts = np.cumsum(lengths) - lengths
    batch = Batch(
        inputs=torch.from_numpy(inputs),
        targets=torch.from_numpy(targets),
        segments=segments_from_starts(starts, len(inputs), context),
    )
    return batch, np.repeat(np.arange(len(docs)), lengths)
