"""Where earlier tokens live: a flat pack, lanes that step, lanes that read chunks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from underpar.data.batch import Segments
from underpar.kernels.attention import attend
from underpar.kernels.lane_attention import Place, attend_lanes
from underpar.recipe import ModelSpec

# Memory grows in spans of this many positions.
SPAN = 64


class PackedCache:
    """The past of a flat pack: pieces for attention, the token before for everything else."""

    def __init__(self, segments: Segments) -> None:
        self.cu, self.max_len = segments.cu, segments.max_len
        self.context = segments.context
        self.positions = segments.positions

    def attend(self, slot: int, q: Tensor, k: Tensor, v: Tensor, window: int) -> Tensor:
        """Causal attention within each piece."""
        return attend(q, k, v, self.cu, self.max_len, window)

    def previous(self, name: str, x: Tensor) -> Tensor:
        """x (N, ...) one token earlier; zeros before the first."""
        return torch.cat((torch.zeros_like(x[:1]), x[:-1]))


class LaneCache:
    """A past of lanes; a lane that reaches `context` starts its piece again at position 0."""

    def __init__(self, spec: ModelSpec, num_lanes: int, device: torch.device) -> None:
        self.context = spec.context
        self._lanes = torch.arange(num_lanes, device=device)
        self.positions = torch.zeros(num_lanes, dtype=torch.long, device=device)
        self._sizes = (spec.num_kv_heads, spec.head_dim)
        # Keys and values by slot of the plan, not by layer: a layer visited twice has two pasts.
        self._slots: dict[int, Tensor] = {}
        self._offsets = torch.arange(spec.context, device=device)
        self._span = SPAN
        self._last: dict[str, Tensor] = {}

    def place(self) -> None:
        """Make ready for the next token of each lane, at `positions` (L,)."""
        farthest = int(self.positions.max()) + 1
        self._span = min(self.context, -(-farthest // SPAN) * SPAN)

    def attend(self, slot: int, q: Tensor, k: Tensor, v: Tensor, window: int) -> Tensor:
        """Store this step's k and v (L, K, D) and read back: q (L, H, D) -> (L, H, D)."""
        cache = self._room(slot, k)
        cache[0, self._lanes, :, self.positions] = k
        cache[1, self._lanes, :, self.positions] = v
        keys, values = cache[:, :, :, : self._span]  # (L, K, span, D)
        back = self.positions[:, None] - self._offsets[: self._span]  # (L, span)
        seen = (back >= 0) & (back <= window) if window else back >= 0
        y = F.scaled_dot_product_attention(
            q[:, :, None], keys, values, attn_mask=seen[:, None, None], enable_gqa=True
        )
        return y[:, :, 0]

    def _room(self, slot: int, like: Tensor) -> Tensor:
        """Keys and values (2, L, K, room, D) of a slot; the room doubles as pieces grow."""
        num_heads, head_dim = self._sizes
        cache = self._slots.get(slot)
        if cache is None:
            cache = like.new_zeros(2, len(self._lanes), num_heads, self._span, head_dim)
        elif cache.size(3) < self._span:
            more = min(max(self._span, 2 * cache.size(3)), self.context) - cache.size(3)
            cache = F.pad(cache, (0, 0, 0, more))
        self._slots[slot] = cache
        return cache

    def previous(self, name: str, x: Tensor) -> Tensor:
        """x (L, ...) of the step before; kept until the next step."""
        last = self._last.get(name, torch.zeros_like(x))
        # A copy: the caller may reuse its buffer for the next step.
        self._last[name] = x.clone()
        return last

    def advance(self) -> None:
        """Move every lane on by one token; a full piece begins again."""
        self.positions = (self.positions + 1) % self.context

    def keep(self, lanes: Tensor) -> None:
        """Drop all lanes but these, by index."""
        self.positions = self.positions[lanes]
        self._lanes = self._lanes[: len(lanes)]
        self._slots = {slot: cache[:, lanes] for slot, cache in self._slots.items()}
        self._last = {name: x[lanes] for name, x in self._last.items()}

    def reset(self, lanes: Tensor) -> None:
        """Begin a new document in the lanes where `lanes` (L,) is true."""
        self.positions = torch.where(lanes, 0, self.positions)


