"""SmearGate: a gated share of the previous token's embedding is added to each token's.

It hands the network every pair of neighbours for free, where attention would first have to learn to
look one token back. The gate reads the first channels of the current token; at a document's first
token it is shut, so nothing leaks from the document before (PR 1797 leaked, PR 1851 mended it;
PR 2135 trains without the mask). Source: PR 1667, PR 2014. Legal: the mix uses the current and the
previous token only; scoring is always masked, as every document is priced on its own.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from underpar.recipe import ModelSpec, require
from underpar.seams import BOS_ID, KVCache

STAGE = "model"


@dataclass(frozen=True)
class Settings:
    """`init`: strength at the start (0 as published; short runs want more); `width`: channels the
    gate reads; `bos_mask`: false lets training smear over the edges of documents."""

    init: float = 0.0
    width: int = 12
    bos_mask: bool = True

    def __post_init__(self) -> None:
        require(self.width > 0, f"levers.smear.width = {self.width}: expected at least 1")


class Smear(nn.Module):
    """x_t + strength * sigmoid(W x_t[:width]) * x_{t-1}, unless token t begins a document."""

    def __init__(self, settings: Settings, spec: ModelSpec) -> None:
        super().__init__()
        self.width = min(settings.width, spec.dim)
        self.bos_mask = settings.bos_mask
        self.strength = nn.Parameter(torch.tensor(settings.init))
        self.gate = nn.Parameter(torch.zeros(self.width))

    def neutral_(self) -> None:
        """Add nothing of the token before."""
        nn.init.zeros_(self.strength)

    def embed(self, x: Tensor, tokens: Tensor, cache: KVCache) -> Tensor:
        """Smear the embeddings x (N, dim) of tokens (N,)."""
        gate = self.strength * torch.sigmoid(x[:, : self.width] @ self.gate.to(x.dtype))  # (N,)
        if self.bos_mask or not self.training:
            gate = gate * (tokens != BOS_ID)
        return x + gate.to(x.dtype)[:, None] * cache.previous("smear", x)


def plug(settings: Settings, spec: ModelSpec) -> Smear:
    """The module to hook in."""
    return Smear(settings, spec)
