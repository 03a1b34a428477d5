"""The cache of a stream of chunks, cut out of a stream of tokens at its boundaries.

A boundary begins a chunk, and the token there stands for the chunk. Chunks are read by a network
of their own (model/hnet.py), with a cache of their own: in a flat pack (`PackedChunks`), or in
lanes that step one token at a time (`LaneChunks`). Both have three methods beside those of a cache:
`gather` takes what stands for each chunk, `smooth` blends each chunk with those before it, and
`spread` gives each token what its chunk was made to.

Smoothing (arXiv:2507.07955, equation 5) is z[c] = P[c] y[c] + (1 - P[c]) z[c - 1] over the chunks
of a segment, and z = y at its first. P is the probability of the chunk's boundary and above 1/2, so
the share of a chunk halves at least with every later one.

Shapes: N tokens, C chunks.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from underpar.model.kv_cache import LaneCache, PackedCache
from underpar.seams import KVCache

# 32 chunks: the share of one that is farther back is below 2^-32.
DOUBLINGS = 5


class PackedChunks(PackedCache):
    """The chunks of a flat pack. A chunk never spans two segments.

    There are as many as begin. With a `room` the number does not depend on the text:

    - With room for a chunk per token, the chunks of a segment have the places of its first tokens.
      Then no shape depends on the text, and no later token can change even the last bit of what is
      computed before it.
    - With less, there are exactly so many chunks, one after the other. Tokens of chunks that do not
      fit join the last one that does, if it is of their own segment, and get zeros otherwise. What
      fits is decided from left to right, so later tokens change nothing before them.

    Chunks that are not needed are zeros. They come after all others of their segment, or are in
    segments of their own.
    """

    def __init__(self, cache: PackedCache, is_boundary: Tensor, room: int = 0) -> None:
        self.context = cache.context
        ends = is_boundary.cumsum(0)
        tokens = torch.arange(len(ends), device=ends.device)
        start = tokens - cache.positions
        # The number of the chunk of each token, and of the first chunk of its segment.
        chunk = ends - 1
        begin = chunk[start]
        if room >= len(ends):
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
            # Chunks that are not needed, in segments of the same bound.
            rest = torch.arange(1, -(-room // self.max_len) + 1, device=cu.device)
            cu = torch.cat((cu, (cu[-1] + rest * self.max_len).clamp(max=num_chunks)))
        self.cu = cu.to(torch.int32)

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
        z = (1 - decay) * y.to(decay.dtype)
        # After k doublings a chunk has the shares of 2^k chunks.
        for back in (1 << k for k in range(DOUBLINGS)):
            z = z + decay * F.pad(z, (0, 0, back, 0))[: len(z)]
            decay = decay * F.pad(decay, (0, 0, back, 0))[: len(z)]
        return z.to(y.dtype)

    def spread(self, y: Tensor) -> Tensor:
        """y (C, dim) of the chunk of each token: (N, dim)."""
        return torch.where(self._has_chunk[:, None], y[self._chunk], 0.0)


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


Chunks = PackedChunks | LaneChunks


def cut(cache: KVCache, is_boundary: Tensor, room: int = 0) -> Chunks:
    """The cache of the chunks that begin at the boundaries (N,) among the tokens of `cache`."""
    if isinstance(cache, LaneCache):
        if cache.chunks is None:
            cache.chunks = LaneChunks(cache)
        cache.chunks.begin(is_boundary, cache.positions == 0)
        return cache.chunks
    assert isinstance(cache, PackedCache), "chunks of lanes that read several tokens are not there"
    return PackedChunks(cache, is_boundary, room)
