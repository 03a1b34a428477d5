"""Keys and values of lanes that read a chunk of tokens at a time, with gradients inside the chunk.

A lane is a document. What it read in earlier chunks is kept without gradient, as in Transformer-XL
(Dai et al. 2019, arXiv:1901.02860): a step of training costs a chunk, not a window. Shapes depend
on the numbers of lanes, of tokens a chunk and on the span of keys that are read, never on tensors:
no step waits for the device, and one that was captured can be replayed.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from underpar.recipe import ModelSpec

# Keys are read in spans of this many positions, so that early steps do not pay for the whole cache.
SPAN = 64


@dataclass(frozen=True)
class _Step:
    """Where the tokens of a step belong; C tokens a lane, of which the first `counts` are real."""

    counts: Tensor  # (L,)
    places: Tensor  # (L, C), in the lane's piece
    real: Tensor  # (L, C) bool
    rows: Tensor  # (N,), among all rows of a cache
    lanes: Tensor  # (L, 1)
    span: int


class _Kept(torch.autograd.Function):
    """What is kept (L, span, K, D) and already holds the step's `own` (N, K, D): as it is, with
    the gradients at the step's places going to `own`."""

    @staticmethod
    def forward(ctx: Any, own: Tensor, kept: Tensor, step: _Step) -> Tensor:
        """`kept`."""
        ctx.step = step
        return kept.view_as(kept)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        """The step's places of `grad` (L, span, K, D)."""
        step: _Step = ctx.step
        # Padding may lie behind the span; no token has seen it.
        own = grad[step.lanes, step.places.clamp(max=step.span - 1)]  # (L, C, K, D)
        return (own * step.real[:, :, None, None]).flatten(0, 1), None, None


class ChunkPast:
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
        self._clear()

    def _clear(self) -> None:
        """Between steps there is neither a step nor what it made."""
        self._step: _Step | None = None
        self._biases: dict[int, Tensor] = {}
        self._read: dict[str, Tensor] = {}

    def begin(self, counts: Tensor, width: int, farthest: int) -> None:
        """Make ready for the next `counts` (L,) tokens of the lanes, each padded to `width`.

        `farthest` is the largest length, in tokens, that a lane which reads has behind them.
        """
        assert width > 0 and 0 < farthest <= self.context
        self._clear()
        self.reserve(farthest)
        offsets = torch.arange(width, device=counts.device)
        places = self.lengths[:, None] + offsets
        lanes = self._lanes[:, None]
        # Padding that has no room goes to the last row, which is never a token's.
        rows = (lanes * self.room + places.clamp(max=self.room - 1)).flatten()
        real = offsets < counts[:, None]
        self._step = _Step(counts, places, real, rows, lanes, _whole_spans(farthest))
        self.positions = places.flatten()

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

        Padding sees anything: finite numbers that nobody reads.
        """
        step = self._begun
        cache = self._cache(slot, k)
        with torch.no_grad():
            for kept, own in zip(cache.view(2, -1, *k.shape[1:]), (k, v), strict=True):
                kept.index_copy_(0, step.rows, own)
        keys, values = (
            _Kept.apply(own, kept[:, : step.span], step).transpose(1, 2)
            for kept, own in zip(cache, (k, v), strict=True)
        )  # (L, K, span, D)
        num_lanes, width = step.places.shape
        # Heads that share keys become further queries: no kernel for groups takes a mask.
        grouped = (num_lanes, width, k.size(1), -1, q.size(-1))
        q = q.reshape(grouped).transpose(1, 2)  # (L, K, C, G, D)
        bias = self._bias(window, q.size(3), q.dtype)
        y = F.scaled_dot_product_attention(q.flatten(2, 3), keys, values, attn_mask=bias)
        return y.unflatten(2, (width, -1)).transpose(1, 2).flatten(2, 3).flatten(0, 1)

    def _bias(self, window: int, group: int, dtype: torch.dtype) -> Tensor:
        """0 where a query sees a key and -inf elsewhere, (L, 1, C * G, span); made once a step."""
        if window not in self._biases:
            step = self._begun
            keys = torch.arange(step.span, device=step.places.device)
            back = step.places[:, :, None] - keys  # (L, C, span)
            seen = (back >= 0) & (back <= window) if window else back >= 0
            # A row that sees nothing would be NaN, and its gradient with it.
            hidden = step.real[:, :, None] & ~seen
            bias = torch.zeros(hidden.shape, dtype=dtype, device=hidden.device)
            bias = bias.masked_fill_(hidden, -math.inf)
            wide = bias[:, :, None].expand(-1, -1, group, -1).flatten(1, 2)
            self._biases[window] = wide[:, None]
        return self._biases[window]

    def _cache(self, slot: int, like: Tensor) -> Tensor:
        if slot not in self._slots:
            shape = (2, len(self._lanes), self.room, *like.shape[1:])
            self._slots[slot] = torch.zeros(shape, dtype=like.dtype, device=like.device)
        return self._slots[slot]

    def previous(self, name: str, x: Tensor) -> Tensor:
        """x (N, ...) one token earlier in the lane; zeros at the start of a document."""
        rows = x.unflatten(0, self._begun.places.shape)  # (L, C, ...)
        if name not in self._last:
            self._last[name] = torch.zeros_like(rows[:, 0])
        self._read[name] = rows.detach()
        return torch.cat((self._last[name][:, None], rows[:, :-1]), dim=1).flatten(0, 1)

    @torch.no_grad()
    def commit(self) -> None:
        """Keep what the step has read: the lanes go on behind it."""
        step = self._begun
        ends = (step.counts - 1).clamp(min=0)
        for name, rows in self._read.items():
            last = self._last[name]
            moved = (step.counts > 0).view(-1, *[1] * (last.ndim - 1))
            last.copy_(torch.where(moved, rows[self._lanes, ends], last))
        self.lengths.add_(step.counts)
        self._clear()

    @property
    def _begun(self) -> _Step:
        assert self._step is not None, "begin comes first"
        return self._step

    def reset(self, lanes: Tensor) -> None:
        """Empty the lanes where `lanes` (L,) is true: a new document, or a new piece, begins."""
        self.lengths.masked_fill_(lanes, 0)
        for last in self._last.values():
            last.masked_fill_(lanes.view(-1, *[1] * (last.ndim - 1)), 0)

    def empty_like(self, num_lanes: int) -> ChunkPast:
        """So many lanes of the same kind that have read nothing."""
        return ChunkPast(self._spec, num_lanes, self.lengths.device)

    def put(self, lanes: Sequence[int], other: ChunkPast) -> None:
        """Overwrite these lanes, by index, with those of `other`, between steps."""
        self.reserve(min(other.room - 1, self.context))
        self.lengths[lanes] = other.lengths
        for slot, cache in other._slots.items():
            self._cache(slot, cache[0, 0])[:, lanes, : other.room] = cache
        for name, last in other._last.items():
            own = self._last.setdefault(name, last.new_zeros(len(self._lanes), *last.shape[1:]))
            own[lanes] = last

    def keep(self, lanes: Tensor) -> None:
        """Drop all lanes but these, by index, between steps."""
        self.positions = self.lengths = self.lengths[lanes]
        self._lanes = self._lanes[: len(lanes)]
        self._slots = {slot: cache.index_select(1, lanes) for slot, cache in self._slots.items()}
        self._last = {name: last[lanes] for name, last in self._last.items()}
        self._clear()


def _whole_spans(length: int) -> int:
    return -(-length // SPAN) * SPAN
