"""Packed attention by FlexAttention: a compiled kernel and a table of the blocks that it visits.

The table follows from the boundaries by integer arithmetic on blocks; the mask is never evaluated
for all pairs of tokens. FlexAttention is Dong et al. 2024, arXiv:2412.05496.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import torch
from torch import Tensor

from underpar.kernels.attention.backend import Pieces, make_backend
from underpar.kernels.attention.memo import Memo

BLOCK = 128

_MASKS = Memo()


def attend_blocks(q: Tensor, k: Tensor, v: Tensor, pieces: Pieces) -> Tensor:
    """Causal attention within each piece, with the shapes of `attend`."""
    num, window = q.size(0), pieces.window
    mask = _MASKS.recall(pieces.cu, (num, window), lambda: block_mask(pieces.cu, num, window))
    queries, keys, values = (t.transpose(0, 1)[None] for t in (q, k, v))  # (1, heads, N, D)
    gqa = q.size(1) != k.size(1)
    out: Tensor = _kernel()(queries, keys, values, block_mask=mask, enable_gqa=gqa)
    return out[0].transpose(0, 1)


@cache
def _kernel() -> Callable[..., Any]:
    from torch.nn.attention.flex_attention import flex_attention

    # fullgraph: an error is better than running uncompiled, which stores the scores of all pairs.
    return torch.compile(flex_attention, fullgraph=True)


def block_mask(cu: Tensor, num_tokens: int, window: int) -> Any:
    """The mask of one batch in the form that FlexAttention reads."""
    from torch.nn.attention.flex_attention import BlockMask

    starts = starts_of(cu, num_tokens)

    def sees(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        seen = (starts[query] <= key) & (key <= query)
        return seen & (query - key <= window) if window else seen

    partial, full = block_tables(starts, window)
    return BlockMask.from_kv_blocks(
        *_ordered(partial),
        *_ordered(full),
        BLOCK_SIZE=BLOCK,
        mask_mod=sees,
        seq_lengths=(num_tokens, num_tokens),
    )


def starts_of(cu: Tensor, num_tokens: int) -> Tensor:
    """Where the piece of each token begins, (num_tokens,)."""
    tokens = torch.arange(num_tokens, dtype=cu.dtype, device=cu.device)
    # The last boundary at or before each token. Empty pieces repeat a boundary; any copy will do.
    return cu[torch.searchsorted(cu, tokens, right=True) - 1]


def block_tables(starts: Tensor, window: int, block: int = BLOCK) -> tuple[Tensor, Tensor]:
    """Which blocks of keys each block of queries sees in part, and which as a whole; (B, B)."""
    num_tokens, device = len(starts), starts.device
    heads = torch.arange(0, num_tokens, block, device=device)
    tails = (heads + block).clamp(max=num_tokens) - 1
    # The first query of a block sees farthest back: keys before `first` are seen by no query.
    first = starts[heads]
    # The last query sees least far back: keys from `whole` on are seen by every query.
    whole = starts[tails]
    if window:
        first, whole = torch.maximum(first, heads - window), torch.maximum(whole, tails - window)
    numbers = torch.arange(len(heads), device=device)
    below = numbers < numbers[:, None]
    full = below & (heads >= whole[:, None])
    seen = (numbers >= (first // block)[:, None]) & (numbers <= numbers[:, None])
    return seen & ~full, full


def _ordered(table: Tensor) -> tuple[Tensor, Tensor]:
    """The table in the form of FlexAttention: counts (1, 1, B) and indices (1, 1, B, B), int32."""
    counts = table.sum(-1, dtype=torch.int32)
    indices = table.int().argsort(dim=-1, descending=True, stable=True)
    return counts[None, None], indices.int()[None, None]


# Only by name: attention may first run while torch compiles the model, and trying this backend
# would start another compilation inside that one.
FLEX = replace(
    make_backend("flex", "FlexAttention, compiled", attend_blocks, cuda_halves=True), by_name=True
)
