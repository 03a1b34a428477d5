"""Value residual: adds a share of the first layer's values to the values of every other layer.

v <- v + sigmoid(alpha) v_first, with one alpha per layer.

Source: ResFormer (Zhou et al. 2024, arXiv:2410.17897). PR 1219 has it, switched off. Reports
differ: 2.4 mBPB better in a bundle (PR 2068), 2.2 mBPB worse alone (PR 2005).

Legal: it reads the token's own values.

Cost: one weight per layer, one multiply-add on the values, and the memory of the first values.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from underpar.recipe import ModelSpec
from underpar.seams import Stream, Visit

STAGE = "model"


@dataclass(frozen=True)
class Settings:
    """`init`: alpha at the start of training; the share is its sigmoid."""

    init: float = 0.0


class Lever(nn.Module):
    """One share per layer; that of the first layer is not used."""

    def __init__(self, settings: Settings, spec: ModelSpec) -> None:
        super().__init__()
        self.alpha = nn.Parameter(torch.full((spec.num_layers,), settings.init))

    def neutral_(self) -> None:
        """Set alpha to -200, whose sigmoid is exactly 0: nothing is added."""
        nn.init.constant_(self.alpha, -200.0)

    def dead(self, plan: Sequence[Visit]) -> dict[str, Tensor]:
        """The share of the first layer, unless a loop visits that layer again."""
        later = [visit.layer for visit in plan[1:]]
        return {"alpha": torch.tensor([layer not in later for layer in range(len(self.alpha))])}

    def qkv(
        self, visit: Visit, q: Tensor, k: Tensor, v: Tensor, stream: Stream
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Keep the first values (N, K, D) and add a share of them to all later values."""
        if "value_residual" not in stream.kept:
            stream.kept["value_residual"] = v
            return q, k, v
        share = torch.sigmoid(self.alpha[visit.layer]).to(v.dtype)
        return q, k, v + share * stream.kept["value_residual"]
