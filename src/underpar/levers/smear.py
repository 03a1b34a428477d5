"""SmearGate: adds a gated share of the previous token's embedding to each token's embedding.

Attention would first have to learn to look one token back; with this lever every pair of neighbours
is available from the start. The gate is read from the first channels of the current token. It is
closed at a document's first token, so nothing leaks in from the document before.

Source: PR 1667, PR 2014. PR 1797 leaked across documents and PR 1851 fixed the leak. PR 2135 trains
without the mask.

Legal: the mix reads the current and the previous token only. Scoring always applies the mask.

Cost: `width` + 1 weights and a few element-wise operations on the embeddings.
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
    """`init`: strength at the start of training. 0 is the published value; short runs want more.
    `width`: number of channels of the current token that the gate reads.
    `bos_mask`: false lets training mix across document boundaries (PR 2135); scoring never does.
    """

    init: float = 0.0
    width: int = 12
    bos_mask: bool = True

    def __post_init__(self) -> None:
        require(self.width > 0, f"levers.smear.width = {self.width}: expected at least 1")


class Lever(nn.Module):
    """x_t + strength * sigmoid(W x_t[:width]) * x_{t-1}, unless token t begins a document."""

    def __init__(self, settings: Settings, spec: ModelSpec) -> None:
        super().__init__()
        self.width = min(settings.width, spec.dim)
        self.bos_mask = settings.bos_mask
        self.strength = nn.Parameter(torch.tensor(settings.init))
        self.gate = nn.Parameter(torch.zeros(self.width))

    def neutral_(self) -> None:
        """Set the strength to 0: nothing of the previous token is added."""
        nn.init.zeros_(self.strength)

    def embed(self, x: Tensor, tokens: Tensor, cache: KVCache) -> Tensor:
        """Mix the previous token into the embeddings x (N, dim) of tokens (N,)."""
        gate = self.strength * torch.sigmoid(x[:, : self.width] @ self.gate.to(x.dtype))  # (N,)
        if self.bos_mask or not self.training:
            gate = gate * (tokens != BOS_ID)
        return x + gate.to(x.dtype)[:, None] * cache.previous("smear", x)
