"""Exact attention, and the two places where it finds earlier tokens: a pack, or lanes that step.

Both compute the same bits. What a query sees depends on its own row and on the rows of the keys
that it sees, never on padding or on other queries:

- Scores are products of integers, with one step per query and one per key.
- The exponential is a table on a grid of 2^-10 nats, of integers. A weight is wrong by at most
  0.05 %, half of that on average, in both directions.
- The step of a value is part of its weight. Weights are rounded to integers once more, relative to
  the largest one, and the sums of weights and of weighted values are sums of integers.
"""

from __future__ import annotations

import math
from functools import cache
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor

from underpar.data.batch import Segments
from underpar.infer import exact_math as em
from underpar.model.kv_cache import SPAN, PackedCache
from underpar.recipe import ModelSpec

# Nats are rounded to a grid of this many points per nat; from here on a weight is 0.
POINTS, NUM_POINTS = 1 << 10, 1 << 15
# The largest weight of a row as an integer. A sum of 2^22 of them is exact.
WEIGHT_BITS = 30
# Queries of a block, and scores of a block: a block should stay in a processor's cache. On a GPU
# blocks are large, because a host that launches many small ones is slower than the GPU.
QUERIES, SCORES = 256, 1 << 18
CUDA_SCORES = 1 << 26


@cache
def _table(bits: int, device: torch.device) -> Tensor:
    """Integers near 2^bits e^(-i / POINTS) in float64; the last one is 0."""
    nats = em.divide(torch.arange(NUM_POINTS, device=device), POINTS)
    table = (em.exp(-nats) * math.ldexp(1.0, bits)).round_()
    table[-1] = 0.0
    return table


def weights_of(scores: Tensor, bits: int = WEIGHT_BITS) -> Tensor:
    """Integers in float64 in proportion to e^(score / POINTS), the largest in a row 2^bits."""
    below = scores.amax(-1, keepdim=True) - scores
    index = below.clamp_(max=NUM_POINTS - 1).round_().long()
    return _table(bits, scores.device).take(index)


def attend_exactly(
    q: Tensor,
    k: tuple[Tensor, Tensor],
    v: tuple[Tensor, Tensor],
    seen: Tensor,
    value_bits: int,
) -> Tensor:
    """Attention of q (B, Q, D) over keys and values, which are integers (B, S, D), steps (B, S, 1).

    `seen` (B or 1, Q, S) says which keys a query sees; it sees one at least.
    """
    rows, row_step = em.to_integers(q, em.bits_of_factors(q.size(-1)))
    # A power of two changes no other bit: the scores are those in nats, times POINTS.
    row_step = row_step * (1.0 / math.sqrt(q.size(-1))) * POINTS
    keys, key_steps = k
    scores = (rows @ keys.mT).mul_(row_step).mul_(key_steps.mT)
    weights = weights_of(scores.masked_fill_(~seen, -math.inf))
    values, value_steps = v
    shares, step = em.to_integers(weights * value_steps.mT, value_bits)
    return (shares @ values).mul_(em.divide(step, weights.sum(-1, keepdim=True)))


def key_integers(k: Tensor) -> tuple[Tensor, Tensor]:
    """Keys (..., D) as integers and one step (..., 1) each."""
    return em.to_integers(k, em.bits_of_factors(k.size(-1)))


