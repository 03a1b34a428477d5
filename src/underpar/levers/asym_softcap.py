"""Asymmetric soft cap: positive and negative logits have a cap each.

The loss contains the caps, so they learn, unlike in its public form: there the training loss has no
path to them and they stay where they start, an exact identity (PR 1945, PR 2014, PR 2135). Those
recipes keep them frozen as published (`train = false`). Source: PR 1945. Legal: ordinary weights.
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
    """`train`: false leaves the caps to adaptation."""

    train: bool = True


class AsymSoftcap(nn.Module):
    """c tanh(l / c), with a c for each sign of l."""

    def __init__(self, settings: Settings, spec: ModelSpec) -> None:
        super().__init__()
        self.start = spec.softcap
        start = torch.tensor(spec.softcap)
        self.cap_positive = nn.Parameter(start.clone(), requires_grad=settings.train)
        self.cap_negative = nn.Parameter(start.clone(), requires_grad=settings.train)

    def neutral_(self) -> None:
        """Both at the model's constant."""
        nn.init.constant_(self.cap_positive, self.start)
        nn.init.constant_(self.cap_negative, self.start)

    def cap(self, logits: Tensor, fused: bool) -> Tensor:
        """Bound the logits (N, V)."""
        positive = logits > 0
        cap = torch.where(positive, self.cap_positive, self.cap_negative)
        scale = torch.where(positive, 2.0 / self.cap_positive, 2.0 / self.cap_negative)
        return soft_cap(logits, cap, scale, fused)


def plug(settings: Settings, spec: ModelSpec) -> AsymSoftcap:
    """The module to hook in."""
    return AsymSoftcap(settings, spec)
