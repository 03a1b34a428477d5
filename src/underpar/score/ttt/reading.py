"""What lanes read in a step, and where earlier tokens come from.

`KeptLanes` reads every token once: keys and values of earlier chunks stay as they were computed, as
in a decoder's cache. A lane whose cache is full reads the second half of its window again, as the
first half of a new window. `FreshLanes` reads the whole window again for every chunk, with the
adapters of the moment, as PR 1530 and PR 2014 do: up to a hundred times as many tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from underpar.data.batch import Segments
from underpar.model.chunk_cache import ChunkCache
from underpar.model.kv_cache import PackedCache
from underpar.recipe import ModelSpec
from underpar.score.ttt.schedule import Chunk

# Document -> its tokens, with the BOS that ends it.
TextOf = Callable[[int], np.ndarray]
# Priced targets of a document -> the size of its next chunk.
SizeOf = Callable[[int], int]
# Chunk -> the window that is read to price it: (start in the document, length, offset of its first
# target).
WindowOf = Callable[[Chunk], tuple[int, int, int]]

# Padding after a window is cut into attention segments of this many tokens.
PADDING_SEGMENT = 256


@dataclass(frozen=True, eq=False)
class HostInputs:
    """A step's inputs as arrays on the host: L lanes of C tokens, c targets per lane."""

    tokens: np.ndarray  # (L, C)
    counts: np.ndarray  # (L,) tokens per lane that are real
    rows: np.ndarray | None
    """(L, c) rows, out of L * C, that the targets are predicted from; None: all, c = C."""
    targets: np.ndarray  # (L, c); after a lane's last target the values mean nothing


@dataclass(frozen=True)
class StepShapes:
    """The shapes that steps may have: widths C, rising, and the number of targets per lane c."""

    widths: tuple[int, ...]
    num_targets: int

    def width_for(self, needed: int) -> int:
        """The smallest width that is wide enough."""
        return next(width for width in self.widths if width >= needed)


@dataclass(frozen=True, eq=False)
class Reread:
    """Tokens that some lanes read again, without a price."""

    lanes: list[int]
    counts: list[int]
    tokens: Tensor  # (len(lanes) * C,), padded after `counts`
    cache: ChunkCache