class ExactPack(PackedCache):
    """The cache of a flat pack: attention in grids of segments of about the same length."""

    def __init__(self, segments: Segments) -> None:
        super().__init__(segments)
        grids: dict[int, list[tuple[int, int]]] = {}
        for begin, end in pairwise(segments.cu.tolist()):
            if end > begin:
                width = min(1 << (end - begin - 1).bit_length(), self.max_len)
                grids.setdefault(width, []).append((begin, end))
        num, device = len(self.positions), self.positions.device
        # Tokens by row and place, (S, T); the number of tokens stands for none.
        self._grids = []
        for width, bounds in grids.items():
            begins, ends = torch.tensor(bounds, device=device)[:, :, None].unbind(1)
            tokens = begins + torch.arange(width, device=device)
            self._grids.append(torch.where(tokens < ends, tokens, num))

    def attend(self, slot: int, q: Tensor, k: Tensor, v: Tensor, window: int) -> Tensor:
        """Causal attention within each segment."""
        with torch._C.DisableTorchFunction():
            keys = key_integers(k)
            bits = em.bits_of_factors(self.context)
            values = em.to_integers(v, bits)
            # One row more, for what queries that stand for none give.
            out = q.new_empty(len(q) + 1, *q.shape[1:])
            for grid in self._grids:
                most = CUDA_SCORES if q.is_cuda else SCORES
                size = max(1, most // (q.size(1) * min(QUERIES, grid.size(1)) * grid.size(1)))
                for rows in grid.split(size):
                    _attend_grid(out, q, keys, values, rows, window, bits)
            return out[:-1]


def _attend_grid(
    out: Tensor,
    q: Tensor,
    keys: tuple[Tensor, Tensor],
    values: tuple[Tensor, Tensor],
    grid: Tensor,
    window: int,
    bits: int,
) -> None:
    """Attention within the rows of a grid of tokens (S, T).

    Places without a token come after all tokens of their row, so that no token sees them.
    """
    num_segments, width = grid.shape
    to, grid = grid, grid.clamp(max=len(q) - 1)
    k, v = ([_by_head(t[grid]) for t in pair] for pair in (keys, values))
    heads = k[0].size(0) // num_segments
    at = torch.arange(width, device=q.device)
    for begin in range(0, width, QUERIES):
        end = min(begin + QUERIES, width)
        # Query heads of a key head are further queries.
        block = q[grid[:, begin:end]].unflatten(2, (heads, -1))  # (S, Q, K, G, D)
        rows = block.permute(0, 2, 3, 1, 4).flatten(2, 3).flatten(0, 1)  # (S K, G Q, D)
        seen = _band(at[begin:end], at[:end], window).repeat(block.size(3), 1)[None]
        y = attend_exactly(
            rows, (k[0][:, :end], k[1][:, :end]), (v[0][:, :end], v[1][:, :end]), seen, bits
        )
        y = y.unflatten(0, (-1, heads)).unflatten(2, (-1, end - begin)).permute(0, 3, 1, 2, 4)
        out[to[:, begin:end]] = y.flatten(2, 3)


def _by_head(x: Tensor) -> Tensor:
    """(S, T, K, D) -> (S K, T, D)."""
    return x.transpose(1, 2).flatten(0, 1)


def _band(queries: Tensor, keys: Tensor, window: int) -> Tensor:
    back = queries[:, None] - keys
    return (back >= 0) & (back <= window) if window else back >= 0


class ExactLanes:
    """Keys and values of lanes that step together, as integers.

    A lane begins a new segment at position 0 when it has read `context` tokens, and where
    `advance` is told so. Between two calls of `place` no tensor moves in memory and nothing waits
    for the device, so a step can be captured as a CUDA graph.
    """

    def __init__(self, spec: ModelSpec, num_lanes: int, device: torch.device) -> None:
        self.context = spec.context
        self.positions = torch.zeros(num_lanes, dtype=torch.long, device=device)
        self.span = 0
        """Positions that a step looks at: no lane is farther."""
        self._lanes = torch.arange(num_lanes, device=device)
        self._slots: dict[int, tuple[Tensor, Tensor]] = {}
        self._offsets = torch.arange(spec.context, device=device)
        self._bits = em.bits_of_factors(spec.context)
        self._last: dict[str, Tensor] = {}

    def place(self, farthest: int) -> bool:
        """Make room for steps up to position `farthest`; True if tensors moved in memory."""
        span = min(self.context, -(-(farthest + 1) // SPAN) * SPAN)
        if span <= self.span:
            return False
        more = (0, 0, 0, span - self.span)
        for slot, (integers, steps) in self._slots.items():
            self._slots[slot] = F.pad(integers, more), F.pad(steps, more)
        self.span = span
        return True

    def attend(self, slot: int, q: Tensor, k: Tensor, v: Tensor, window: int) -> Tensor:
        """Store this step's k and v (L, K, D) and read back: q (L, H, D) -> (L, H, D)."""
        with torch._C.DisableTorchFunction():
            heads = k.size(1)
            integers, steps = self._room(slot, k)
            for i, pair in enumerate((key_integers(k), em.to_integers(v, self._bits))):
                for store, rows in zip((integers, steps), pair, strict=True):
                    store[i, self._lanes, :, self.positions] = rows
            back = self.positions[:, None] - self._offsets[: self.span]  # (L, span)
            seen = (back >= 0) & (back <= window) if window else back >= 0
            pairs = zip(integers.flatten(1, 2), steps.flatten(1, 2), strict=True)
            keys, values = pairs
            rows = q.unflatten(1, (heads, -1)).flatten(0, 1)  # (L K, G, D)
            seen = seen[:, None, None].expand(-1, heads, 1, -1).flatten(0, 1)  # (L K, 1, span)
            y = attend_exactly(rows, keys, values, seen, self._bits)
            return y.unflatten(0, (-1, heads)).flatten(1, 2)

    def _room(self, slot: int, like: Tensor) -> tuple[Tensor, Tensor]:
        """Integers (2, L, K, span, D) and steps (2, L, K, span, 1) of keys and values of a slot."""
        if slot not in self._slots:
            num, heads, size = like.shape
            self._slots[slot] = (
                like.new_zeros(2, num, heads, self.span, size),
                like.new_zeros(2, num, heads, self.span, 1),
            )
        return self._slots[slot]

    def previous(self, name: str, x: Tensor) -> Tensor:
        """x (L, ...) of the step before; kept until the next step."""
        with torch._C.DisableTorchFunction():
            if name not in self._last:
                self._last[name] = torch.zeros_like(x)
            last = self._last[name].clone()
            self._last[name].copy_(x)
            return last

    def keep(self, num: int) -> None:
        """Keep the first lanes only."""
        self.positions, self._lanes = self.positions[:num].clone(), self._lanes[:num]
        for slot, (integers, steps) in self._slots.items():
            self._slots[slot] = integers[:, :num].clone(), steps[:, :num].clone()
        self._last = {name: last[:num].clone() for name, last in self._last.items()}

    def advance(self, begins: Tensor) -> None:
        """Move every lane on by one token; where `begins` (L,) is true a document begins."""
        begins = begins | (self.positions + 1 == self.context)
        self.positions.add_(1).masked_fill_(begins, 0)
