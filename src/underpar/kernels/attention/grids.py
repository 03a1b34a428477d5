"""Packed attention on padded grids: torch's dense kernels on pieces of like length."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from underpar.kernels.attention.backend import Backend, Pieces, make_backend
from underpar.kernels.attention.memo import Memo
from underpar.kernels.attention.reference import band

# Pieces up to this long share a bucket; longer ones are sorted by powers of two.
SHORTEST_BUCKET = 32

_PACKS = Memo()


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
    # Two at least: cuDNN has no kernel for one key.
    offsets = torch.arange(max(2, int(lengths.max())))
    real = offsets < lengths[:, None]
    # Padding reads the piece's last token; causality keeps it from every real query.
    grid = starts[:, None] + torch.minimum(offsets, lengths[:, None] - 1)
    return grid, real.flatten().nonzero()[:, 0]


def attend_grids(
    q: Tensor, k: Tensor, v: Tensor, pieces: Pieces, kernels: list[SDPBackend]
) -> Tensor:
    """Causal attention within each piece by one of `kernels`; see the operator for the shapes."""
    pack = _PACKS.recall(pieces.cu, None, lambda: Pack.from_boundaries(pieces.cu))
    outs = []
    for grid, cells in pack.grids:
        # index_select: its backward adds rows, where plain indexing would sort them first.
        rows = (t.index_select(0, grid.flatten()) for t in (q, k, v))
        queries, keys, values = (r.unflatten(0, grid.shape).transpose(1, 2) for r in rows)
        with sdpa_kernel(kernels):
            y = _attend_rows(queries, keys, values, pieces.window)
        outs.append(y.transpose(1, 2).flatten(0, 1).index_select(0, cells))
    return torch.cat(outs).index_select(0, pack.order)


def _attend_rows(q: Tensor, k: Tensor, v: Tensor, window: int) -> Tensor:
    """q (S, H, L, D), k and v (S, K, L, D) -> (S, H, L, D)."""
    length, group = q.size(2), q.size(1) // k.size(1)
    if window == 0 or window >= length - 1:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=group > 1)
    # The memory-efficient kernel, the fused one that takes a mask, takes no grouped heads.
    k, v = (t.repeat_interleave(group, dim=1) for t in (k, v))
    mask = band(length, window, q.device)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)


def _make(name: str, what: str, kernels: list[SDPBackend], cuda_halves: bool = False) -> Backend:
    return make_backend(name, what, partial(attend_grids, kernels=kernels), cuda_halves)


# Not cuDNN: it plans anew for every shape, and here no two batches have the same.
SDPA = _make(
    "sdpa",
    "padded grids, torch chooses the kernel",
    [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH],
)
CUDNN = _make("cudnn", "padded grids on cuDNN", [SDPBackend.CUDNN_ATTENTION], cuda_halves=True)
