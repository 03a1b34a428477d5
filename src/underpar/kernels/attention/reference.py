"""Packed causal attention with its softmax written out: the definition of the operator."""

from __future__ import annotations

import math
from itertools import pairwise

import torch
from torch import Tensor

from underpar.kernels.attention.backend import Pieces, make_backend


def attend_by_definition(q: Tensor, k: Tensor, v: Tensor, pieces: Pieces) -> Tensor:
    """q (N, H, D), k and v (N, K, D) -> (N, H, D), piece by piece; fp16 and bf16 use fp32."""
    outs = [
        _attend_piece(q[begin:end], k[begin:end], v[begin:end], pieces.window)
        for begin, end in pairwise(pieces.cu.tolist())
    ]
    return torch.cat(outs).to(q.dtype)


def _attend_piece(q: Tensor, k: Tensor, v: Tensor, window: int) -> Tensor:
    exact = torch.promote_types(q.dtype, torch.float32)
    group = q.size(1) // k.size(1)
    # Query head h reads key head h // group.
    k, v = (t.repeat_interleave(group, dim=1) for t in (k, v))
    q, k, v = (t.to(exact).transpose(0, 1) for t in (q, k, v))  # (H, L, D)
    scores = q @ k.mT / math.sqrt(q.size(-1))  # (H, L, L)
    scores = scores.masked_fill(~band(q.size(1), window, q.device), -math.inf)
    return (scores.softmax(-1) @ v).transpose(0, 1)


def band(length: int, window: int, device: torch.device) -> Tensor:
    """Query i sees key j if i - window <= j <= i; without a window if j <= i. (length, length)."""
    seen = torch.ones(length, length, dtype=torch.bool, device=device).tril()
    return seen.triu(-window) if window else seen


REFERENCE = make_backend(
    "reference", "softmax written out, piece by piece: the definition", attend_by_definition
)
