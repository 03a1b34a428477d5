"""Partial key offset: on some channels of a head, each key is that of the token before.

A query that matches such a key finds the token after a match and takes that token's own value. One
layer can then continue a repeated sequence, which otherwise takes two. The shifted channels should
carry no position, so the lever belongs with `partial_rope`. The first token of a document, and the
first of a piece, keep their own keys.

Source: modded-nanogpt, record 49 (PR 169) and record 62, which corrects the choice of channels. The
records let the last key of the document before through; here it is masked.

Legal: the key of a token is made of that token and the one before it.

Cost: no weights; one copy of the shifted channels per visit.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from underpar.recipe import ModelSpec, require
from underpar.seams import BOS_ID, Stream, Visit

STAGE = "model"


@dataclass(frozen=True)
class Settings:
    """`share`: share of each head's channels, counted from the last, whose keys are shifted.
    Rotation starts at the first channel, so these are the ones without a position.
    """

    share: float = 0.5

    def __post_init__(self) -> None:
        require(0 <= self.share <= 1, f"levers.key_offset.share = {self.share:g}: expected 0 to 1")


NEUTRAL = Settings(share=0.0)


class Lever(nn.Module):
    """k_t[c:] <- k_{t-1}[c:], unless token t is the first of its piece or document."""

    def __init__(self, settings: Settings, spec: ModelSpec) -> None:
        super().__init__()
        self.num_kept = spec.head_dim - round(settings.share * spec.head_dim)

    def qkv(
        self, visit: Visit, q: Tensor, k: Tensor, v: Tensor, stream: Stream
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Shift the last channels of the keys (N, K, D); queries and values stay."""
        own, shifted = k[..., : self.num_kept], k[..., self.num_kept :]
        if not shifted.size(-1):
            return q, k, v
        cache = stream.cache
        # Keys are made in each visit, so each visit remembers its own.
        before = cache.previous(f"key_offset.{visit.slot}", shifted)
        is_first = (stream.tokens == BOS_ID) | (cache.positions == 0)
        shifted = torch.where(is_first[:, None, None], shifted, before)
        return q, torch.cat((own, shifted), dim=-1), v
