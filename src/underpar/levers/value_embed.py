"""Value embeddings: in chosen layers, adds a vector looked up by the token to the values.

It is a second, small embedding that reaches attention without taking room in the stream. The gain
shows if the vocabulary is small; PR 1218 dropped it at a vocabulary of 4,096.

Source: modded-nanogpt; PR 549, PR 1219 (128 channels, layers 9 and 10).

Legal: it reads the token itself.

Cost: vocabulary x `width` weights for the table and one projection to the width of the values. One
look-up and one product per token and chosen layer.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from underpar.recipe import ModelSpec, require
from underpar.seams import Stream, Visit, check_layers

STAGE = "model"


@dataclass(frozen=True)
class Settings:
    """`layers`: layers whose values get the vector; each has a gain of its own.
    `width`: channels of the table, before the projection.
    `scale`: factor on the vector at the start of training; all layers share it and it is learned.
    """

    layers: tuple[int, ...] = (9, 10)
    width: int = 128
    scale: float = 0.1

    def __post_init__(self) -> None:
        require(self.width > 0, f"levers.value_embed.width = {self.width}: expected at least 1")
        require(bool(self.layers), "levers.value_embed.layers is empty: name a layer")


class Lever(nn.Module):
    """v + gain_layer scale P table[token]."""

    def __init__(self, settings: Settings, spec: ModelSpec) -> None:
        super().__init__()
        self.layers = check_layers("value_embed", settings.layers, spec)
        self.table = nn.Embedding(spec.vocab_size, settings.width)
        self.project = nn.Linear(settings.width, spec.num_kv_heads * spec.head_dim, bias=False)
        self.scale = nn.Parameter(torch.tensor(settings.scale))
        self.gain = nn.Parameter(torch.ones(len(self.layers)))
        nn.init.normal_(self.table.weight, std=0.01)
        nn.init.orthogonal_(self.project.weight)

    def neutral_(self) -> None:
        """Set the scale to 0: nothing is added."""
        nn.init.zeros_(self.scale)

    def qkv(
        self, visit: Visit, q: Tensor, k: Tensor, v: Tensor, stream: Stream
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Add the vector of the token to the values (N, K, D)."""
        if visit.layer not in self.layers:
            return q, k, v
        gain = self.gain[self.layers.index(visit.layer)] * self.scale
        token_values = self.project(self.table(stream.tokens)).view_as(v)
        return q, k, v + gain.to(v.dtype) * token_values.to(v.dtype)
