"""What a backend of packed attention is: a forward and a backward function for the operator."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

Gradients = tuple[Tensor, Tensor, Tensor]


@dataclass(frozen=True, eq=False)
class Pieces:
    """Where a flat pack is cut into pieces, and how far back a query sees within its piece."""

    cu: Tensor  # (S + 1,) int32, from 0 to N, empty pieces allowed
    max_len: int  # tokens; no piece is longer
    window: int  # how many earlier tokens a query sees, 0 = all of its piece


class Saved(NamedTuple):
    """What the forward pass saves for the backward pass."""

    q: Tensor  # (N, H, D)
    k: Tensor  # (N, K, D)
    v: Tensor  # (N, K, D)
    out: Tensor  # (N, H, D)
    lse: Tensor  # (H, N) fp32, or empty


@dataclass(frozen=True)
class Backend:
    """One implementation of attention.

    `forward` returns out and lse, `backward` the gradients of q, k and v. lse is the logsumexp of
    each row of scores, (H, N) fp32; it is empty if the backward pass does not need it.
    """

    name: str
    what: str
    forward: Callable[[Tensor, Tensor, Tensor, Pieces], tuple[Tensor, Tensor]]
    backward: Callable[[Tensor, Saved, Pieces], Gradients]
    # True if the kernels only run on CUDA and in half precision.
    cuda_halves: bool = False
    # True if the host never reads the boundaries; only then can a CUDA graph record the backend.
    recordable: bool = True
    # True if "auto" never tries this backend; it must be asked for by name.
    by_name: bool = False

    def refuse(self, device: torch.device, dtype: torch.dtype) -> str:
        """Why the backend cannot run on this device in this precision; empty if it may."""
        if self.cuda_halves and device.type != "cuda":
            return "runs on CUDA only"
        if self.cuda_halves and dtype not in (torch.float16, torch.bfloat16):
            return "takes half precision only"
        return ""


Attend = Callable[[Tensor, Tensor, Tensor, Pieces], Tensor]


def make_backend(name: str, what: str, attend: Attend, cuda_halves: bool = False) -> Backend:
    """A backend from a differentiable function, whose backward pass calls the function again.

    A registered operator cannot pass an autograd graph from its forward to its backward pass, so
    the backward pass builds the graph again. The function may read the boundaries on the host, so
    the backend counts as not recordable.
    """

    def forward(q: Tensor, k: Tensor, v: Tensor, pieces: Pieces) -> tuple[Tensor, Tensor]:
        return attend(q, k, v, pieces), q.new_empty(0, dtype=torch.float32)

    def backward(grad: Tensor, saved: Saved, pieces: Pieces) -> Gradients:
        # Autograd is off inside an operator. It must be on here, and inference mode off.
        with torch.inference_mode(False), torch.enable_grad():
            q, k, v = (t.detach().requires_grad_() for t in saved[:3])
            dq, dk, dv = torch.autograd.grad(attend(q, k, v, pieces), (q, k, v), grad)
        return dq, dk, dv

    return Backend(name, what, forward, backward, cuda_halves=cuda_halves, recordable=False)
