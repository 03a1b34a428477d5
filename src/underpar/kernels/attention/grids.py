"""Packed attention by torch's dense kernels, on padded grids of pieces of similar length."""

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

# Pieces of up to this many tokens share a grid. Longer ones share it with those whose length rounds
# up to the same power of two.
SHORTEST_BUCKET = 32

_PACKS = Memo()


@dataclass(frozen=True)
class Pack:
    """Where the pieces of a flat pack are in padded grids, computed once per batch.

    Pieces of similar length share a grid, so that one long piece does not pad all others. A grid
    (S, L) has one piece per row and holds positions in the flat pack. The second tensor of a pair
    has the cells, among its S * L, that are tokens and not padding. `order` (N,) brings the tokens
    of all grids, one grid after the other, back into the order of the pack.
    """

    grids: tuple[tuple[Tensor, Tensor], ...]
    order: Tensor

    @staticmethod
    def from_boundaries(cu: Tensor) -> Pack:
        """The grids for boundaries (S + 1,), on their device."""
        # Empty pieces are dropped; they only round up the number of boundaries.
        bounds = cu.cpu().long().unique_consecutive()
        starts, lengths = bounds[:-1], bounds[1:] - bounds[:-1]
        exponents = torch.ceil(torch.log2(lengths.clamp(min=SHORTEST_BUCKET).double())).long()
        grids, tokens = [], []
        for exponent in exponents.unique().tolist():
            chosen = exponents == exponent
            grid, cells = _grid(starts[chosen], lengths[chosen])
            grids.append((grid.to(cu.device), cells.to(cu.device)))
            tokens.append(grid.flatten()[cells])
        order = torch.cat(tokens).argsort()
        return Pack(tuple(grids), order.to(cu.device))


def _grid(starts: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
    # At least two columns: cuDNN has no kernel for a single key.
    offsets = torch.arange(max(2, int(lengths.max())))
    real = offsets < lengths[:, None]
    # Padding repeats the last token of its piece. No real query sees it, because it comes later.
    grid = starts[:, None] + torch.minimum(offsets, lengths[:, None] - 1)
    return grid, real.flatten().nonzero()[:, 0]


def attend_grids(
    q: Tensor, k: Tensor, v: Tensor, pieces: Pieces, kernels: list[SDPBackend]
) -> Tensor:
    """Causal attention within each piece by one of `kernels`, with the shapes of `attend`."""
    pack = _PACKS.recall(pieces.cu, None, lambda: Pack.from_boundaries(pieces.cu))
    outs = []
    for grid, cells in pack.grids:
        # index_select, because the backward pass of plain indexing sorts the rows first.
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
    # Only the memory-efficient kernel takes a mask, and it needs as many key heads as query heads.
    k, v = (t.repeat_interleave(group, dim=1) for t in (k, v))
    mask = band(length, window, q.device)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)


def _make(name: str, what: str, kernels: list[SDPBackend], cuda_halves: bool = False) -> Backend:
    return make_backend(name, what, partial(attend_grids, kernels=kernels), cuda_halves)


# Without cuDNN, which makes a new plan for every shape: here every batch has other shapes.
SDPA = _make(
    "sdpa",
    "padded grids, torch chooses the kernel",
    [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH],
)
CUDNN = _make("cudnn", "padded grids on cuDNN", [SDPBackend.CUDNN_ATTENTION], cuda_halves=True)
