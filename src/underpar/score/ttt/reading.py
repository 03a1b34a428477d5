"""What lanes read in a step: rows of tokens, one a lane, and where earlier tokens come from.

`KeptLanes` reads every token once: keys and values of earlier chunks stay as they were computed, as
in a decoder's cache. A lane whose cache is full reads the second half of it again, as the first
half of a new window. `FreshLanes` reads the whole window again for every chunk, with the adapters
of the moment, as PR 1530 and PR 2014 do: up to a hundred times as many tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from underpar.data.batch import Segments
from underpar.model.kv_cache import ChunkCache, PackedCache
from underpar.recipe import ModelSpec
from underpar.score.ttt.schedule import Turn

# Document -> its tokens, with the BOS that ends it.
TextOf = Callable[[int], np.ndarray]
# Targets of a document that are priced -> the size of its next chunk.
SizeOf = Callable[[int], int]
# Turn -> (start in the document, length, offset of its first target): what is read to price it.
WindowOf = Callable[[Turn], tuple[int, int, int]]

# Tokens behind the end of a window that attention reads together.
PIECE = 256


@dataclass(frozen=True, eq=False)
class Rows:
    """A step's input, L lanes of C tokens, and where its targets are."""

    inputs: np.ndarray  # (L, C)
    counts: np.ndarray  # (L,) inputs of a lane that are real
    places: np.ndarray | None
    """(L, c) rows, of all L * C, that the targets are predicted from; None: all, c = C."""
    targets: np.ndarray  # (L, c); behind a lane's last target anything


@dataclass(frozen=True)
class Sizes:
    """The shapes that steps may have: widths C, rising, and the number of targets a lane c."""

    widths: tuple[int, ...]
    num_targets: int

    def width_for(self, needed: int) -> int:
        """The smallest width that is wide enough."""
        return next(width for width in self.widths if width >= needed)


@dataclass(frozen=True, eq=False)
class Again:
    """Tokens that some lanes read again, without being priced."""

    lanes: list[int]
    counts: list[int]
    inputs: Tensor  # (len(lanes) * C,), padded behind `counts`
    cache: ChunkCache


