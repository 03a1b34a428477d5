"""Value residual: every layer's values get a share of the first layer's.

v <- v + sigmoid(alpha) v_first, one scalar a layer. Source: ResFormer (Zhou et al. 2024,
arXiv:2410.17897); PR 1219 has it, off. Reports differ: 2.4 mBPB better in a bundle (PR 2068), 2.2
worse alone (PR 2005). Legal: it reads the token's own values.
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
    """`init` of alpha: the share starts at its sigmoid."""

    init: float = 0.0


class ValueResidual(nn.Module):
    """One share a layer; the first layer's own is not used."""

    def __init__(self, settings: Settings, spec: ModelSpec) -> None:
        super().__init__()
        self.alpha = nn.Parameter(torch.full((spec.num_layers,), settings.init))

    def neutral_(self) -> None:
        """The sigmoid of -200 is 0 to the last bit."""
        nn.init.constant_(self.alpha, -200.0)

    def dead(self, plan: Sequence[Visit]) -> dict[str, Tensor]:
        """The first layer's share of itself, unless it is visited again."""
        later = [visit.layer for visit in plan[1:]]
        return {"alpha": torch.tensor([layer not in later for layer in range(len(self.alpha))])}

    def qkv(
        self, visit: Visit, q: Tensor, k: Tensor, v: Tensor, stream: Stream
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Keep the first values (N, K, D); add them to all later ones."""
        if "value_residual" not in stream.kept:
            stream.kept["value_residual"] = v
            return q, k, v
        share = torch.sigmoid(self.alpha[visit.layer]).to(v.dtype)
        return q, k, v + share * stream.kept["value_residual"]


def plug(settings: Settings, spec: ModelSpec) -> ValueResidual:
    """The module to hook in."""
    return ValueResidual(settings, spec)