class ChunkCache:
    """A past of L lanes; N = L * C tokens a step, lane by lane, padded at the end of each lane."""

    def __init__(self, spec: ModelSpec, num_lanes: int, device: torch.device | str) -> None:
        self.context = spec.context
        self.lengths = torch.zeros(num_lanes, dtype=torch.long, device=device)
        """(L,) tokens of its piece that each lane has read, at most `context`."""
        self.positions = self.lengths
        self.room = 0
        """Tokens a lane for which there is memory."""
        self._spec = spec
        self._lanes = torch.arange(num_lanes, device=device)
        # Keys and values (2, L, room, K, D) by slot: a layer visited twice has two pasts.
        self._slots: dict[int, Tensor] = {}
        self._last: dict[str, Tensor] = {}
        self.forget()

    def forget(self) -> None:
        """Leave a step that is not committed: between steps there is none, nor what it made."""
        self._step: Place | None = None
        self._read: dict[str, Tensor] = {}

    def begin(self, counts: Tensor, width: int, farthest: int) -> None:
        """Make ready for the next `counts` (L,) tokens of the lanes, each padded to `width`.

        `farthest` is the largest length, in tokens, that a lane which reads has behind them.
        """
        assert width > 0 and 0 < farthest <= self.context
        self.forget()
        self.reserve(farthest)
        # Of their own: the lengths go on when the step is kept.
        starts = self.lengths.clone()
        self._step = Place(starts, counts)
        self.positions = (starts[:, None] + torch.arange(width, device=starts.device)).flatten()

    def reserve(self, length: int) -> None:
        """Have memory for lanes of `length` tokens: up to it, nothing moves to another address."""
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
        if name not in self._last:
            self._last[name] = torch.zeros_like(rows[:, 0])
        self._read[name] = rows.detach()
        return torch.cat((self._last[name][:, None], rows[:, :-1]), dim=1).flatten(0, 1)

    @torch.no_grad()
    def commit(self) -> None:
        """Keep what the step has read: the lanes go on behind it."""
        counts = self._begun.counts
        ends = (counts - 1).clamp(min=0)
        for name, rows in self._read.items():
            last = self._last[name]
            moved = (counts > 0).view(-1, *[1] * (last.ndim - 1))
            last.copy_(torch.where(moved, rows[self._lanes, ends], last))
        self.lengths.add_(counts)
        self.forget()

    @property
    def _begun(self) -> Place:
        assert self._step is not None, "begin comes first"
        return self._step

    def reset(self, lanes: Tensor) -> None:
        """Empty the lanes where `lanes` (L,) is true: a new document, or a new piece, begins."""
        self.lengths.masked_fill_(lanes, 0)
        for last in self._last.values():
            last.masked_fill_(lanes.view(-1, *[1] * (last.ndim - 1)), 0)

    def empty_like(self, num_lanes: int) -> ChunkCache:
        """So many lanes of the same kind that have read nothing."""
        return ChunkCache(self._spec, num_lanes, self.lengths.device)

    def put(self, lanes: Sequence[int], other: ChunkCache) -> None:
        """Overwrite these lanes, by index, with those of `other`, between steps."""
        self.reserve(min(other.room - 1, self.context))
        self.lengths[lanes] = other.lengths
        for slot, cache in other._slots.items():
            self._cache(slot, cache[0, 0])[:, lanes, : other.room] = cache
        for name, last in other._last.items():
            own = self._last.setdefault(name, last.new_zeros(len(self._lanes), *last.shape[1:]))
            own[lanes] = last

    def state(self) -> dict[str, Any]:
        """All that was read, between two steps: live tensors."""
        own = {"lengths": self.lengths, "room": self.room}
        return {**own, "slots": self._slots, "last": self._last}

    def load(self, state: Mapping[str, Any]) -> None:
        """Go on from a state of as many lanes, at the same addresses, or of fewer."""
        lengths, device = state["lengths"], self.lengths.device
        if len(lengths) < len(self._lanes):
            self.keep(self._lanes[: len(lengths)])
        other = self.empty_like(len(lengths))
        other.lengths, other.room = lengths.to(device), state["room"]
        other._slots = {int(slot): cache.to(device) for slot, cache in state["slots"].items()}
        other._last = {name: last.to(device) for name, last in state["last"].items()}
        self.put(range(len(lengths)), other)

    def keep(self, lanes: Tensor) -> None:
        """Drop all lanes but these, by index, between steps."""
        self.positions = self.lengths = self.lengths[lanes]
        self._lanes = self._lanes[: len(lanes)]
        self._slots = {slot: cache.index_select(1, lanes) for slot, cache in self._slots.items()}
        self._last = {name: last[lanes] for name, last in self._last.items()}
        self.forget()


def _whole_spans(length: int) -> int:
    return -(-length // SPAN) * SPAN
