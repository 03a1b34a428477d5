"""The head on some tokens at a time: the logits of a whole batch would take gigabytes."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from underpar.model.network import ROWS


def backward_head(hidden: Tensor, wanted: Tensor, loss: Callable[[Tensor, Tensor], Tensor]) -> None:
    """Add the gradients of the sum of `loss` over slices of `hidden` and `wanted` (both N first).

    `loss` applies the head. Each slice goes backward up to a copy of `hidden`; one pass through the
    rest of the network follows.
    """
    leaf = hidden.detach().requires_grad_()
    for x, target in zip(leaf.split(ROWS), wanted.split(ROWS), strict=True):
        loss(x, target).backward()
    if hidden.requires_grad:
        hidden.backward(leaf.grad)
