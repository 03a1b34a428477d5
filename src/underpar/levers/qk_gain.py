"""A learned gain on the queries of each head: sharper attention from the first step.

With unit-RMS queries and keys the scores are bounded by sqrt(D); a gain above 1 lifts that bound.
Source: PR 1125 (1.5 -> 4 gained 3.9 mBPB in short runs), PR 1413, PR 1953. Legal: it is an ordinary
weight of the network, trained on training text.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from underpar.recipe import ModelSpec
from underpar.seams import Stream, Visit

STAGE = "model"


@dataclass(frozen=True)
class Settings:
    """`init`: the gain every head starts from; 1 is neutral."""

    init: float = 5.25


class QKGain(nn.Module):
    """One gain a head and layer."""

    def __init__(self, settings: Settings, spec: ModelSpec) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.full((spec.num_layers, spec.num_heads), settings.init))

    def neutral_(self) -> None:
        """Set every gain to 1."""
        nn.init.ones_(self.gain)

    def qkv(
        self, visit: Visit, q: Tensor, k: Tensor, v: Tensor, stream: Stream
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Scale the queries (N, H, D)."""
        return q * self.gain[visit.layer].to(q.dtype)[:, None], k, v


def plug(settings: Settings, spec: ModelSpec) -> QKGain:
    """The module to hook in."""
    return QKGain(settings, spec)
