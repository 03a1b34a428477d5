"""A learned soft cap: the bound on the logits is a weight, trained with the network.

c tanh(l / c) with one c, starting at the model's constant; adaptation may move it while scoring.
Source: soft caps, Gemma 2 (arXiv:2408.00118), constant there and in PR 2014. Legal: an ordinary
weight of the network.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from underpar.kernels.capped import soft_cap
from underpar.recipe import ModelSpec

STAGE = "model"


@dataclass(frozen=True)
class Settings:
    """`train`: false leaves the cap to adaptation."""

    train: bool = True


class Softcap(nn.Module):
    """One cap for all logits."""

    def __init__(self, settings: Settings, spec: ModelSpec) -> None:
        super().__init__()
        self.start = spec.softcap
        self.cap_both = nn.Parameter(torch.tensor(spec.softcap), requires_grad=settings.train)

    def neutral_(self) -> None:
        """The model's constant."""
        nn.init.constant_(self.cap_both, self.start)

    def cap(self, logits: Tensor, fused: bool) -> Tensor:
        """Bound the logits (N, V)."""
        return soft_cap(logits, self.cap_both, fused=fused)


def plug(settings: Settings, spec: ModelSpec) -> Softcap:
    """The module to hook in."""
    return Softcap(settings, spec)
