"""The baseline transformer, from embedding to logits, top to bottom.

Shapes: N tokens (a flat pack of documents, or one token of each lane when stepping), H heads,
K key heads, D head channels, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from underpar.model.attention import Attention
from underpar.model.mlp import MLP
from underpar.recipe import ModelSpec
from underpar.seams import MODEL_SEAMS, Past


class Block(nn.Module):
    """Pre-norm attention and MLP, each with a learned scale per channel."""

    def __init__(self, spec: ModelSpec, layer: int) -> None:
        super().__init__()
        self.attn = Attention(spec, layer)
        self.mlp = MLP(spec)
        self.attn_scale = nn.Parameter(torch.ones(spec.dim))
        self.mlp_scale = nn.Parameter(torch.ones(spec.dim))

    def forward(self, x: Tensor, *attention_args: Any) -> Tensor:
        """x (N, dim) -> (N, dim)."""
        x = x + self.attn_scale * self.attn(_norm(x), *attention_args)
        return x + self.mlp_scale * self.mlp(_norm(x))


class GPT(nn.Module):
    """Embed -> blocks -> tied head with a soft cap. Levers hook in by name; none is known here."""

    def __init__(self, spec: ModelSpec, levers: Mapping[str, nn.Module] | None = None) -> None:
        super().__init__()
        self.spec = spec
        self.embedding = nn.Embedding(spec.vocab_size, spec.dim)
        self.blocks = nn.ModuleList(Block(spec, layer) for layer in range(spec.num_layers))
        # A tensor, so that scoring may adapt it; it is trained with the other scalars.
        self.softcap = nn.Parameter(torch.tensor(spec.softcap))
        self.levers = nn.ModuleDict(dict(levers or {}))
        self.hooks = {
            seam: [getattr(lever, seam) for lever in self.levers.values() if hasattr(lever, seam)]
            for seam in MODEL_SEAMS
        }
        self.init_weights()

    def init_weights(self) -> None:
        """Zero output projections: every block starts as the identity (PR 2014)."""
        nn.init.normal_(self.embedding.weight, std=self.spec.embed_std)
        for module in self.modules():
            if isinstance(module, Attention):
                for projection in (module.q, module.k, module.v):
                    nn.init.orthogonal_(projection.weight)
                nn.init.zeros_(module.o.weight)
            elif isinstance(module, MLP):
                nn.init.orthogonal_(module.up.weight)
                nn.init.zeros_(module.down.weight)

    def forward(self, tokens: Tensor, positions: Tensor, past: Past) -> Tensor:
        """Logits (N, V) after each of tokens (N,) at positions (N,) of its piece."""
        return self.head(self.hidden(tokens, positions, past))

    def hidden(self, tokens: Tensor, positions: Tensor, past: Past) -> Tensor:
        """What the head reads (N, dim): everything but the vocabulary."""
        x = self.embedding(tokens)
        for hook in self.hooks["embed"]:
            x = hook(x, tokens, past)
        x = _norm(x)
        first: Any = self.blocks[0]
        angles = first.attn.rotary.angles(positions)
        for block in self.blocks:
            x = block(x, angles, past, self.hooks)
        return _norm(x)

    def head(self, x: Tensor) -> Tensor:
        """Logits (N, V) of hidden states (N, dim); each row on its own."""
        logits = F.linear(x, self.embedding.weight)
        # Soft cap as in Gemma 2 (arXiv:2408.00118).
        logits = self.softcap * torch.tanh(logits / self.softcap)
        for hook in self.hooks["logits"]:
            logits = hook(logits)
        return logits


def _norm(x: Tensor) -> Tensor:
    return F.rms_norm(x, (x.size(-1),))
