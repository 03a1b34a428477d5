"""Muon: momentum, then the nearest orthogonal matrix, for the blocks' weight matrices.

Sources: Jordan et al. 2024 (Muon), Polar Express coefficients (Amsel et al. 2025, arXiv:2505.16932)
as used in PR 2014, normalized rows (MuonEq-R, PR 1260). Matrices of equal shape form a bank, which
is orthogonalized in one batch (PR 1520), each rank doing its share (PR 1523). NorMuon (Li et al.
2025, arXiv:2510.05491) and blocks of queries and keys, as in modded-nanogpt, records 41 and 80.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from underpar.core.dist import ALONE, gather_shares
from underpar.core.runtime import Runtime
from underpar.schema import require

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


class Evened:
    """NorMuon: updates whose neurons have moved much get smaller, others larger.

    A neuron is a row of a tall or square matrix and a column of a wide one: of `up` and `down`, the
    same channels of the MLP. Each update keeps its size as a whole.
    """

    def __init__(self, shape: tuple[int, int], num: int, beta: float, like: Tensor) -> None:
        rows, columns = shape
        self.beta = beta
        self.axis = -1 if rows >= columns else -2
        sizes = (num, rows, 1) if rows >= columns else (num, 1, columns)
        self.squares = like.new_zeros(sizes, dtype=torch.float32)

    def __call__(self, updates: Tensor) -> Tensor:
        """Updates (B, rows, cols), divided by the root of their running mean squares."""
        x = updates.float()
        self.squares.lerp_(x.square().mean(self.axis, keepdim=True), 1 - self.beta)
        evened = x * self.squares.clamp_min(1e-10).rsqrt()
        size, old = (torch.linalg.vector_norm(t, dim=(-2, -1), keepdim=True) for t in (evened, x))
        return evened * (old / size.clamp_min(1e-10))


# Matrices that may be orthogonalized in blocks of rows, which are heads.
HEADS = re.compile(r"(^|\.)attn\.[qk]\.")


class Muon:
    """W <- (1 - lr decay) W - lr sqrt(max(1, rows/cols)) orthogonalize(nesterov momentum).

    `cautious`: decay acts only where the update and the weight have the same sign. `neuron_beta`:
    memory of NorMuon's mean squares; 0: none. `query_rows`: queries and keys are orthogonalized in
    blocks of so many rows; 0: whole.

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
        neuron_beta: float = 0.0,
        query_rows: int = 0,
    ) -> None:
        self.decay = decay
        self.cautious = cautious
        self.row_norm = row_norm
        self.runtime = runtime
        self.coefficients = COEFFICIENTS[newton_schulz]
        self.momenta = {name: torch.zeros_like(p) for name, p in parameters.items()}
        self._parameters = dict(parameters)
        # Rows, columns, rows of a block -> the matrices of this shape that are cut so.
        self._banks: dict[tuple[int, int, int], list[str]] = {}
        for name, parameter in parameters.items():
            rows, columns = parameter.shape
            block_rows = query_rows if query_rows and HEADS.search(name) else rows
            require(
                rows % block_rows == 0, f"train.query_rows = {block_rows}: {name} has {rows} rows"
            )
            self._banks.setdefault((rows, columns, block_rows), []).append(name)
        self._evened = {
            names[0]: Evened(bank[:2], len(names), neuron_beta, self._parameters[names[0]])
            for bank, names in self._banks.items()
            if neuron_beta
        }

    def state(self) -> dict[str, Tensor]:
        """Everything that steps change, by name: momenta, and what NorMuon remembers."""
        squares = {
            f"{name}.squares": self._evened[names[0]].squares[i]
            for names in self._banks.values()
            if names[0] in self._evened
            for i, name in enumerate(names)
        }
        return self.momenta | squares

    @torch.no_grad()
    def step(self, lr: float, momentum: float, decay_scale: float = 1.0) -> None:
        """One update from the gradients, which must be the same on every rank."""
        for (rows, columns, block_rows), names in self._banks.items():
            weights = [self._parameters[name] for name in names]
            update = self._update(names, momentum, block_rows).to(weights[0].dtype)
            scale = max(1.0, rows / columns) ** 0.5
            updates, decay = list(update.unbind()), lr * self.decay * decay_scale
            if self.cautious:
                for weight, step in zip(weights, updates, strict=True):
                    weight.sub_(decay * weight * (step * weight >= 0))
            else:
                torch._foreach_mul_(weights, 1.0 - decay)
            torch._foreach_add_(weights, updates, alpha=-lr * scale)

    def _update(self, names: list[str], momentum: float, block_rows: int = 0) -> Tensor:
        """Add the gradients of a bank to its momenta; returns its updates (B, rows, cols)."""
        grads = [g for name in names if (g := self._parameters[name].grad) is not None]
        assert len(grads) == len(names), "a matrix got no gradient"
        momenta = [self.momenta[name] for name in names]
        torch._foreach_mul_(momenta, momentum)
        torch._foreach_add_(momenta, grads)
        nesterov = torch.add(self._share(grads), self._share(momenta), alpha=momentum)
        rows = normalize_rows(nesterov) if self.row_norm else nesterov
        blocks = rows.reshape(-1, block_rows or rows.size(1), rows.size(2))
        share = orthogonalize(blocks, self.coefficients).reshape_as(rows)
        updates = gather_shares(share, self.runtime)[: len(names)]
        return self._evened[names[0]](updates) if self._evened else updates

    def _share(self, bank: list[Tensor]) -> Tensor:
        """This rank's matrices of a bank, then zeros, so that all shares have the same size."""
        size = -(-len(bank) // self.runtime.world)
        share = bank[self.runtime.rank * size :][:size]
        padding = [torch.zeros_like(bank[0])] * (size - len(share))
        return torch.stack(share + padding)
