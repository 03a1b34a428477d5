"""Packed causal attention in plain torch: the definition of the operator."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True)
class Pack:
    """Where the pieces of a flat pack lie in a padded grid, worked out once a batch.

    `grid` (S, L) holds flat positions, piece by row, with any position in the padding;
    `flat` (N,) holds the cell of the grid where each token lies.
    """

    grid: Tensor
    flat: Tensor

    @staticmethod
    def from_boundaries(cu: Tensor, max_len: int) -> Pack:
        """From segment boundaries (S+1,), on their device."""
        cu = cu.long()
        starts, ends = cu[:-1], cu[1:]
        offsets = torch.arange(max_len, device=cu.device)
        # Padding reads the piece's last token; causality keeps it from every real query.
        grid = torch.minimum(starts[:, None] + offsets, (ends - 1)[:, None])
        lengths = ends - starts
        rows = torch.repeat_interleave(torch.arange(len(lengths), device=cu.device), lengths)
        flat = torch.arange(len(rows), device=cu.device) - starts[rows] + rows * max_len
        return Pack(grid, flat)


def attend_packed(q: Tensor, k: Tensor, v: Tensor, pack: Pack) -> Tensor:
    """Causal softmax attention within each piece; q (N, H, D), k and v (N, K, D) -> (N, H, D).

    Query head h reads key head h // (H / K). The scale is 1 / sqrt(D).
    """
    q, k, v = (t[pack.grid].transpose(1, 2) for t in (q, k, v))  # (S, heads, L, D)
    y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=q.size(1) != k.size(1))
    return y.transpose(1, 2).flatten(0, 1)[pack.flat]  # (N, H, D)
