"""Muon: momentum, then the nearest orthogonal matrix, for the blocks' weight matrices.

Sources: Jordan et al. 2024 (Muon), Polar Express coefficients (Amsel et al. 2025, arXiv:2505.16932)
as used in PR 2014, normalized rows (MuonEq-R, PR 1260). Matrices of equal shape form a bank, which
is orthogonalized in one batch (PR 1520), each rank doing its share (PR 1523).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from underpar.core.dist import ALONE, gather_shares
from underpar.core.runtime import Runtime

Coefficients = tuple[float, float, float]

POLAR_EXPRESS: tuple[Coefficients, ...] = (
    (8.156554524902461, -22.48329292557795, 15.878769915207462),
    (4.042929935166739, -2.808917465908714, 0.5000178451051316),
    (3.8916678022926607, -2.772484153217685, 0.5060648178503393),
    (3.285753657755655, -2.3681294933425376, 0.46449024233003106),
    (2.3465413258596377, -1.7097828382687081, 0.42323551169305323),
)
CLASSIC: tuple[Coefficients, ...] = ((3.4445, -4.7750, 2.0315),) * 5
COEFFICIENTS = {"polar": POLAR_EXPRESS, "classic": CLASSIC}


def normalize_rows(updates: Tensor) -> Tensor:
    """Each row of (B, rows, cols) divided by its length, or by 1e-7 if the row is shorter."""
    norms = torch.linalg.vector_norm(updates, dim=-1, keepdim=True, dtype=torch.float32)
    return updates / norms.clamp_min(1e-7)


def orthogonalize(updates: Tensor, coefficients: Sequence[Coefficients] = POLAR_EXPRESS) -> Tensor:
    """Push the singular values of each matrix of (B, rows, cols) towards 1; bf16 on a GPU."""
    # bf16 is fast on a GPU; CPUs stay in fp32.
    x = updates.bfloat16() if updates.is_cuda else updates
    tall = x.size(-2) > x.size(-1)
    x = x.mT if tall else x
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for a, b, c in coefficients:
        gram = x @ x.mT
        # b gram + c gram^2, then a x + (that) x: one fused product each.
        gram = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)
        x = torch.baddbmm(x, gram, x, beta=a)
    return x.mT if tall else x


class Muon:
    """W <- (1 - lr decay) W - lr sqrt(max(1, rows/cols)) orthogonalize(nesterov momentum).

    `cautious`: decay acts only where the update and the weight have the same sign.

    Every rank has the summed gradients, keeps all momenta and applies all updates, but only
    orthogonalizes its share of each bank: slice `rank` of the bank, which zeros fill up to a
    multiple of the number of ranks. So the main rank's checkpoint serves all ranks.
    """

    def __init__(
        self,
        parameters: Mapping[str, Tensor],
        decay: float,
        newton_schulz: str = "polar",
        row_norm: bool = False,
        runtime: Runtime = ALONE,
        cautious: bool = False,
    ) -> None:
        self.decay = decay
        self.cautious = cautious
        self.row_norm = row_norm
        self.runtime = runtime
        self.coefficients = COEFFICIENTS[newton_schulz]
        self.momenta = {name: torch.zeros_like(p) for name, p in parameters.items()}
        self._parameters = dict(parameters)
        self._banks: dict[torch.Size, list[str]] = {}
        for name, parameter in parameters.items():
            self._banks.setdefault(parameter.shape, []).append(name)

    @torch.no_grad()
    def step(self, lr: float, momentum: float, decay_scale: float = 1.0) -> None:
        """One update from the gradients, which must be the same on every rank."""
        for shape, names in self._banks.items():
            weights = [self._parameters[name] for name in names]
            update = self._update(names, momentum).to(weights[0].dtype)
            scale = max(1.0, shape[0] / shape[1]) ** 0.5
            updates, decay = list(update.unbind()), lr * self.decay * decay_scale
            if self.cautious:
                for weight, step in zip(weights, updates, strict=True):
                    weight.sub_(decay * weight * (step * weight >= 0))
            else:
                torch._foreach_mul_(weights, 1.0 - decay)
            torch._foreach_add_(weights, updates, alpha=-lr * scale)

    def _update(self, names: list[str], momentum: float) -> Tensor:
        """Add the gradients of a bank to its momenta; returns its updates (B, rows, cols)."""
        grads = [g for name in names if (g := self._parameters[name].grad) is not None]
        assert len(grads) == len(names), "a matrix got no gradient"
        momenta = [self.momenta[name] for name in names]
        torch._foreach_mul_(momenta, momentum)
        torch._foreach_add_(momenta, grads)
        nesterov = torch.add(self._share(grads), self._share(momenta), alpha=momentum)
        rows = normalize_rows(nesterov) if self.row_norm else nesterov
        return gather_shares(orthogonalize(rows, self.coefficients), self.runtime)[: len(names)]

    def _share(self, bank: list[Tensor]) -> Tensor:
        """This rank's matrices of a bank, then zeros, so that all shares have the same size."""
        size = -(-len(bank) // self.runtime.world)
        share = bank[self.runtime.rank * size :][:size]
        padding = [torch.zeros_like(bank[0])] * (size - len(share))
        return torch.stack(share + padding)
