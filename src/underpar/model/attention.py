"""Self-attention with grouped keys, query-key norm and rotary positions."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from underpar.model.hooks import Hooks
from underpar.model.rotary import rotate
from underpar.recipe import ModelSpec
from underpar.seams import Stream, Visit


class Attention(nn.Module):
    """Project, norm and rotate, let the past be attended to, project back."""

    def __init__(self, spec: ModelSpec, layer: int, hooks: Hooks) -> None:
        super().__init__()
        self.layer = layer
        self.hooks = hooks
        self.head_dim = spec.head_dim
        # The nearest reach counts; 0 is no limit.
        self.window = min((r for hook in hooks.reach if (r := hook(layer)) > 0), default=0)
        kv_dim = spec.num_kv_heads * spec.head_dim
        self.q = nn.Linear(spec.dim, spec.dim, bias=False)
        self.k = nn.Linear(spec.dim, kv_dim, bias=False)
        self.v = nn.Linear(spec.dim, kv_dim, bias=False)
        self.o = nn.Linear(spec.dim, spec.dim, bias=False)

    def forward(self, x: Tensor, visit: Visit, stream: Stream) -> Tensor:
        """x (N, dim), already normed -> (N, dim)."""
        q, k, v = self.q(x), self.k(x), self.v(x)
        for hook in self.hooks.adjust:
            q, k, v = (hook(site, visit, y, x) for site, y in (("q", q), ("k", k), ("v", v)))
        q, k, v = (t.unflatten(-1, (-1, self.head_dim)) for t in (q, k, v))
        # Unit-RMS queries and keys bound the scores (Henry et al. 2020, arXiv:2010.04245).
        q, k = (F.rms_norm(t, (self.head_dim,)).to(v.dtype) for t in (q, k))
        q, k = rotate(q, stream.angles), rotate(k, stream.angles)
        for hook in self.hooks.qkv:
            q, k, v = hook(visit, q, k, v, stream)
        y = stream.past.attend(visit.slot, q, k, v, self.window)
        for hook in self.hooks.attn_out:
            y = hook(self.layer, y, x, v)
        out: Tensor = self.o(y.flatten(-2))
        for hook in self.hooks.adjust:
            out = hook("o", visit, out, x)
        return out
