"""Learned soft cap: makes the bound on the logits a trained weight.

c tanh(logit / c) with one c, which starts at the model's constant. Adaptation may move c while
scoring.

Source: soft caps of Gemma 2 (arXiv:2408.00118), constant there and in PR 2014.

Legal: an ordinary weight of the network.

Cost: one weight.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from underpar.kernels.capped import soft_cap
from underpar.recipe import ModelSpec, require

STAGE = "model"


@dataclass(frozen=True)
class Settings:
    """`train`: false keeps the cap fixed in training and leaves it to adaptation."""

    train: bool = True


class Lever(nn.Module):
    """One cap for all logits."""

    def __init__(self, settings: Settings, spec: ModelSpec) -> None:
        super().__init__()
        require(spec.softcap > 0, "levers.softcap: model.softcap = 0 is no cap to start from")
        self.start = spec.softcap
        self.cap_both = nn.Parameter(torch.tensor(spec.softcap), requires_grad=settings.train)
        # A predictor freezes every weight; this says which were frozen before.
        self.frozen = () if settings.train else ("cap_both",)

    def neutral_(self) -> None:
        """Set the cap to the model's constant."""
        nn.init.constant_(self.cap_both, self.start)

    def cap(self, logits: Tensor, fused: bool) -> Tensor:
        """Bound the logits (N, V)."""
        return soft_cap(logits, self.cap_both, fused=fused)
