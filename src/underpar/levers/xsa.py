"""XSA, exclusive self-attention: removes from a head's output its part along the token's own value.

Attention then cannot serve as a copy of the token itself, which the residual stream carries anyway.

Source: PR 265 (last 3 layers, 2 mBPB); PR 609 and PR 1125 (all layers, 1.6 to 1.8 mBPB more; a
grouped view instead of repeated values).

Legal: it reads the token's own value vector.

Cost: no weights. One normalization of the values and one dot product per head.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor, nn

from underpar.recipe import ModelSpec, require
from underpar.seams import check_layers

STAGE = "model"


@dataclass(frozen=True)
class Settings:
    """`layers`: layers it acts on; empty means all.
    `strength`: share of the part along the own value that is removed, 0 to 1.
    """

    layers: tuple[int, ...] = ()
    strength: float = 1.0

    def __post_init__(self) -> None:
        strength = self.strength
        require(0 <= strength <= 1, f"levers.xsa.strength = {strength}: expected 0 to 1")


NEUTRAL = Settings(strength=0.0)


class Lever(nn.Module):
    """y - strength (y . v) v, with v the unit value vector of the same token and head group."""

    def __init__(self, settings: Settings, spec: ModelSpec) -> None:
        super().__init__()
        self.layers = check_layers("xsa", settings.layers, spec) or range(spec.num_layers)
        self.strength = settings.strength

    def attn_out(self, layer: int, y: Tensor, x: Tensor, v: Tensor) -> Tensor:
        """Remove from y (N, H, D) its part along v (N, K, D); H / K heads share a value."""
        if layer not in self.layers:
            return y
        unit = F.normalize(v, dim=-1, eps=1e-12)[:, :, None]  # (N, K, 1, D)
        groups = y.unflatten(1, (v.size(1), -1))  # (N, K, H / K, D)
        along = (groups * unit).sum(-1, keepdim=True)
        return (groups - self.strength * along * unit).flatten(1, 2)
