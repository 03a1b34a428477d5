"""Bigram-hash embedding: a table indexed by a hash of this token and the one before.

Pairs that matter get a vector of their own from the first step on; the network learns what is left.
Worth much where training is short or the vocabulary small, little at 8,192 pieces (PR 1218 dropped
it). Source: PR 549, PR 1219 (3,072 buckets of 160 at a vocabulary of 1,024). Legal: it reads the
current and the previous token of the same document, nothing later.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from underpar.recipe import ModelSpec, require
from underpar.seams import BOS_ID, KVCache

STAGE = "model"

# Odd multipliers of PR 549; the exclusive or keeps (a, b) and (b, a) apart.
CURRENT, PREVIOUS = 36_313, 27_191


@dataclass(frozen=True)
class Settings:
    """`buckets` rows of `width` channels, projected to the model's width; `scale` at the start;
    `by_piece`: the first token of a piece, not of a document, has no token before it (PR 1219)."""

    buckets: int = 3072
    width: int = 160
    scale: float = 0.05
    by_piece: bool = False

    def __post_init__(self) -> None:
        require(self.buckets > 1, f"levers.bigram.buckets = {self.buckets}: expected at least 2")
        require(self.width > 0, f"levers.bigram.width = {self.width}: expected at least 1")


TINY = (Settings(), Settings(by_piece=True))


class Bigram(nn.Module):
    """x_t + scale * P table[hash(token t, token t-1)]; a document's first token has its own row."""

    def __init__(self, settings: Settings, spec: ModelSpec) -> None:
        super().__init__()
        self.by_piece = settings.by_piece
        self.table = nn.Embedding(settings.buckets, settings.width)
        self.project = nn.Linear(settings.width, spec.dim, bias=False)
        self.scale = nn.Parameter(torch.tensor(settings.scale))
        nn.init.zeros_(self.table.weight)
        nn.init.orthogonal_(self.project.weight)

    def neutral_(self) -> None:
        """Empty the table."""
        nn.init.zeros_(self.table.weight)

    def embed(self, x: Tensor, tokens: Tensor, cache: KVCache) -> Tensor:
        """Add the pair's vector to the embeddings x (N, dim) of tokens (N,)."""
        last = self.table.num_embeddings - 1
        mixed = (CURRENT * tokens) ^ (PREVIOUS * cache.previous("bigram", tokens))
        first = cache.positions == 0 if self.by_piece else tokens == BOS_ID
        pair = self.project(self.table(torch.where(first, last, mixed % last)))
        return x + self.scale.to(x.dtype) * pair.to(x.dtype)


def plug(settings: Settings, spec: ModelSpec) -> Bigram:
    """The module to hook in."""
    return Bigram(settings, spec)
