"""Where chunks begin, and how much of a chunk reaches its bytes: by a rule, or learned.

Learned chunking is that of H-Net (arXiv:2507.07955). A byte begins a chunk if it is unlike the byte
before it: with h what the encoder made of bytes, and c the cosine of W_q h[t - 1] and W_k h[t], the
probability of a boundary is p = (1 - c) / 2, and there is one where p > 1/2. At the start of a
document p is 1. The decision reads bytes up to its own.

A hard decision passes no gradient to p. Three things do: each chunk is blended with those before it
by its own p (`smooth` of chunks), each byte scales what its chunk gives it by a factor whose value
is 1 and whose gradient is that of its confidence (`straight_through`), and `ratio_loss`.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from underpar.seams import KVCache


class Stride(nn.Module):
    """Every `stride`-th byte of a document begins a chunk."""

    def __init__(self, stride: int) -> None:
        super().__init__()
        self.stride = stride

    def forward(self, h: Tensor, cache: KVCache) -> Tensor:
        """The probability of a boundary (N,): 0 or 1."""
        return (cache.positions % self.stride == 0).float()


class Router(nn.Module):
    """A byte that is unlike the one before it begins a chunk."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.q = nn.Linear(dim, dim, bias=False)
        self.k = nn.Linear(dim, dim, bias=False)
        if not self.q.weight.is_meta:
            nn.init.eye_(self.q.weight)
            nn.init.eye_(self.k.weight)

    def forward(self, h: Tensor, cache: KVCache) -> Tensor:
        """The probability of a boundary (N,) in fp32, from what the encoder made (N, D0)."""
        before, here = self.q(cache.previous("router", h)), self.k(h)
        p = (1 - F.cosine_similarity(before.float(), here.float(), dim=-1)) / 2
        # What is before the first byte of a piece is another document, or nothing.
        return torch.where(cache.positions == 0, 1.0, p.clamp(0, 1))


def boundaries_of(p: Tensor) -> Tensor:
    """Where chunks begin (N,): an even chance begins none."""
    return p > 0.5


def straight_through(p: Tensor) -> Tensor:
    """1 for every byte (N,), with the gradient of the confidence in its decision, max(p, 1 - p)."""
    confidence = torch.where(boundaries_of(p), p, 1 - p)
    return 1 + (confidence - confidence.detach())


def ratio_loss(p: Tensor, bytes_per_chunk: float) -> Tensor:
    """Pushes the share of boundaries towards one in N bytes; 1 where it is (equation 10).

    With F the share of boundaries and G the mean of p, N / (N - 1) ((N - 1) F G + (1 - F) (1 - G)).
    The decisions pass no gradient; that of G is N / (N - 1) (N F - 1), so p is pushed down where
    there are too many boundaries. Over all bytes of a micro-batch.
    """
    n = bytes_per_chunk
    share, mean = boundaries_of(p).float().mean(), p.mean()
    return n / (n - 1) * ((n - 1) * share * mean + (1 - share) * (1 - mean))
