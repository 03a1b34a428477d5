"""What lanes read in a step: rows of tokens, one a lane, and where earlier tokens come from.

`KeptLanes` reads every token once: keys and values of earlier chunks stay as they were computed, as
in a decoder's cache. A lane whose cache is full reads the second half of it again, as the first
half of a new window. `FreshLanes` reads the whole window again for every chunk, with the adapters
of the moment, as PR 1530 and PR 2014 do: up to a hundred times as many tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from underpar.data.loader import Segments, segments_from_starts
from underpar.infer.chunk_past import ChunkPast
from underpar.model.past import PackedPast
from underpar.recipe import ModelSpec
from underpar.score.schedule import Turn
from underpar.seams import Past

# Document -> its tokens, with the BOS that ends it.
TextOf = Callable[[int], np.ndarray]
# Targets of a document that are priced -> the size of its next chunk.
SizeOf = Callable[[int], int]
# Turn -> (start in the document, length, offset of its first target): what is read to price it.
WindowOf = Callable[[Turn], tuple[int, int, int]]


@dataclass(frozen=True, eq=False)
class Rows:
    """A step's input, L lanes of C tokens, and where its targets are."""

    inputs: Tensor  # (L * C,), lane by lane
    past: Past
    places: np.ndarray | None
    """(L, c) rows that the targets are predicted from; None: all of them, c = C."""
    targets: np.ndarray  # (L, c); behind a lane's last target anything


@dataclass(frozen=True, eq=False)
class Again:
    """Tokens that some lanes read again, without being priced."""

    lanes: list[int]
    counts: list[int]
    inputs: Tensor  # (len(lanes) * C,), padded behind `counts`
    past: ChunkPast


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
        self._past = ChunkPast(spec, num_lanes, device)
        # Tokens that each lane's window holds.
        self._held = [0] * num_lanes
        self._step: Sequence[Turn] = ()

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
        past = self._past.empty_like(len(pairs))
        past.begin(upload(np.array(counts), self._device), width, width)
        lanes = [turn.lane for turn, _ in pairs]
        return Again(lanes, counts, upload(inputs.ravel(), self._device), past)

    def was_read_again(self, again: Again) -> None:
        """Put the lanes that were read again in place."""
        again.past.commit()
        self._past.put(again.lanes, again.past)
        for lane, count in zip(again.lanes, again.counts, strict=True):
            self._held[lane] = count

    def rows(self, turns: Sequence[Turn], num_lanes: int) -> Rows:
        """The next tokens of each lane, padded to the largest turn."""
        assert num_lanes == len(self._held)
        width = max(turn.count for turn in turns)
        inputs = np.zeros((num_lanes, width), dtype=np.int64)
        targets = np.zeros_like(inputs)
        counts = np.zeros(num_lanes, dtype=np.int64)
        for turn in turns:
            text = self._text_of(turn.document)[turn.first : turn.first + turn.count + 1]
            inputs[turn.lane, : turn.count], targets[turn.lane, : turn.count] = text[:-1], text[1:]
            counts[turn.lane] = turn.count
        farthest = max(self._held[turn.lane] + turn.count for turn in turns)
        self._past.begin(upload(counts, self._device), width, farthest)
        self._step = turns
        return Rows(
            upload(inputs.ravel(), self._device),
            self._past,
            None,
            targets,
        )

    def rehearsal(self, num_lanes: int, width: int) -> Rows:
        """A step in which no lane reads anything, `width` tokens wide, for `forget` to end."""
        counts = torch.zeros(num_lanes, dtype=torch.long, device=self._device)
        self._past.begin(counts, width, self._context)
        inputs = np.zeros((num_lanes, width), dtype=np.int64)
        return Rows(upload(inputs.ravel(), self._device), self._past, None, inputs)

    def forget(self) -> None:
        """Leave the step as if it had not been."""
        self._past.forget()

    def done(self) -> None:
        """Keep what the step computed."""
        self._past.commit()
        for turn in self._step:
            self._held[turn.lane] += turn.count

    def keep(self, lanes: Sequence[int]) -> None:
        """Go on with these lanes only, in this order."""
        self._past.keep(torch.tensor(lanes, device=self._device))
        self._held = [self._held[lane] for lane in lanes]


class FreshLanes:
    """The whole window is read again for every chunk (PR 1530)."""

    def __init__(
        self, spec: ModelSpec, text_of: TextOf, window_of: WindowOf, device: torch.device
    ) -> None:
        self._context = spec.context
        self._text_of = text_of
        self._window_of = window_of
        self._device = device

    def rows(self, turns: Sequence[Turn], num_lanes: int) -> Rows:
        """The window of each turn, padded to the longest."""
        windows = [self._window_of(turn) for turn in turns]
        width = max(length for _, length, _ in windows)
        inputs = np.zeros((num_lanes, width), dtype=np.int64)
        places = np.zeros((num_lanes, max(turn.count for turn in turns)), dtype=np.int64)
        targets = np.zeros_like(places)
        for turn, (start, length, offset) in zip(turns, windows, strict=True):
            text = self._text_of(turn.document)[start : start + length + 1]
            inputs[turn.lane, :length] = text[:-1]
            own = np.arange(offset, length)
            places[turn.lane, : turn.count] = turn.lane * width + own
            targets[turn.lane, : turn.count] = text[own + 1]
        return self._rows(inputs, places, targets)

    def rehearsal(self, num_lanes: int, width: int) -> Rows:
        """Rows of `width` tokens that no document has."""
        inputs = np.zeros((num_lanes, width), dtype=np.int64)
        return self._rows(inputs, np.arange(inputs.size).reshape(inputs.shape), inputs)

    def _rows(self, inputs: np.ndarray, places: np.ndarray, targets: np.ndarray) -> Rows:
        num_lanes, width = inputs.shape
        segments = segments_from_starts(
            np.arange(0, inputs.size, width), inputs.size, self._context
        )
        if self._device.type == "cuda":
            # A bound that is the same for all widths: a graph is compiled for it.
            segments = replace(segments, max_len=self._context)
        past = RowsPast(self._to_device(segments), num_lanes)
        return Rows(upload(inputs.ravel(), self._device), past, places, targets)

    def _to_device(self, segments: Segments) -> Segments:
        if self._device.type != "cuda":
            return segments
        return segments.pin().to(self._device, non_blocking=True)

    def done(self) -> None:
        """Nothing is kept."""

    def forget(self) -> None:
        """Nothing was kept."""


class RowsPast(PackedPast):
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
