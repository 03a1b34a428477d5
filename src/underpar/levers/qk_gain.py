"""Query gain: multiplies the queries of each head by a learned gain, for sharper attention.

Queries and keys have unit RMS, which bounds the attention scores by sqrt(head dimension). A gain
above 1 lifts that bound from the first step.

Source: PR 1125 (1.5 -> 4 gained 3.9 mBPB in short runs), PR 1413, PR 1953.

Legal: ordinary weights of the network, trained on training text.

Cost: one weight per head and layer, one element-wise product on the queries.
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
    """`init`: gain of every head at the start of training; 1 changes nothing."""

    init: float = 5.25


class Lever(nn.Module):
    """One gain per head and layer."""

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
