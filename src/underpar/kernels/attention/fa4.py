"""Packed attention by FlashAttention-4, if the package flash-attn-4 is installed."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from underpar.kernels.attention.backend import Backend, Gradients, Pieces, Saved

# The package's autograd function calls these two functions; torch.compile cannot trace the autograd
# function itself. Each kernel is compiled at its first use, which takes seconds.


def forward(q: Tensor, k: Tensor, v: Tensor, pieces: Pieces) -> tuple[Tensor, Tensor]:
    """(out, lse); the scale is 1 / sqrt(D) by default."""
    from flash_attn.cute.interface import _flash_attn_fwd

    # The number of further return values differs between releases.
    out, lse, *_ = _flash_attn_fwd(q, k, v, return_lse=True, **_layout(pieces))
    return out, lse


def backward(grad: Tensor, saved: Saved, pieces: Pieces) -> Gradients:
    """Gradients of q, k and v."""
    from flash_attn.cute.interface import _flash_attn_bwd

    q, k, v, out, lse = saved
    dq, dk, dv, *_ = _flash_attn_bwd(q, k, v, out, grad, lse, **_layout(pieces))
    return dq, dk, dv


def _layout(pieces: Pieces) -> dict[str, Any]:
    lengths = {"max_seqlen_q": pieces.max_len, "max_seqlen_k": pieces.max_len}
    cuts = {"cu_seqlens_q": pieces.cu, "cu_seqlens_k": pieces.cu}
    if pieces.window:
        return {**cuts, **lengths, "window_size_left": pieces.window, "window_size_right": 0}
    return {**cuts, **lengths, "causal": True}


def compiler_errors() -> tuple[type[Exception], ...]:
    """The exceptions of the kernels' compiler, which share no base class with Python's own."""
    try:
        from cutlass.base_dsl.common import DSLBaseError
    except ImportError:
        return ()
    return (DSLBaseError,)


FA4 = Backend("fa4", "FlashAttention-4", forward, backward, cuda_halves=True)
