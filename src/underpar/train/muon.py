"""Muon: momentum, then the nearest orthogonal matrix, for the blocks' weight matrices.

Sources: Jordan et al. 2024 (Muon), Polar Express coefficients (Amsel et al. 2025, arXiv:2505.16932)
as used in PR 2014. Matrices of equal shape are orthogonalized in one batch (PR 1520).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

Coefficients = tuple[float, float, float]

POLAR_EXPRESS: tuple[Coefficients, ...] = (
    (8.156554524902461, -22.48329292557795, 15.878769915207462),
    (4.042929935166739, -2.808917465908714, 0.5000178451051316),
    (3.8916678022926607, -2.772484153217685, 0.5060648178503393),
    (3.285753657755655, -2.3681294933425376, 0.46449024233003106),
    (2.3465413258596377, -1.7097828382687081, 0.42323551169305323),
)


def orthogonalize(updates: Tensor, coefficients: Sequence[Coefficients] = POLAR_EXPRESS) -> Tensor:
    """Push the singular values of each matrix of (B, rows, cols) towards 1."""
    # bf16 where tensor cores want it; CPUs stay in fp32.
    x = updates.bfloat16() if updates.is_cuda else updates
    tall = x.size(-2) > x.size(-1)
    x = x.mT if tall else x
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for a, b, c in coefficients:
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return (x.mT if tall else x).to(updates.dtype)


class Muon:
    """W <- (1 - lr decay) W - lr sqrt(max(1, rows/cols)) orthogonalize(nesterov momentum)."""

    def __init__(self, parameters: Mapping[str, Tensor], decay: float) -> None:
        self.decay = decay
        self.momenta = {name: torch.zeros_like(p) for name, p in parameters.items()}
        self._parameters = dict(parameters)
        self._banks: dict[torch.Size, list[str]] = {}
        for name, parameter in parameters.items():
            self._banks.setdefault(parameter.shape, []).append(name)

    @torch.no_grad()
    def step(self, lr: float, momentum: float) -> None:
        """One update from the gradients."""
        for shape, names in self._banks.items():
            weights = [self._parameters[name] for name in names]
            grads = [w.grad for w in weights if w.grad is not None]
            assert len(grads) == len(weights), "a matrix got no gradient"
            momenta = [self.momenta[name] for name in names]
            torch._foreach_mul_(momenta, momentum)
            torch._foreach_add_(momenta, grads)
            nesterov = torch._foreach_add(grads, momenta, alpha=momentum)
            update = orthogonalize(torch.stack(list(nesterov)))
            scale = max(1.0, shape[0] / shape[1]) ** 0.5
            torch._foreach_mul_(weights, 1.0 - lr * self.decay)
            torch._foreach_add_(weights, list(update.unbind()), alpha=-lr * scale)
