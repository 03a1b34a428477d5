"""Packed attention by the FlashAttention-2 kernels of torch, for pieces of unequal length."""

from __future__ import annotations

import torch
from torch import Tensor

from underpar.kernels.attention.backend import Backend, Gradients, Pieces, Saved

# Dao 2023, arXiv:2307.08691. The kernels take fewer key heads than query heads without a copy.


def forward(q: Tensor, k: Tensor, v: Tensor, pieces: Pieces) -> tuple[Tensor, Tensor]:
    """(out, lse); the scale is 1 / sqrt(D) by default."""
    cu, length = pieces.cu, pieces.max_len
    out, lse, *_ = torch.ops.aten._flash_attention_forward(
        q, k, v, cu, cu, length, length, 0.0, pieces.window == 0, False, **_window(pieces)
    )
    return out, lse


def backward(grad: Tensor, saved: Saved, pieces: Pieces) -> Gradients:
    """Gradients of q, k and v."""
    cu, length = pieces.cu, pieces.max_len
    # The kernel asks for the seed and offset of dropout; there is no dropout.
    seed = torch.zeros(2, dtype=torch.uint64, device=cu.device)
    unused = torch.empty(0, device=cu.device)
    dq, dk, dv = torch.ops.aten._flash_attention_backward(
        grad,
        *saved,
        *(cu, cu, length, length),
        *(0.0, pieces.window == 0, seed, unused),
        **_window(pieces),
    )
    return dq, dk, dv


def _window(pieces: Pieces) -> dict[str, int]:
    return {"window_size_left": pieces.window or -1, "window_size_right": 0}


FLASH = Backend("flash", "FlashAttention-2 of torch", forward, backward, cuda_halves=True)
