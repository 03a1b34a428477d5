"""Value residual: adds a share of the first layer's values to the values of every other layer.

v <- v + sigmoid(alpha) v_first, with one alpha per layer. With `blend` the share is constant and
the layer's own values give way to it: v <- (1 - blend) v + blend v_first.

Source: ResFormer (Zhou et al. 2024, arXiv:2410.17897). PR 1219 has the learned share, switched off.
PR 1894 tried half and half (`blend = 0.5`) in an older study, which was slightly worse. Reports
differ: 2.4 mBPB better in a bundle (PR 2068), 2.2 mBPB worse alone (PR 2005).

Legal: it reads the token's own values.

Cost: one weight per layer (none with `blend`), one multiply-add on the values, and the memory of
the first values.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from underpar.recipe import ModelSpec, require
from underpar.seams import Stream, Visit

STAGE = "model"


@dataclass(frozen=True)
class Settings:
    """`init`: alpha at the start of training; the share is its sigmoid.
    `blend`: constant share of the first layer's values, in place of the learned one; 0: learned.
    """

    init: float = 0.0
    blend: float = 0.0

    def __post_init__(self) -> None:
        blend = self.blend
        require(0 <= blend <= 1, f"levers.value_residual.blend = {blend}: expected 0 to 1")


TINY = (Settings(), Settings(blend=0.5))


class Lever(nn.Module):
    """One share per layer; that of the first layer is not used. A constant share is no weight."""

    def __init__(self, settings: Settings, spec: ModelSpec) -> None:
        super().__init__()
        self.blend = settings.blend
        if not self.blend:
            self.alpha = nn.Parameter(torch.full((spec.num_layers,), settings.init))

    def neutral_(self) -> None:
        """Set alpha to -200, whose sigmoid is exactly 0: nothing is added."""
        if not self.blend:
            nn.init.constant_(self.alpha, -200.0)

    @torch.no_grad()
    def agree_(self, blocks: Sequence[Any], plain: Sequence[Any]) -> None:
        """With `blend`, silence attention after the first layer: it reads other values."""
        if self.blend:
            for block in (*blocks[1:], *plain[1:]):
                block.attn_scale.zero_()

    def dead(self, plan: Sequence[Visit]) -> dict[str, Tensor]:
        """The share of the first layer, unless a loop visits that layer again."""
        if self.blend:
            return {}
        later = [visit.layer for visit in plan[1:]]
        return {"alpha": torch.tensor([layer not in later for layer in range(len(self.alpha))])}

    def qkv(
        self, visit: Visit, q: Tensor, k: Tensor, v: Tensor, stream: Stream
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Keep the first values (N, K, D) and add a share of them to all later values."""
        if "value_residual" not in stream.kept:
            stream.kept["value_residual"] = v
            return q, k, v
        first = stream.kept["value_residual"]
        if self.blend:
            return q, k, torch.lerp(v, first, self.blend)
        share = torch.sigmoid(self.alpha[visit.layer]).to(v.dtype)
        return q, k, v + share * first
