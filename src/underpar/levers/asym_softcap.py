"""Asymmetric soft cap: gives positive and negative logits a cap each.

The loss contains the caps, so they learn. In the public form the training loss has no path to them:
they stay at their start, which makes the lever an exact identity there (PR 1945, PR 2014, PR 2135).
The recipes of these systems keep the caps frozen as published (`train = false`).

Source: PR 1945.

Legal: ordinary weights.

Cost: two weights and one selection per logit.
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
    """`train`: false keeps both caps fixed in training and in the global phase (`phased_sgd`), and
    leaves them to levers that name them, as `adapt_scales` does.
    """

    train: bool = True


class Lever(nn.Module):
    """c tanh(logit / c), with one c per sign of the logit."""

    def __init__(self, settings: Settings, spec: ModelSpec) -> None:
        super().__init__()
        require(spec.softcap > 0, "levers.asym_softcap: model.softcap = 0 is no cap to start from")
        self.start = spec.softcap
        start = torch.tensor(spec.softcap)
        self.cap_positive = nn.Parameter(start.clone(), requires_grad=settings.train)
        self.cap_negative = nn.Parameter(start.clone(), requires_grad=settings.train)
        # A predictor freezes every weight; this says which were frozen before.
        self.frozen = () if settings.train else ("cap_positive", "cap_negative")

    def neutral_(self) -> None:
        """Set both caps to the model's constant."""
        nn.init.constant_(self.cap_positive, self.start)
        nn.init.constant_(self.cap_negative, self.start)

    def cap(self, logits: Tensor, fused: bool) -> Tensor:
        """Bound the logits (N, V)."""
        positive = logits > 0
        cap = torch.where(positive, self.cap_positive, self.cap_negative)
        scale = torch.where(positive, 2.0 / self.cap_positive, 2.0 / self.cap_negative)
        return soft_cap(logits, cap, scale, fused)