class KeptLanes:
    """Every token is read once; lanes are rows of a cache."""

    def __init__(
        self,
        spec: ModelSpec,
        text_of: TextOf,
        size_of: SizeOf,
        num_lanes: int,
        device: torch.device,
    ) -> None:
        self._context = spec.context
        self._text_of = text_of
        self.size_of = size_of
        self._device = device
        self._cache = ChunkCache(spec, num_lanes, device)
        # Tokens in each lane's window.
        self._held = [0] * num_lanes
        # The most tokens that any lane has held.
        self._farthest = 1

    def restart(self, chunks: Sequence[Chunk]) -> None:
        """Empty the lanes in which a document begins."""
        begins = np.zeros(len(self._held), dtype=np.bool_)
        for chunk in chunks:
            if chunk.first == 0:
                begins[chunk.lane] = True
                self._held[chunk.lane] = 0
        if begins.any():
            self._cache.reset(upload(begins, self._device))

    def reread(self, chunks: Sequence[Chunk]) -> Reread | None:
        """What lanes without room for a full chunk must read first; None: nothing.

        That is half a window, or less if half a window leaves no room. A short last chunk needs
        room for a full one too, because a decoder does not know in advance that it is short.
        """
        rooms = [self._context - self.size_of(chunk.first) for chunk in chunks]
        pairs = [
            (chunk, min(room, self._context // 2))
            for chunk, room in zip(chunks, rooms, strict=True)
            if self._held[chunk.lane] > room
        ]
        if not pairs:
            return None
        counts = [count for _, count in pairs]
        width = max(1, *counts)
        tokens = np.zeros((len(pairs), width), dtype=np.int64)
        for row, (chunk, count) in zip(tokens, pairs, strict=True):
            row[:count] = self._text_of(chunk.document)[chunk.first - count : chunk.first]
        cache = self._cache.empty_like(len(pairs))
        cache.begin(upload(np.array(counts), self._device), width, width)
        lanes = [chunk.lane for chunk, _ in pairs]
        return Reread(lanes, counts, upload(tokens.ravel(), self._device), cache)

    def commit_reread(self, reread: Reread) -> None:
        """Put what was read again into its lanes."""
        reread.cache.commit()
        self._cache.put(reread.lanes, reread.cache)
        for lane, count in zip(reread.lanes, reread.counts, strict=True):
            self._held[lane] = count

    def host_inputs(
        self, chunks: Sequence[Chunk], num_lanes: int, shapes: StepShapes | None = None
    ) -> HostInputs:
        """The next tokens of each lane, padded to the largest chunk or to the next of `shapes`."""
        assert num_lanes == len(self._held)
        width = max(chunk.count for chunk in chunks)
        width = shapes.width_for(width) if shapes else width
        tokens = np.zeros((num_lanes, width), dtype=np.int64)
        targets = np.zeros_like(tokens)
        counts = np.zeros(num_lanes, dtype=np.int64)
        for chunk in chunks:
            lane, count = chunk.lane, chunk.count
            text = self._text_of(chunk.document)[chunk.first : chunk.first + count + 1]
            tokens[lane, :count], targets[lane, :count] = text[:-1], text[1:]
            counts[lane] = count
            self._held[lane] += count
        self._farthest = max(self._farthest, *(self._held[chunk.lane] for chunk in chunks))
        return HostInputs(tokens, counts, None, targets)

    def empty_inputs(self, num_lanes: int, width: int) -> HostInputs:
        """A step in which no lane reads; after it there is room for every other step."""
        self._farthest = self._context
        zeros = np.zeros((num_lanes, width), dtype=np.int64)
        return HostInputs(zeros, np.zeros(num_lanes, dtype=np.int64), None, zeros)

    def cache(self, counts: Tensor, width: int) -> ChunkCache:
        """The cache, ready for a step of `counts` (L,) tokens."""
        self._cache.begin(counts, width, self._farthest)
        return self._cache

    def commit(self) -> None:
        """Keep the keys and values that the step computed."""
        self._cache.commit()

    def keep(self, lanes: Sequence[int]) -> None:
        """Keep only these lanes, in this order."""
        self._cache.keep(torch.tensor(lanes, device=self._device))
        self._held = [self._held[lane] for lane in lanes]

    def state(self) -> dict[str, Any]:
        """What lanes have read, between two steps."""
        return {"held": self._held, "past": self._cache.state()}

    def load(self, state: Mapping[str, Any]) -> None:
        """Restore a state, with the lanes that it has."""
        self._held = state["held"]
        self._farthest = max([self._farthest, *self._held])
        self._cache.load(state["past"])


class FreshLanes:
    """The whole window is read again for every chunk (PR 1530)."""

    def __init__(
        self, spec: ModelSpec, text_of: TextOf, window_of: WindowOf, one_bound: bool = False
    ) -> None:
        """`one_bound`: attention of rows is bounded by the context, whatever their width, so that
        one graph serves all widths."""
        self._context = spec.context
        self._text_of = text_of
        self._window_of = window_of
        self._one_bound = one_bound

    def host_inputs(
        self, chunks: Sequence[Chunk], num_lanes: int, shapes: StepShapes | None = None
    ) -> HostInputs:
        """The window of each chunk, padded to the longest or to the next of `shapes`."""
        windows = [self._window_of(chunk) for chunk in chunks]
        width = max(length for _, length, _ in windows)
        width = shapes.width_for(width) if shapes else width
        num_targets = shapes.num_targets if shapes else max(chunk.count for chunk in chunks)
        tokens = np.zeros((num_lanes, width), dtype=np.int64)
        counts = np.zeros(num_lanes, dtype=np.int64)
        rows = np.zeros((num_lanes, num_targets), dtype=np.int64)
        targets = np.zeros_like(rows)
        for chunk, (start, length, offset) in zip(chunks, windows, strict=True):
            lane, count = chunk.lane, chunk.count
            text = self._text_of(chunk.document)[start : start + length + 1]
            tokens[lane, :length] = text[:-1]
            counts[lane] = length
            positions = np.arange(offset, length)
            rows[lane, :count] = lane * width + positions
            targets[lane, :count] = text[positions + 1]
        return HostInputs(tokens, counts, rows, targets)

    def empty_inputs(self, num_lanes: int, width: int) -> HostInputs:
        """Rows of `width` tokens that belong to no document."""
        zeros = np.zeros((num_lanes, width), dtype=np.int64)
        return HostInputs(zeros, np.zeros(num_lanes, dtype=np.int64), zeros, zeros)

    def cache(self, counts: Tensor, width: int) -> RowsCache:
        """Rows of `width` tokens, of which `counts` (L,) are real, without earlier tokens."""
        return RowsCache(self.segments(counts, width), len(counts))

    def segments(self, counts: Tensor, width: int) -> Segments:
        """The attention segments of such rows; their number is the same for every width.

        A row is cut at its end, and its padding in short segments, so that padding costs little.
        """
        num_tokens, device = len(counts) * width, counts.device
        step = PADDING_SEGMENT
        ends = torch.arange(step, self._context + step, step, device=device)
        rows = torch.arange(len(counts), device=device)[:, None] * width
        is_cut = (ends >= counts[:, None]) & (ends < width + step)
        cuts = torch.where(is_cut, rows + ends.clamp(max=width), num_tokens)
        first = torch.zeros(1, dtype=torch.int64, device=device)
        cu = torch.cat((first, cuts.flatten().sort().values)).int()  # (S + 1,)
        positions = torch.arange(width, device=device).repeat(len(counts))
        longest = self._context if self._one_bound else width
        return Segments(cu, longest, positions, self._context)

    def commit(self) -> None:
        """Nothing is kept."""

    def state(self) -> dict[str, Any]:
        """Nothing is kept."""
        return {}

    def load(self, state: Mapping[str, Any]) -> None:
        """Nothing to restore."""


class RowsCache(PackedCache):
    """A pack of rows of one length, in which nothing looks back beyond the start of its row."""

    def __init__(self, segments: Segments, num_rows: int) -> None:
        super().__init__(segments)
        self._num_rows = num_rows

    def previous(self, name: str, x: Tensor) -> Tensor:
        """x (N, ...) one token earlier in its row; zeros before the first."""
        rows = x.unflatten(0, (self._num_rows, -1))
        return torch.cat((torch.zeros_like(rows[:, :1]), rows[:, :-1]), dim=1).flatten(0, 1)


Reading = KeptLanes | FreshLanes


def upload(values: np.ndarray, device: torch.device) -> Tensor:
    """The values on the device; the host does not wait for a GPU to have them."""
    tensor = torch.from_numpy(values)
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor
