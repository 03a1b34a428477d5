"""Logit rescale: bounds the logits by a shifted sigmoid instead of a symmetric tanh.

z = scale sigmoid((logit + shift) / width). Most tokens of a vocabulary are unlikely, so most raw
logits are below zero. The shift puts the steepest part of the curve there, and the range of 23 is
much narrower than the 60 of a soft cap of 30.

Source: modded-nanogpt, record 54 (PR 181), with its three constants. `asym_softcap`, which cites
the same record, is another function: two caps of 30, one per sign.

Legal: a fixed function of the network's logits, the same in training and scoring.

Cost: no weights; as much arithmetic as the soft cap that it replaces.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from underpar.kernels.capped import SAFE_CAP
from underpar.recipe import ModelSpec, require

STAGE = "model"


@dataclass(frozen=True)
class Settings:
    """`scale`: the largest logit; the least is 0.
    `shift`: what is added to the raw logit.
    `width`: what the sum is divided by.
    """

    scale: float = 23.0
    shift: float = 5.0
    width: float = 7.5

    def __post_init__(self) -> None:
        # The loss of compiled training subtracts no maximum before exp.
        require(
            0 < self.scale <= 2 * SAFE_CAP,
            f"levers.logit_rescale.scale = {self.scale:g}: expected more than 0, at most "
            f"{2 * SAFE_CAP:g}",
        )
        require(
            self.width > 0, f"levers.logit_rescale.width = {self.width:g}: expected more than 0"
        )


# 60 sigmoid(l / 15) = 30 tanh(l / 30) + 30, and a constant changes no probability.
NEUTRAL = Settings(scale=60.0, shift=0.0, width=15.0)


class Lever(nn.Module):
    """scale sigmoid((logit + shift) / width)."""

    def __init__(self, settings: Settings, spec: ModelSpec) -> None:
        super().__init__()
        self.settings = settings

    def cap(self, logits: Tensor, fused: bool) -> Tensor:
        """Bound the logits (N, V), in fp32 or more."""
        set_to = self.settings
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        return set_to.scale * torch.sigmoid((logits + set_to.shift) / set_to.width)
