"""Partial rotary positions: rotates only the first channels of each head.

The other channels compare content independent of position, which a short training learns faster.
With `ntk_context` the rotary base grows for segments that are longer than that length, so that the
slowest channels turn as far as they did at that length.

Source: PR 315 (16 of 64 channels; 2.3 mBPB jointly with the norm scale); NTK-aware scaling (bloc97
2023, as in PR 1219).

Legal: a function of positions.

Cost: none; fewer channels are rotated.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from underpar.recipe import ModelSpec, require

STAGE = "model"


@dataclass(frozen=True)
class Settings:
    """`dims`: rotated channels per head, an even number; 0 rotates all.
    `ntk_context`: longest segment, in tokens, that keeps the plain base; 0 never rescales.
    """

    dims: int = 16
    ntk_context: int = 0

    def __post_init__(self) -> None:
        even = self.dims >= 0 and self.dims % 2 == 0
        require(even, f"levers.partial_rope.dims = {self.dims}: expected an even number, 0 or more")
        length = self.ntk_context
        require(length >= 0, f"levers.partial_rope.ntk_context = {length}: expected 0 or more")


NEUTRAL = Settings(dims=0)
TINY = (Settings(), Settings(ntk_context=64))


class Lever(nn.Module):
    """Frequencies base ** (-2j / dims) for the channel pairs j of the first `dims` channels."""

    exponents: Tensor

    def __init__(self, settings: Settings, spec: ModelSpec) -> None:
        super().__init__()
        dims = settings.dims or spec.head_dim
        require(
            dims <= spec.head_dim,
            f"levers.partial_rope.dims = {dims}: a head has {spec.head_dim} channels",
        )
        require(
            dims > 2 or not settings.ntk_context,
            "levers.partial_rope.ntk_context: the rule needs 4 rotated channels or more",
        )
        self.base, self.dims, self.ntk_context = spec.rope_base, dims, settings.ntk_context
        exponents = torch.arange(0, dims, 2, dtype=torch.float32) / dims
        self.register_buffer("exponents", exponents, persistent=False)

    def _base_at(self, context: int) -> float:
        """The rotary base for segments of `context` tokens."""
        if not self.ntk_context or context <= self.ntk_context:
            return self.base
        return self.base * (context / self.ntk_context) ** (self.dims / (self.dims - 2))

    def frequencies(self, context: int) -> Tensor:
        """The frequencies (dims / 2,), in fp32."""
        return self._base_at(context) ** -self.exponents
