"""Differential attention: a head is the difference of two softmax maps, which cancels their noise.

Neighbouring key heads are the two sides of a pair, and their values side by side are the pair's
values: y = (softmax(q1 k1) - lambda softmax(q2 k2)) (v1, v2), then a norm per head, a gain, and the
factor 1 - start. lambda = exp(a . b) - exp(c . d) + start is learned per layer; its start rises
with depth, from 0.2 towards 0.8. Kernels want values as wide as keys, so both sides attend to v1 in
one call and to v2 in another.

Source: Ye et al. 2024, arXiv:2410.05258, which has the layout, the schedule of lambda and the norm.
PR 1894 has it in an older study. A related form was 12.1 mBPB worse at equal time, as a step took
30 % longer (PR 932).

Legal: attention is causal on both sides, and a head mixes only what it attended to.

Cost: attention twice, two caches of keys and values when stepping, and six vectors of a head's
width per layer.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from underpar.recipe import ModelSpec, require
from underpar.seams import KVCache, Visit, check_layers

STAGE = "model"


@dataclass(frozen=True)
class Settings:
    """`layers`: layers it acts on; empty means all."""

    layers: tuple[int, ...] = ()


# A layer of the loop and one outside.
TINY = (Settings(layers=(1, 3)),)


class Lever(nn.Module):
    """Four vectors, of which lambda is made, and the gains of the norm, per layer."""

    def __init__(self, settings: Settings, spec: ModelSpec) -> None:
        super().__init__()
        layers = check_layers("diff_attn", settings.layers, spec)
        self.layers = layers or tuple(range(spec.num_layers))
        num = spec.num_kv_heads
        require(num % 2 == 0, f"model.num_kv_heads = {num}: levers.diff_attn needs an even number")
        self.vectors = nn.Parameter(0.1 * torch.randn(len(self.layers), 4, spec.head_dim))
        self.gain = nn.Parameter(torch.ones(len(self.layers), 2 * spec.head_dim))

    def neutral_(self) -> None:
        """Nothing to set: the norm makes it another network for all weights."""

    @torch.no_grad()
    def agree_(self, blocks: Sequence[Any], plain: Sequence[Any]) -> None:
        """Silence attention in its layers."""
        for layer in self.layers:
            for block in (blocks[layer], plain[layer]):
                block.attn_scale.zero_()

    def attend(
        self, visit: Visit, q: Tensor, k: Tensor, v: Tensor, cache: KVCache, window: int
    ) -> Tensor:
        """Attend with both sides to both halves of the values, and subtract the second side.

        A head of the result stands where plain attention has one that reads the same half.
        """
        if visit.layer not in self.layers:
            return cache.attend(visit.slot, q, k, v, window)
        row, start = self.layers.index(visit.layer), 0.8 - 0.6 * math.exp(-0.3 * visit.layer)
        # Slots of the plan are 0 and above.
        slots = (visit.slot, ~visit.slot)
        halves = [
            cache.attend(slot, q, k, v[:, half::2].repeat_interleave(2, dim=1), window)
            for half, slot in enumerate(slots)
        ]
        # K / 2 pairs of key heads with R = H / K heads on each of two sides.
        y = torch.cat(halves, dim=-1).unflatten(1, (v.size(1) // 2, 2, -1))  # (N, K/2, 2, R, 2D)
        a, b, c, d = self.vectors[row].unbind()
        share = (a * b).sum().exp() - (c * d).sum().exp() + start
        y = y[:, :, 0] - share.to(y.dtype) * y[:, :, 1]  # (N, K/2, R, 2D)
        gain = (self.gain[row] * (1 - start)).to(y.dtype)
        y = gain * F.rms_norm(y, (y.size(-1),)).to(y.dtype)
        return y.unflatten(-1, (2, -1)).transpose(2, 3).flatten(1, 3)
