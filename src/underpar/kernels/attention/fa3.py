"""Packed attention by FlashAttention-3 for Hopper GPUs, if its package is installed."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from underpar.kernels.attention.backend import Backend, Gradients, Pieces, Saved

# Shah et al. 2024, arXiv:2407.08608.


def forward(q: Tensor, k: Tensor, v: Tensor, pieces: Pieces) -> tuple[Tensor, Tensor]:
    """(out, lse); the scale is 1 / sqrt(D) by default."""
    out, lse, *_ = _kernels().fwd(q, k, v, **_layout(pieces))
    return out, lse


def backward(grad: Tensor, saved: Saved, pieces: Pieces) -> Gradients:
    """Gradients of q, k and v."""
    dq, dk, dv = (torch.empty_like(t, memory_format=torch.contiguous_format) for t in saved[:3])
    # Passed in to be filled, because what the kernel returns differs between releases.
    _kernels().bwd(grad, *saved, dq, dk, dv, **_layout(pieces))
    return dq, dk, dv


def _layout(pieces: Pieces) -> dict[str, Any]:
    return {
        "cu_seqlens_q": pieces.cu,
        "cu_seqlens_k": pieces.cu,
        "max_seqlen_q": pieces.max_len,
        "max_seqlen_k": pieces.max_len,
        "is_causal": pieces.window == 0,
        "window_size_left": pieces.window or -1,
        "window_size_right": 0,
    }


def _kernels() -> Any:
    # This import registers the operators.
    import flash_attn_interface  # noqa: F401

    return torch.ops.flash_attn_3


FA3 = Backend("fa3", "FlashAttention-3", forward, backward, cuda_halves=True)
