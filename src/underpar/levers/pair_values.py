"""Pair values: adds a learned vector per pair of neighbouring tokens to the values of one head.

The pair (token, previous token) is hashed to a row of a table, as in `bigram`, but the row is as
wide as a head. It is added to the values of one key head in several layers, each with a gain of its
own, without a projection: attention to a token then also finds the token that stood before it.

Source: modded-nanogpt, record 62 (a table of pairs read in every layer, 9 % of the steps) and PR
366 (rows added to the values of a single head in 8 layers, 11 % of the steps).

Legal: the row depends on the current token and the previous token of the same document only.

Cost: `buckets` x head width weights for the table. One table look-up per token, one multiply-add
per token and layer on the values of one head.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from underpar.levers.bigram import rows_of_pairs
from underpar.recipe import ModelSpec, require
from underpar.seams import BOS_ID, Stream, Visit, check_layers

STAGE = "model"


@dataclass(frozen=True)
class Settings:
    """`buckets`: rows of the hash table.
    `layers`: layers whose values get the vector; empty means all.
    `head`: the key head whose values get the vector.
    `gain`: factor on the vector at the start of training; each layer learns its own.
    """

    buckets: int = 16_384
    layers: tuple[int, ...] = ()
    head: int = 0
    gain: float = 0.2

    def __post_init__(self) -> None:
        buckets = self.buckets
        require(buckets > 1, f"levers.pair_values.buckets = {buckets}: expected at least 2")
        require(self.head >= 0, f"levers.pair_values.head = {self.head}: expected 0 or more")


class Lever(nn.Module):
    """v_head + gain_layer table[hash(token t, token t-1)]; the last row is for no pair."""

    def __init__(self, settings: Settings, spec: ModelSpec) -> None:
        super().__init__()
        self.layers = check_layers("pair_values", settings.layers, spec) or tuple(
            range(spec.num_layers)
        )
        require(
            settings.head < spec.num_kv_heads,
            f"levers.pair_values.head = {settings.head}: the model has {spec.num_kv_heads} key "
            "heads, numbered from 0",
        )
        self.head = settings.head
        self.table = nn.Embedding(settings.buckets, spec.head_dim)
        self.gain = nn.Parameter(torch.full((len(self.layers),), settings.gain))
        nn.init.zeros_(self.table.weight)

    def neutral_(self) -> None:
        """Set the table to zero."""
        nn.init.zeros_(self.table.weight)

    def qkv(
        self, visit: Visit, q: Tensor, k: Tensor, v: Tensor, stream: Stream
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Add the vector of the pair to the values (N, K, D) of one head."""
        if visit.layer not in self.layers:
            return q, k, v
        if "pair_values" not in stream.kept:
            tokens = stream.tokens
            previous = stream.cache.previous("pair_values", tokens)
            num_rows = self.table.num_embeddings
            rows = rows_of_pairs(tokens, previous, tokens == BOS_ID, num_rows)
            stream.kept["pair_values"] = self.table(rows).to(v.dtype)
        gain = self.gain[self.layers.index(visit.layer)].to(v.dtype)
        added = v[:, self.head] + gain * stream.kept["pair_values"]
        return q, k, torch.cat((v[:, : self.head], added[:, None], v[:, self.head + 1 :]), dim=1)
