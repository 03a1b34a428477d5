"""The cache of a stream of chunks, cut out of a stream of tokens at its boundaries.

A boundary begins a chunk, and the token there stands for the chunk. Chunks are read by a network
of their own (model/hnet.py), with a cache of their own: in a flat pack (`PackedChunks`), in lanes
that step one token at a time (`LaneChunks`), or in lanes that read several (`RowChunks`). All have
three methods beside those of a cache: `gather` takes what stands for each chunk, `smooth` blends
each chunk with those before it, and `spread` gives each token what its chunk was made to.

Smoothing (arXiv:2507.07955, equation 5) is z[c] = P[c] y[c] + (1 - P[c]) z[c - 1] over the chunks
of a segment, and z = y at its first. P is the probability of the chunk's boundary and above 1/2, so
the share of a chunk halves at least with every later one.

Shapes: N tokens, C chunks.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from underpar.model.kv_cache import LaneCache, PackedCache
from underpar.seams import KVCache

if TYPE_CHECKING:
    from underpar.model.chunk_cache import ChunkCache

# 32 chunks: the share of one that is farther back is below 2^-32.
DOUBLINGS = 5
# Chunks that are not needed are cut into attention segments of so many.
UNUSED_SEGMENT = 256


class PackedChunks(PackedCache):
    """The chunks of a flat pack. A chunk never spans two segments.

    There are as many as begin. With a `room` the number does not depend on the text:

    - With room for a chunk per token, the chunks of a segment have the places of its first tokens.
      Then no shape depends on the text, and no later token can change even the last bit of what is
      computed before it.
    - With less, there are exactly so many chunks, one after the other. Tokens of chunks that do not
      fit join the last one that does, if it is of their own segment, and get zeros otherwise. What
      fits is decided from left to right, so later tokens change nothing before them.

    Chunks that are not needed are zeros, and stay zeros in attention, so that statistics of
    activations leave them out. They come after all others of their segment, or are in segments of
    their own.
    """

    def __init__(self, cache: PackedCache, is_boundary: Tensor, room: int = 0) -> None:
        self.context = cache.context
        ends = is_boundary.cumsum(0)
        tokens = torch.arange(len(ends), device=ends.device)
        start = tokens - cache.positions
        # The number of the chunk of each token, and of the first chunk of its segment.
        chunk = ends - 1
        begin = chunk[start]
        # Whether segments have chunks that are not needed.
        self._is_mixed = room >= len(ends)
        if self._is_mixed:
            self._first = self._first_of(begin + cache.positions, ends)
            number = chunk[self._first]
            self._is_used = (start[self._first] == start) & (number == begin + cache.positions)
            self._chunk = start + chunk - begin
            self._has_chunk = torch.ones_like(is_boundary)
            self.positions, self.cu, self.max_len = cache.positions, cache.cu, cache.max_len
            return

        num_chunks = room or int(ends[-1])
        slots = torch.arange(num_chunks, device=ends.device)
        self._first = self._first_of(slots, ends)
        self._is_used = slots < ends[-1]
        self._has_chunk = begin < num_chunks
        self._chunk = chunk.clamp(max=num_chunks - 1)
        self.positions = torch.where(self._is_used, slots - begin[self._first], 0)
        # A segment of the pack has as many chunks as begin in it.
        before = torch.cat((ends.new_zeros(1), ends))
        cu = before[cache.cu.long()].clamp(max=num_chunks)
        self.max_len = min(cache.max_len, num_chunks)
        if room:
            # Chunks that are not needed, in segments so short that attention costs nothing.
            size = min(self.max_len, UNUSED_SEGMENT)
            rest = torch.arange(1, -(-room // size) + 1, device=cu.device)
            cu = torch.cat((cu, (cu[-1] + rest * size).clamp(max=num_chunks)))
        self.cu = cu.to(torch.int32)

    def attend(self, slot: int, q: Tensor, k: Tensor, v: Tensor, window: int) -> Tensor:
        """Causal attention within each segment."""
        y = super().attend(slot, q, k, v, window)
        # Elsewhere they are in segments of their own, in which all values are zeros.
        return torch.where(self._is_used[:, None, None], y, 0) if self._is_mixed else y

    @staticmethod
    def _first_of(chunks: Tensor, ends: Tensor) -> Tensor:
        """The first token of each of these chunks; the last token for one that is not there."""
        return torch.searchsorted(ends, chunks + 1).clamp(max=len(ends) - 1)

    def gather(self, x: Tensor) -> Tensor:
        """x (N, ...) of the token that stands for each chunk: (C, ...)."""
        used = self._is_used.view(-1, *[1] * (x.ndim - 1))
        return torch.where(used, x[self._first], torch.zeros_like(x[:1]))

    def smooth(self, y: Tensor, p: Tensor) -> Tensor:
        """y (C, dim), each blended with those before it; p (C,) of the boundary of each."""
        decay = torch.where(self.positions == 0, 0.0, 1 - p)[:, None]
        return blended((1 - decay) * y.to(decay.dtype), decay).to(y.dtype)

    def spread(self, y: Tensor) -> Tensor:
        """y (C, dim) of the chunk of each token: (N, dim)."""
        return torch.where(self._has_chunk[:, None], y[self._chunk], 0.0)


def blended(z: Tensor, decay: Tensor) -> Tensor:
    """z[c] + decay[c] z[c - 1] + decay[c] decay[c - 1] z[c - 2] + ...; z (..., C, dim) and decay
    (..., C, 1)."""
    num_chunks = z.size(-2)
    # After k doublings a chunk has the shares of 2^k chunks.
    for back in (1 << k for k in range(DOUBLINGS)):
        z = z + decay * F.pad(z, (0, 0, back, 0))[..., :num_chunks, :]
        decay = decay * F.pad(decay, (0, 0, back, 0))[..., :num_chunks, :]
    return z


class RowChunks:
    """The chunks of lanes that each read a row of tokens in a step.

    A lane has room for a chunk per token of its row, so no shape depends on the text. What a lane
    keeps of its chunks is in `chunks` of the cache of tokens. Tokens before the first boundary of a
    row belong to the last chunk of the steps before.
    """

    def __init__(self, cache: ChunkCache, is_boundary: Tensor) -> None:
        num_lanes = len(cache.counts)
        begins = is_boundary.unflatten(0, (num_lanes, -1))  # (L, C)
        width = begins.size(1)
        places = torch.arange(width, device=begins.device).repeat(num_lanes, 1)
        # The number of chunks that begin in a row up to each token.
        self._ends = (begins & (places < cache.counts[:, None])).cumsum(1)
        counts = self._ends[:, -1]
        self._kept = cache.begin_chunks(counts, width)
        self.context, self.positions = cache.context, self._kept.positions
        self._is_used = (places < counts[:, None]).flatten()
        first = torch.searchsorted(self._ends, places + 1).clamp(max=width - 1)
        self._rows = torch.arange(num_lanes, device=begins.device)[:, None]
        self._first = (self._rows * width + first).flatten()

    def attend(self, slot: int, q: Tensor, k: Tensor, v: Tensor, window: int) -> Tensor:
        """Causal attention over the chunks of each lane."""
        return self._kept.attend(slot, q, k, v, window)

    def previous(self, name: str, x: Tensor) -> Tensor:
        """x (L * C, ...) of the chunk before."""
        return self._kept.previous(name, x)

    def gather(self, x: Tensor) -> Tensor:
        """x (L * C, ...) of the token that stands for each chunk; zeros where there is none."""
        used = self._is_used.view(-1, *[1] * (x.ndim - 1))
        return torch.where(used, x.index_select(0, self._first), torch.zeros_like(x[:1]))

    def smooth(self, y: Tensor, p: Tensor) -> Tensor:
        """y (L * C, dim), each blended with those before it, also of steps before."""
        decay = torch.where(self.positions == 0, 0.0, 1 - p)[:, None]
        z, decay = (
            part.unflatten(0, (len(self._rows), -1))
            for part in ((1 - decay) * y.to(decay.dtype), decay)
        )
        before = self._kept.last("smooth", z[:, 0])[:, None]
        z = blended(torch.cat((before, z), dim=1), F.pad(decay, (0, 0, 1, 0)))
        self._kept.carry("smooth", z[:, 1:])
        return z[:, 1:].flatten(0, 1).to(y.dtype)

    def spread(self, y: Tensor) -> Tensor:
        """y (L * C, dim) of the chunk of each token."""
        rows = self._kept.carry("spread", y.unflatten(0, (len(self._rows), -1)))
        return rows.flatten(0, 1).index_select(
            0, (self._rows * rows.size(1) + self._ends).flatten()
        )


class LaneChunks(LaneCache):
    """The chunks of lanes that step one token at a time.

    Every lane computes a chunk in every step, so that shapes do not depend on tokens. A lane
    without a boundary writes it where its next chunk will be written, and keeps its last chunk.
    """

    def __init__(self, cache: LaneCache) -> None:
        super().__init__(cache.spec, len(cache.positions), cache.positions.device)
        self._next = self.positions

    def begin(self, is_boundary: Tensor, is_start: Tensor) -> None:
        """Make ready for the next token of each lane; at a start a segment begins."""
        self._is_boundary = is_boundary
        self.positions = torch.where(is_start, 0, self._next)
        self._next = self.positions + is_boundary
        self.place()

    def gather(self, x: Tensor) -> Tensor:
        """x (L, ...) as it is: every lane has a token that may begin a chunk."""
        return x

    def smooth(self, y: Tensor, p: Tensor) -> Tensor:
        """y (L, dim), each blended with what this gave the lane's last chunk."""
        decay = torch.where(self.positions == 0, 0.0, 1 - p)[:, None]
        z = (1 - decay) * y.to(decay.dtype)
        before = self._last.get("smooth")
        if before is not None:
            z = z + decay * before
        self._kept("smooth", z)
        return z.to(y.dtype)

    def spread(self, y: Tensor) -> Tensor:
        """y (L, dim) of the lanes with a boundary, and what the others were given before."""
        return self._kept("spread", y)

    def previous(self, name: str, x: Tensor) -> Tensor:
        """x (L, ...) of the chunk before."""
        last = self._last.get(name, torch.zeros_like(x))
        self._kept(name, x)
        return last

    def _kept(self, name: str, x: Tensor) -> Tensor:
        last = self._last.get(name, torch.zeros_like(x))
        self._last[name] = torch.where(self._is_boundary.view(-1, *[1] * (x.ndim - 1)), x, last)
        return self._last[name]

    def keep(self, lanes: Tensor) -> None:
        """Drop all lanes but these, by index."""
        super().keep(lanes)
        self._next = self._next[lanes]


Chunks = PackedChunks | RowChunks | LaneChunks


def cut(cache: KVCache, is_boundary: Tensor, room: int = 0) -> Chunks:
    """The cache of the chunks that begin at the boundaries (N,) among the tokens of `cache`."""
    if isinstance(cache, LaneCache):
        if cache.chunks is None:
            cache.chunks = LaneChunks(cache)
        cache.chunks.begin(is_boundary, cache.positions == 0)
        return cache.chunks
    if isinstance(cache, PackedCache):
        return PackedChunks(cache, is_boundary, room)
    return RowChunks(cast("ChunkCache", cache), is_boundary)
