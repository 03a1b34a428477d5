"""Static smear: every channel mixes a fixed, learned share of the previous token into this one.

x <- (1 - g) x + g x_previous on normed embeddings, g = sigmoid(gamma); at the start half and half.
It knows pieces, not documents: only the first token of a piece has nothing before it. Source:
PR 1219 (as the stem of that recipe). Legal: the mix uses the current and the previous token only.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from underpar.recipe import ModelSpec
from underpar.seams import KVCache

STAGE = "model"


@dataclass(frozen=True)
class Settings:
    """`init` of gamma: the share starts at its sigmoid."""

    init: float = 0.0


class StaticSmear(nn.Module):
    """One share a channel."""

    def __init__(self, settings: Settings, spec: ModelSpec) -> None:
        super().__init__()
        self.gamma = nn.Parameter(torch.full((spec.dim,), settings.init))

    def neutral_(self) -> None:
        """The sigmoid of -200 is 0 to the last bit."""
        nn.init.constant_(self.gamma, -200.0)

    def stem(self, x: Tensor, tokens: Tensor, cache: KVCache) -> Tensor:
        """Smear the normed embeddings x (N, dim)."""
        share = torch.sigmoid(self.gamma).to(x.dtype)
        inside = (cache.positions > 0).to(x.dtype)[:, None]
        return (1.0 - share) * x + share * inside * cache.previous("static_smear", x)


def plug(settings: Settings, spec: ModelSpec) -> StaticSmear:
    """The module to hook in."""
    return StaticSmear(settings, spec)
