"""Self-attention with grouped keys, query-key norm and partial rotary positions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from underpar.model.rotary import Rotary
from underpar.recipe import ModelSpec
from underpar.seams import Past


class Attention(nn.Module):
    """Project, norm and rotate, let the past be attended to, project back."""

    def __init__(self, spec: ModelSpec, layer: int) -> None:
        super().__init__()
        self.layer = layer
        self.head_dim = spec.head_dim
        kv_dim = spec.num_kv_heads * spec.head_dim
        self.q = nn.Linear(spec.dim, spec.dim, bias=False)
        self.k = nn.Linear(spec.dim, kv_dim, bias=False)
        self.v = nn.Linear(spec.dim, kv_dim, bias=False)
        self.o = nn.Linear(spec.dim, spec.dim, bias=False)
        self.rotary = Rotary(spec.rope_dims, spec.rope_base)

    def forward(
        self,
        x: Tensor,
        angles: tuple[Tensor, Tensor],
        past: Past,
        hooks: Mapping[str, Sequence[Any]],
    ) -> Tensor:
        """x (N, dim), already normed -> (N, dim)."""
        q, k, v = (p(x).unflatten(-1, (-1, self.head_dim)) for p in (self.q, self.k, self.v))
        # Unit-RMS queries and keys bound the scores (Henry et al. 2020, arXiv:2010.04245).
        q, k = (F.rms_norm(t, (self.head_dim,)) for t in (q, k))
        q, k = self.rotary(q, angles), self.rotary(k, angles)
        for hook in hooks["qkv"]:
            q, k, v = hook(self.layer, q, k, v)
        y = past.attend(self.layer, q, k, v)
        for hook in hooks["attn_out"]:
            y = hook(self.layer, y, x, v)
        out: Tensor = self.o(y.flatten(-2))
        return out
