"""Training batches as a pure function of (seed, step, micro-batch), and packs for scoring."""

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from underpar.data.shards import Shard
from underpar.errors import DataError, RecipeError
from underpar.seams import BOS_ID

_PREFETCH_DEPTH = 2


@dataclass(frozen=True, eq=False)
class Segments:
    """Where a flat pack of tokens is cut: attention never crosses a cut."""

    cu: torch.Tensor  # (S + 1,) int32, 0 = first cut, N = end
    max_len: int  # tokens of the longest segment
    positions: torch.Tensor  # (N,) int64, position inside the segment

    def to(self, device: torch.device | str) -> "Segments":
        """The same segments on a device."""
        return Segments(self.cu.to(device), self.max_len, self.positions.to(device))


@dataclass(frozen=True, eq=False)
class Batch:
    """A flat pack: predict targets[i] from the inputs of its segment up to i."""

    inputs: torch.Tensor  # (N,) int64
    targets: torch.Tensor  # (N,) int64
    segments: Segments

    def to(self, device: torch.device | str) -> "Batch":
        """The same batch on a device."""
        return Batch(self.inputs.to(device), self.targets.to(device), self.segments.to(device))


def segments_from_starts(starts: npt.NDArray[Any], num_tokens: int, context: int) -> Segments:
    """Cut at 0, at every document start, and every `context` tokens after each of these cuts.

    `starts` is a mask of shape (num_tokens,) or positions. The rule is that of the
    document-packing loader of Parameter Golf PR 2014.
    """
    assert num_tokens > 0 and context > 0
    positions = np.flatnonzero(starts) if starts.dtype == bool else starts
    cuts = np.unique(np.append(positions.astype(np.int64), 0))
    assert 0 <= cuts[0] <= cuts[-1] < num_tokens
    lengths = np.diff(cuts, append=num_tokens)
    num_pieces = -(-lengths // context)
    piece = _count_up(num_pieces)
    bounds = np.append(np.repeat(cuts, num_pieces) + piece * context, num_tokens)
    sizes = np.diff(bounds)
    return Segments(
        cu=torch.from_numpy(bounds.astype(np.int32)),
        max_len=int(sizes.max()),
        positions=torch.from_numpy(_count_up(sizes)),
    )


def _count_up(counts: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """0..c-1 for each count c, one after another."""
    ends = np.cumsum(counts)
    return np.arange(ends[-1]) - np.repeat(ends - counts, counts)


class Loader:
    """Batches over an endless stream: each epoch is every document once, in an order of its own.

    Micro-batch m of step s covers tokens [(s * M + m) * n, + n + 1) of the stream, with M
    micro-batches of n tokens a step over all ranks. Nothing is remembered between calls, so
    ranks only choose which m they ask for, and resuming is asking for the next step.
    """

    def __init__(
        self,
        shard: Shard,
        micro_batch_tokens: int,
        num_micro_batches: int,
        context: int,
        seed: int,
    ) -> None:
        if not shard.num_tokens:
            raise DataError("the training shard is empty, build the data folder again")
        sizes = {
            "micro_batch_tokens": micro_batch_tokens,
            "num_micro_batches": num_micro_batches,
            "context": context,
        }
        for name, value in sizes.items():
            if value < 1:
                raise RecipeError(f"{name} is {value}, expected at least 1")
        if seed < 0:
            raise RecipeError(f"seed is {seed}, expected 0 or more")
        self.shard = shard
        self.micro_batch_tokens = micro_batch_tokens
        self.num_micro_batches = num_micro_batches
        self.context = context
        self.seed = seed
        self._doc_lengths = np.diff(shard.starts, append=shard.num_tokens)
        self._epoch = self._shuffle(0)

    def batch(self, step: int, micro: int) -> Batch:
        """Micro-batch `micro` of the global step `step`."""
        assert step >= 0 and 0 <= micro < self.num_micro_batches
        num_tokens = self.micro_batch_tokens
        begin = (step * self.num_micro_batches + micro) * num_tokens
        span = torch.from_numpy(self._span(begin, begin + num_tokens + 1))
        inputs = span[:-1]
        is_start = inputs.numpy() == BOS_ID
        return Batch(
            inputs=inputs,
            targets=span[1:],
            segments=segments_from_starts(is_start, num_tokens, self.context),
        )

    def num_epochs(self, step: int) -> float:
        """Passes over the shard made before `step`."""
        step_tokens = self.micro_batch_tokens * self.num_micro_batches
        return step * step_tokens / self.shard.num_tokens

    def _span(self, begin: int, end: int) -> npt.NDArray[np.int64]:
        parts: list[npt.NDArray[Any]] = []
        while begin < end:
            epoch, offset = divmod(begin, self.shard.num_tokens)
            part = self._epoch_part(epoch, offset, offset + end - begin)
            parts += part
            begin += sum(map(len, part))
        return np.concatenate(parts).astype(np.int64)

    def _epoch_part(self, epoch: int, begin: int, end: int) -> list[npt.NDArray[Any]]:
        """Document slices that cover [begin, end) of an epoch, as far as it goes."""
        # Read once, since a prefetching thread may replace the entry at any time.
        known = self._epoch
        if known[0] != epoch:
            known = self._epoch = self._shuffle(epoch)
        _, order, ends = known
        parts = []
        index = int(np.searchsorted(ends, begin, side="right"))
        while begin < end and index < len(order):
            doc = self.shard.doc(int(order[index]))
            skipped = begin - (int(ends[index]) - len(doc))
            parts.append(doc[skipped : skipped + end - begin])
            begin += len(parts[-1])
            index += 1
        return parts

    def _shuffle(self, epoch: int) -> tuple[int, npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        # Raw PCG64 output is fixed across numpy versions; Generator.permutation is not.
        keys = np.random.PCG64([self.seed, epoch]).random_raw(self.shard.num_documents)
        order = np.argsort(keys, kind="stable")
        return epoch, order, np.cumsum(self._doc_lengths[order])


def micros_of_rank(num_micro_batches: int, rank: int, world_size: int) -> range:
    """The micro-batches of every step that one of `world_size` ranks works on."""
    if num_micro_batches % world_size:
        raise RecipeError(
            f"{num_micro_batches} micro-batches a step cannot be shared by {world_size} ranks, "
            "use a multiple of the number of ranks"
        )
    assert 0 <= rank < world_size
    return range(rank, num_micro_batches, world_size)


def prefetch(loader: Loader, steps_and_micros: Iterable[tuple[int, int]]) -> Iterator[Batch]:
    """Batches in the order asked for, prepared two ahead on a background thread."""
    pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="underpar-loader")
    ahead: deque[Future[Batch]] = deque()
    try:
        for step, micro in steps_and_micros:
            ahead.append(pool.submit(loader.batch, step, micro))
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
