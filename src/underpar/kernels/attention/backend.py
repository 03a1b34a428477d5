"""What a backend of packed attention is: one pair of functions behind the operator."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

Gradients = tuple[Tensor, Tensor, Tensor]


@dataclass(frozen=True, eq=False)
class Pieces:
    """Where a flat pack is cut, and how far back a query sees inside its piece."""

    cu: Tensor  # (S + 1,) int32, from 0 to N, empty pieces allowed
    max_len: int  # tokens, bounds the length of a piece
    window: int  # tokens before its own that a query sees, 0 = no limit


class Saved(NamedTuple):
    """What the forward pass leaves to the backward pass."""

    q: Tensor  # (N, H, D)
    k: Tensor  # (N, K, D)
    v: Tensor  # (N, K, D)
    out: Tensor  # (N, H, D)
    lse: Tensor  # (H, N) fp32, or empty


@dataclass(frozen=True)
class Backend:
    """One way to attend; `forward` gives (out, lse), `backward` the gradients of q, k and v.

    lse is the logsumexp of each row of scores, (H, N) fp32, or empty.
    """

    name: str
    what: str
    forward: Callable[[Tensor, Tensor, Tensor, Pieces], tuple[Tensor, Tensor]]
    backward: Callable[[Tensor, Saved, Pieces], Gradients]
    # Whether the kernels are for half precision on CUDA alone.
    cuda_halves: bool = False
    # Whether the host need not know the boundaries, so that a CUDA graph may hold it.
    recordable: bool = True
    # Whether it must be asked for by name: it is never tried for the sake of "auto".
    by_name: bool = False

    def refuse(self, device: torch.device, dtype: torch.dtype) -> str:
        """Why there is no use in trying this device and precision; empty if there is."""
        if self.cuda_halves and device.type != "cuda":
            return "runs on CUDA alone"
        if self.cuda_halves and dtype not in (torch.float16, torch.bfloat16):
            return "takes half precision alone"
        return ""


Attend = Callable[[Tensor, Tensor, Tensor, Pieces], Tensor]


def make_backend(name: str, what: str, attend: Attend, cuda_halves: bool = False) -> Backend:
    """A backend from a differentiable function; its backward pass runs that function again.

    An operator may hand no autograd graph from its forward to its backward pass, and these
    functions have no backward kernel of their own to call, so the graph is built anew. What it
    builds may follow from the boundaries, so it counts as not recordable.
    """

    def forward(q: Tensor, k: Tensor, v: Tensor, pieces: Pieces) -> tuple[Tensor, Tensor]:
        return attend(q, k, v, pieces), q.new_empty(0, dtype=torch.float32)

    def backward(grad: Tensor, saved: Saved, pieces: Pieces) -> Gradients:
        # Inside an operator torch records nothing; leaving inference mode makes it record again.
        with torch.inference_mode(False), torch.enable_grad():
            q, k, v = (t.detach().requires_grad_() for t in saved[:3])
            dq, dk, dv = torch.autograd.grad(attend(q, k, v, pieces), (q, k, v), grad)
        return dq, dk, dv

    return Backend(name, what, forward, backward, cuda_halves=cuda_halves, recordable=False)
