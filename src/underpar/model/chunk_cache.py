"""The KV cache of lanes that read a chunk of tokens at a time, with gradients inside the chunk.

A file of its own, so that the counted script of a plain score does not carry it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from underpar.kernels.lane_attention import Place, attend_lanes
from underpar.model.kv_cache import SPAN
from underpar.recipe import ModelSpec


class ChunkCache:
    """The cache of L lanes, each reading one document.

    A step reads C tokens per lane: N = L * C tokens, lane by lane, padded at the end of each lane.
    Earlier chunks are kept without gradient, as in Transformer-XL (Dai et al. 2019,
    arXiv:1901.02860): a training step costs a chunk, not a window. Shapes depend on L and C only,
    so no step waits for the device.
    """

    def __init__(self, spec: ModelSpec, num_lanes: int, device: torch.device | str) -> None:
        self.context = spec.context
        self.lengths = torch.zeros(num_lanes, dtype=torch.long, device=device)
        """(L,) number of tokens that each lane has read of its segment, at most `context`."""
        self.positions = self.lengths
        self.room = 0
        """Tokens per lane for which memory is allocated."""
        self.chunks: ChunkCache | None = None
        """The cache of the chunks of these tokens, if a network cuts them (`model/chunks.py`)."""
        self._spec = spec
        self._lanes = torch.arange(num_lanes, device=device)
        # Keys and values (2, L, room, K, D) by slot: a layer that is visited twice has two caches.
        self._slots: dict[int, Tensor] = {}
        self._last: dict[str, Tensor] = {}
        self.forget()

    def forget(self) -> None:
        """Drop a step that was not committed, with everything that it computed."""
        self._step: Place | None = None
        self._read: dict[str, Tensor] = {}
        if self.chunks is not None:
            self.chunks.forget()

    def begin(self, counts: Tensor, width: int, farthest: int) -> None:
        """Make ready for the next `counts` (L,) tokens of the lanes, each padded to `width`.

        `farthest` is the largest length, in tokens, that a lane has read before.
        """
        assert width > 0 and 0 < farthest <= self.context
        self.forget()
        self.reserve(farthest)
        # A copy, because `commit` changes the lengths in place.
        starts = self.lengths.clone()
        self._step = Place(starts, counts)
        self.positions = (starts[:, None] + torch.arange(width, device=starts.device)).flatten()

    def reserve(self, length: int) -> None:
        """Allocate for lanes of `length` tokens. Up to this length no tensor moves in memory."""
        needed = _whole_spans(length + 1)
        if needed <= self.room:
            return
        room = min(max(needed, 2 * self.room), _whole_spans(self.context + 1))
        more = (0, 0, 0, 0, 0, room - self.room)
        self._slots = {slot: F.pad(cache, more) for slot, cache in self._slots.items()}
        self.room = room

    def attend(self, slot: int, q: Tensor, k: Tensor, v: Tensor, window: int) -> Tensor:
        """Causal attention of q (N, H, D) over what its lane has read, the step's k and v included.

        The step's own are written to the cache, where later steps find them.
        """
        return attend_lanes(q, k, v, self._cache(slot, k), self._begun, window)

    def _cache(self, slot: int, like: Tensor) -> Tensor:
        if slot not in self._slots:
            shape = (2, len(self._lanes), self.room, *like.shape[1:])
            self._slots[slot] = torch.zeros(shape, dtype=like.dtype, device=like.device)
        return self._slots[slot]

    def previous(self, name: str, x: Tensor) -> Tensor:
        """x (N, ...) one token earlier in the lane; zeros at the start of a document."""
        rows = x.unflatten(0, (len(self._lanes), -1))  # (L, C, ...)
        return self.carry(name, rows)[:, :-1].flatten(0, 1)

    def carry(self, name: str, rows: Tensor) -> Tensor:
        """rows (L, C, ...), and before them the lane's last row of earlier steps: (L, 1 + C, ...).

        That is zeros at the start of a document.
        """
        self._read[name] = rows.detach()
        return torch.cat((self.last(name, rows[:, 0])[:, None], rows), dim=1)

    def last(self, name: str, like: Tensor) -> Tensor:
        """What `carry` puts before the rows, (L, ...)."""
        if name not in self._last:
            self._last[name] = torch.zeros_like(like)
        return self._last[name]

    @torch.no_grad()
    def commit(self) -> None:
        """Keep what the step has read; the next step continues after it."""
        counts = self._begun.counts
        ends = (counts - 1).clamp(min=0)
        for name, rows in self._read.items():
            last = self._last[name]
            moved = (counts > 0).view(-1, *[1] * (last.ndim - 1))
            last.copy_(torch.where(moved, rows[self._lanes, ends], last))
        self.lengths.add_(counts)
        if self.chunks is not None:
            self.chunks.commit()
        self.forget()

    @property
    def counts(self) -> Tensor:
        """(L,) how many of the tokens that the step reads are real."""
        return self._begun.counts

    def begin_chunks(self, counts: Tensor, width: int) -> ChunkCache:
        """The cache of chunks, ready for the next `counts` (L,) of them, padded to `width`."""
        if self.chunks is None:
            self.chunks = self.empty_like(len(self._lanes))
        # Chunks are not more than tokens.
        self.chunks.begin(counts, width, min(self.room - 1, self.context))
        return self.chunks

    @property
    def _begun(self) -> Place:
        assert self._step is not None, "begin comes first"
        return self._step

    def reset(self, lanes: Tensor) -> None:
        """Empty the lanes where `lanes` (L,) is true: a new document or a new segment begins."""
        self.lengths.masked_fill_(lanes, 0)
        for last in self._last.values():
            last.masked_fill_(lanes.view(-1, *[1] * (last.ndim - 1)), 0)
        if self.chunks is not None:
            self.chunks.reset(lanes)

    def empty_like(self, num_lanes: int) -> ChunkCache:
        """A cache of `num_lanes` lanes of the same model that have read nothing."""
        return ChunkCache(self._spec, num_lanes, self.lengths.device)

    def put(self, lanes: Sequence[int], other: ChunkCache) -> None:
        """Overwrite these lanes, by index, with those of `other`, between steps."""
        self.reserve(min(other.room - 1, self.context))
        self.lengths[lanes] = other.lengths
        for slot, cache in other._slots.items():
            self._cache(slot, cache[0, 0])[:, lanes, : other.room] = cache
        for name, last in other._last.items():
            rows = self._last.setdefault(name, last.new_zeros(len(self._lanes), *last.shape[1:]))
            rows[lanes] = last
        if other.chunks is not None:
            if self.chunks is None:
                self.chunks = self.empty_like(len(self._lanes))
            self.chunks.put(lanes, other.chunks)

    def state(self) -> dict[str, Any]:
        """Everything that was read, between two steps. The tensors are live, not copies."""
        state = {"lengths": self.lengths, "room": self.room}
        state |= {"slots": self._slots, "last": self._last}
        return state if self.chunks is None else {**state, "chunks": self.chunks.state()}

    def load(self, state: Mapping[str, Any]) -> None:
        """Continue from a state of as many lanes or fewer. Tensors keep their addresses."""
        lengths, device = state["lengths"], self.lengths.device
        if len(lengths) < len(self._lanes):
            self.keep(self._lanes[: len(lengths)])
        other = self.empty_like(len(lengths))
        other.lengths, other.room = lengths.to(device), state["room"]
        other._slots = {int(slot): cache.to(device) for slot, cache in state["slots"].items()}
        other._last = {name: last.to(device) for name, last in state["last"].items()}
        if "chunks" in state:
            other.chunks = other.empty_like(len(lengths))
            other.chunks.load(state["chunks"])
        self.put(range(len(lengths)), other)

    def keep(self, lanes: Tensor) -> None:
        """Drop all lanes but these, by index, between steps."""
        self.positions = self.lengths = self.lengths[lanes]
        self._lanes = self._lanes[: len(lanes)]
        self._slots = {slot: cache.index_select(1, lanes) for slot, cache in self._slots.items()}
        self._last = {name: last[lanes] for name, last in self._last.items()}
        if self.chunks is not None:
            self.chunks.keep(lanes)
        self.forget()


def _whole_spans(length: int) -> int:
    return -(-length // SPAN) * SPAN
