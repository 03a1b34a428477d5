"""Bigram-hash embedding: adds a learned vector for each pair of neighbouring tokens.

The pair (token, previous token) is hashed to a row of a table, and the row is projected to the
model's width. The network knows frequent pairs from the first step and learns the rest. The gain is
large if training is short or the vocabulary is small. It is small at a vocabulary of 8,192: PR 1218
dropped the table there.

Source: PR 549; PR 1219 (3,072 rows of 160 channels at a vocabulary of 1,024).

Legal: the row depends on the current token and the previous token of the same document only.

Cost: `buckets` x `width` weights for the table, `width` x model width for the projection. One table
look-up and one small product per token.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from underpar.recipe import ModelSpec, require
from underpar.seams import BOS_ID, KVCache

STAGE = "model"

# Odd multipliers of PR 549. They differ, so the pairs (a, b) and (b, a) have different hashes.
CURRENT, PREVIOUS = 36_313, 27_191


@dataclass(frozen=True)
class Settings:
    """`buckets`: rows of the hash table.
    `width`: channels of a row, before the projection to the model's width.
    `scale`: factor on the projected vector at the start of training; it is learned.
    `by_piece`: true means that the first token of a segment counts as having no previous token (PR
    1219); false means that only a document's first token does.
    """

    buckets: int = 3072
    width: int = 160
    scale: float = 0.05
    by_piece: bool = False

    def __post_init__(self) -> None:
        require(self.buckets > 1, f"levers.bigram.buckets = {self.buckets}: expected at least 2")
        require(self.width > 0, f"levers.bigram.width = {self.width}: expected at least 1")


TINY = (Settings(), Settings(by_piece=True))


def rows_of_pairs(
    tokens: Tensor, previous: Tensor, has_no_previous: Tensor, num_rows: int
) -> Tensor:
    """The row (N,) of each pair in a table; the last row is for no pair."""
    last = num_rows - 1
    pair_hash = (CURRENT * tokens) ^ (PREVIOUS * previous)
    return torch.where(has_no_previous, last, pair_hash % last)


class Lever(nn.Module):
    """x_t + scale * P table[hash(token t, token t-1)]; the last row is for "no previous token"."""

    def __init__(self, settings: Settings, spec: ModelSpec) -> None:
        super().__init__()
        self.by_piece = settings.by_piece
        self.table = nn.Embedding(settings.buckets, settings.width)
        self.project = nn.Linear(settings.width, spec.dim, bias=False)
        self.scale = nn.Parameter(torch.tensor(settings.scale))
        nn.init.zeros_(self.table.weight)
        nn.init.orthogonal_(self.project.weight)

    def neutral_(self) -> None:
        """Set the table to zero."""
        nn.init.zeros_(self.table.weight)

    def embed(self, x: Tensor, tokens: Tensor, cache: KVCache) -> Tensor:
        """Add the vector of each pair to the embeddings x (N, dim) of tokens (N,)."""
        has_no_previous = cache.positions == 0 if self.by_piece else tokens == BOS_ID
        previous = cache.previous("bigram", tokens)
        rows = rows_of_pairs(tokens, previous, has_no_previous, self.table.num_embeddings)
        pair = self.project(self.table(rows))
        return x + self.scale.to(x.dtype) * pair.to(x.dtype)
