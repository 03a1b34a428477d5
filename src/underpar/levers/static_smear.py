"""Static smear: mixes a fixed, learned share of the previous token into each channel.

x <- (1 - g) x + g x_previous on the normed embeddings, with g = sigmoid(gamma) per channel. At the
start of training each token is half itself and half its predecessor. The lever knows segments, not
documents: only the first token of a segment has no predecessor.

Source: PR 1219, whose stem it is.

Legal: the mix reads the current and the previous token only.

Cost: one weight per channel and three element-wise operations on the embeddings.
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
    """`init`: gamma at the start of training; the share of the previous token is its sigmoid."""

    init: float = 0.0


class Lever(nn.Module):
    """One share per channel."""

    def __init__(self, settings: Settings, spec: ModelSpec) -> None:
        super().__init__()
        self.gamma = nn.Parameter(torch.full((spec.dim,), settings.init))

    def neutral_(self) -> None:
        """Set gamma to -200, whose sigmoid is exactly 0: nothing is mixed in."""
        nn.init.constant_(self.gamma, -200.0)

    def stem(self, x: Tensor, tokens: Tensor, cache: KVCache) -> Tensor:
        """Mix the previous token into the normed embeddings x (N, dim)."""
        share = torch.sigmoid(self.gamma).to(x.dtype)
        has_previous = (cache.positions > 0).to(x.dtype)[:, None]
        return (1.0 - share) * x + share * has_previous * cache.previous("static_smear", x)