class KeptLanes:
    """Every token is read once; `lanes` are rows of a cache."""

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
        self._size_of = size_of
        self._device = device
        self._past = ChunkCache(spec, num_lanes, device)
        # Tokens that each lane's window holds.
        self._held = [0] * num_lanes
        # The most that any lane has held.
        self._farthest = 1

    def restart(self, turns: Sequence[Turn]) -> None:
        """Empty the lanes in which a document begins."""
        begins = np.zeros(len(self._held), dtype=np.bool_)
        for turn in turns:
            if turn.first == 0:
                begins[turn.lane] = True
                self._held[turn.lane] = 0
        if begins.any():
            self._past.reset(upload(begins, self._device))

    def again(self, turns: Sequence[Turn]) -> Again | None:
        """What lanes without room for a chunk must read first: half a window, if it leaves room.

        A decoder does not know that a chunk will be short, so there must be room for a whole one.
        """
        rooms = [self._context - self._size_of(turn.first) for turn in turns]
        pairs = [
            (turn, min(room, self._context // 2))
            for turn, room in zip(turns, rooms, strict=True)
            if self._held[turn.lane] > room
        ]
        if not pairs:
            return None
        counts = [count for _, count in pairs]
        width = max(1, *counts)
        inputs = np.zeros((len(pairs), width), dtype=np.int64)
        for row, (turn, count) in zip(inputs, pairs, strict=True):
            row[:count] = self._text_of(turn.document)[turn.first - count : turn.first]
        cache = self._past.empty_like(len(pairs))
        cache.begin(upload(np.array(counts), self._device), width, width)
        lanes = [turn.lane for turn, _ in pairs]
        return Again(lanes, counts, upload(inputs.ravel(), self._device), cache)

    def was_read_again(self, again: Again) -> None:
        """Put the lanes that were read again in place."""
        again.cache.commit()
        self._past.put(again.lanes, again.cache)
        for lane, count in zip(again.lanes, again.counts, strict=True):
            self._held[lane] = count

    def rows(self, turns: Sequence[Turn], num_lanes: int, sizes: Sizes | None = None) -> Rows:
        """The next tokens of each lane, padded to the largest turn or to the next of `sizes`."""
        assert num_lanes == len(self._held)
        width = max(turn.count for turn in turns)
        width = sizes.width_for(width) if sizes else width
        inputs = np.zeros((num_lanes, width), dtype=np.int64)
        targets = np.zeros_like(inputs)
        counts = np.zeros(num_lanes, dtype=np.int64)
        for turn in turns:
            text = self._text_of(turn.document)[turn.first : turn.first + turn.count + 1]
            inputs[turn.lane, : turn.count], targets[turn.lane, : turn.count] = text[:-1], text[1:]
            counts[turn.lane] = turn.count
            self._held[turn.lane] += turn.count
        self._farthest = max(self._farthest, *(self._held[turn.lane] for turn in turns))
        return Rows(inputs, counts, None, targets)

    def rehearsal(self, num_lanes: int, width: int) -> Rows:
        """A step in which no lane reads anything, after which there is room for every other."""
        self._farthest = self._context
        empty = np.zeros((num_lanes, width), dtype=np.int64)
        return Rows(empty, np.zeros(num_lanes, dtype=np.int64), None, empty)

    def cache(self, counts: Tensor, width: int) -> ChunkCache:
        """What is read before and in a step of `counts` (L,) tokens, on the device."""
        self._past.begin(counts, width, self._farthest)
        return self._past

    def commit(self) -> None:
        """Keep what the step computed, on the device."""
        self._past.commit()

    def keep(self, lanes: Sequence[int]) -> None:
        """Go on with these lanes only, in this order."""
        self._past.keep(torch.tensor(lanes, device=self._device))
        self._held = [self._held[lane] for lane in lanes]

    def state(self) -> dict[str, Any]:
        """What lanes have read, between two steps."""
        return {"held": self._held, "past": self._past.state()}

    def load(self, state: Mapping[str, Any]) -> None:
        """Go on from a state, with the lanes that it has."""
        self._held = state["held"]
        self._farthest = max([self._farthest, *self._held])
        self._past.load(state["past"])


class FreshLanes:
    """The whole window is read again for every chunk (PR 1530)."""

    def __init__(
        self, spec: ModelSpec, text_of: TextOf, window_of: WindowOf, one_bound: bool = False
    ) -> None:
        """`one_bound`: rows are bounded by the context, whatever their width, for one graph."""
        self._context = spec.context
        self._text_of = text_of
        self._window_of = window_of
        self._one_bound = one_bound

    def rows(self, turns: Sequence[Turn], num_lanes: int, sizes: Sizes | None = None) -> Rows:
        """The window of each turn, padded to the longest or to the next of `sizes`."""
        windows = [self._window_of(turn) for turn in turns]
        width = max(length for _, length, _ in windows)
        width = sizes.width_for(width) if sizes else width
        num_targets = sizes.num_targets if sizes else max(turn.count for turn in turns)
        inputs = np.zeros((num_lanes, width), dtype=np.int64)
        counts = np.zeros(num_lanes, dtype=np.int64)
        places = np.zeros((num_lanes, num_targets), dtype=np.int64)
        targets = np.zeros_like(places)
        for turn, (start, length, offset) in zip(turns, windows, strict=True):
            text = self._text_of(turn.document)[start : start + length + 1]
            inputs[turn.lane, :length] = text[:-1]
            counts[turn.lane] = length
            own = np.arange(offset, length)
            places[turn.lane, : turn.count] = turn.lane * width + own
            targets[turn.lane, : turn.count] = text[own + 1]
        return Rows(inputs, counts, places, targets)

    def rehearsal(self, num_lanes: int, width: int) -> Rows:
        """Rows of `width` tokens that no document has."""
        empty = np.zeros((num_lanes, width), dtype=np.int64)
        return Rows(empty, np.zeros(num_lanes, dtype=np.int64), empty, empty)

    def cache(self, counts: Tensor, width: int) -> RowsPast:
        """Rows of `width` tokens, on the device."""
        num_lanes, device = len(counts), counts.device
        cu = self._cuts(counts, width)
        positions = torch.arange(width, device=device).repeat(num_lanes)
        longest = self._context if self._one_bound else width
        return RowsPast(Segments(cu, longest, positions, self._context), num_lanes)

    def _cuts(self, counts: Tensor, width: int) -> Tensor:
        """(S + 1,) where attention is cut: at the ends of rows, and behind `counts` in short
        pieces, so that what no document has costs little. S is the same for every width."""
        num_tokens, device = len(counts) * width, counts.device
        ends = torch.arange(PIECE, self._context + PIECE, PIECE, device=device)
        rows = torch.arange(len(counts), device=device)[:, None] * width
        is_cut = (ends >= counts[:, None]) & (ends < width + PIECE)
        cuts = torch.where(is_cut, rows + ends.clamp(max=width), num_tokens)
        first = torch.zeros(1, dtype=torch.int64, device=device)
        return torch.cat((first, cuts.flatten().sort().values)).int()

    def commit(self) -> None:
        """Nothing is kept."""

    def state(self) -> dict[str, Any]:
        """Nothing is kept."""
        return {}

    def load(self, state: Mapping[str, Any]) -> None:
        """Nothing to put back."""


class RowsPast(PackedCache):
    """The past of rows of one length, in which nothing looks over the start of its row."""

    def __init__(self, segments: Segments, num_rows: int) -> None:
        super().__init__(segments)
        self._num_rows = num_rows

    def previous(self, name: str, x: Tensor) -> Tensor:
        """x (N, ...) one token earlier in its row; zeros before the first."""
        rows = x.unflatten(0, (self._num_rows, -1))
        return torch.cat((torch.zeros_like(rows[:, :1]), rows[:, :-1]), dim=1).flatten(0, 1)


Reading = KeptLanes | FreshLanes


def upload(values: np.ndarray, device: torch.device) -> Tensor:
    """The values on the device; nobody waits for a GPU to have them."""
    tensor = torch.from_numpy(values)
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor
