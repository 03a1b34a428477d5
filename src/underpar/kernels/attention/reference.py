"""Packed causal attention in plain torch: the definition of the operator."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

# Not cuDNN: it plans anew for every shape, and here no two batches have the same.
BACKENDS = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]

# Pieces up to this long share a bucket; longer ones are sorted by powers of two.
SHORTEST_BUCKET = 32


@dataclass(frozen=True)
class Pack:
    """Where the pieces of a flat pack lie in padded grids, worked out once a batch.

    Pieces of like length share a grid, so that one long piece does not pad all others. Each grid
    (S, L) holds flat positions, piece by row; `cells` (its tokens,) are the real ones among its
    S * L. `order` (N,) puts the tokens of all grids, one grid after the other, back in line.
    """

    grids: tuple[tuple[Tensor, Tensor], ...]
    order: Tensor

    @staticmethod
    def from_boundaries(cu: Tensor) -> Pack:
        """From segment boundaries (S+1,), on their device."""
        # Empty pieces, which only round up the number of boundaries, go.
        bounds = cu.cpu().long().unique_consecutive()
        starts, lengths = bounds[:-1], bounds[1:] - bounds[:-1]
        exponents = torch.ceil(torch.log2(lengths.clamp(min=SHORTEST_BUCKET).double())).long()
        grids, tokens = [], []
        for exponent in exponents.unique().tolist():
            own = exponents == exponent
            grid, cells = _grid(starts[own], lengths[own])
            grids.append((grid.to(cu.device), cells.to(cu.device)))
            tokens.append(grid.flatten()[cells])
        order = torch.cat(tokens).argsort()
        return Pack(tuple(grids), order.to(cu.device))


def _grid(starts: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
    offsets = torch.arange(int(lengths.max()))
    real = offsets < lengths[:, None]
    # Padding reads the piece's last token; causality keeps it from every real query.
    grid = starts[:, None] + torch.minimum(offsets, lengths[:, None] - 1)
    return grid, real.flatten().nonzero()[:, 0]


def attend_packed(q: Tensor, k: Tensor, v: Tensor, pack: Pack) -> Tensor:
    """Causal softmax attention within each piece; q (N, H, D), k and v (N, K, D) -> (N, H, D).

    Query head h reads key head h // (H / K). The scale is 1 / sqrt(D).
    """
    gqa = q.size(1) != k.size(1)
    outs = []
    for grid, cells in pack.grids:
        # index_select: its backward adds rows, where plain indexing would sort them first.
        rows = (t.index_select(0, grid.flatten()) for t in (q, k, v))
        queries, keys, values = (r.unflatten(0, grid.shape).transpose(1, 2) for r in rows)
        with sdpa_kernel(BACKENDS):
            y = F.scaled_dot_product_attention(
                queries, keys, values, is_causal=True, enable_gqa=gqa
            )
        outs.append(y.transpose(1, 2).flatten(0, 1).index_select(0, cells))
    return torch.cat(outs).index_select(0, pack.order)
