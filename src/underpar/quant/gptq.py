"""GPTQ: round a matrix column by column, each column making up for the errors of those before.

Source: Frantar et al. 2022 (arXiv:2210.17323). With H = X^T X of the layer's inputs and
H^-1 = U^T U, U upper triangular, column j is rounded after subtracting what the errors before it
ask for, and leaves e_j = (w_j - n_j step_j) / U_jj. The sum of e^2 is the calibration loss
tr(D H D^T), D = W - W^, exactly. U comes from one Cholesky factor of H reversed (PR 1948).

Steps may differ by row and by column; in proportion to U_jj, columns share the loss evenly, which
brings the solve near the limit for any H (WaterSIC, arXiv:2603.04956). Preferring the smaller of
two integers that are almost as good is left out: it saves next to nothing (PR 2046).

With a trellis (trellis.py) every survivor carries its own errors, and so its own corrections, and
the sum of e^2 is the path's cost.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from underpar.errors import ArtifactError, RecipeError
from underpar.quant.trellis import LARGEST_CODE, Viterbi, trace


@dataclass(frozen=True)
class Options:
    """`damping` is a share of H's mean diagonal; `limit` is the largest |n|, 0 for none.

    `act_order` takes columns of large inputs first; a trellis takes columns as they are stored,
    because its decoder meets them so. `block` only schedules the work.
    """

    damping: float = 0.01
    block: int = 128
    act_order: bool = False
    limit: int = 0
    num_states: int = 1

    def __post_init__(self) -> None:
        if self.act_order and self.num_states > 1:
            raise RecipeError(
                f"act_order with a trellis of {self.num_states} states: its decoder needs the "
                "columns as stored; turn act_order off"
            )
        if not self.damping > 0 or self.block < 1 or not 0 <= self.limit <= LARGEST_CODE:
            raise RecipeError(
                f"damping {self.damping}, block {self.block}, limit {self.limit}: expected "
                f"damping > 0, block >= 1 and limit 0 ... {LARGEST_CODE}"
            )


@dataclass(frozen=True)
class Solution:
    """Integers (..., R, C) int16 and the damped calibration loss (...)."""

    codes: Tensor
    loss: Tensor


@dataclass(frozen=True)
class Problem:
    """Columns in solving order: weights and steps (B, C, R), U (B, C, C)."""

    weights: Tensor
    steps: Tensor
    factor: Tensor


def round_to_nearest(weight: Tensor, steps: Tensor, limit: int = 0) -> Tensor:
    """The nearest multiples of the steps, at most `limit` (0: no limit) steps from 0; int16."""
    bound = limit or LARGEST_CODE
    return (weight / steps).round().clamp(-bound, bound).to(torch.int16)


@torch.no_grad()
def solve(weight: Tensor, hessian: Tensor, steps: Tensor, options: Options) -> Solution:
    """Integers whose product with the steps is close to `weight` on the inputs behind `hessian`.

    `weight` (R, C), `hessian` (C, C), `steps` (R, 1), (1, C) or (R, C), or all with a leading axis.
    A trellis holds about 12 bytes for each weight and state; rows do not depend on one another.
    """
    if weight.dim() == 2:
        solution = solve(weight[None], hessian[None], steps[None], options)
        return Solution(solution.codes[0], solution.loss[0])
    assert hessian.shape == (len(weight), weight.shape[-1], weight.shape[-1]), hessian.shape
    if not (weight.isfinite().all() and hessian.isfinite().all() and _is_usable(steps)):
        raise ArtifactError("a weight, a Hessian or a step is NaN, infinite or not above 0")
    hessian, dead = damp(hessian, options.damping)
    order = torch.arange(weight.shape[-1], device=weight.device).expand(dead.shape)
    if options.act_order:
        diagonal = hessian.diagonal(dim1=-2, dim2=-1)
        order = diagonal.sort(dim=-1, descending=True, stable=True).indices
    factor = factor_inverse(_permute(hessian, order)).to(weight.dtype)
    by_column = order[..., None]  # (B, C, 1)
    problem = Problem(
        weight.masked_fill(dead[:, None], 0).mT.take_along_dim(by_column, dim=1),
        steps.to(weight.dtype).expand_as(weight).mT.take_along_dim(by_column, dim=1),
        factor,
    )
    solve_columns = _solve_scalar if options.num_states == 1 else _solve_trellis
    codes, loss = solve_columns(problem, options)
    stored = torch.empty_like(codes).scatter_(1, by_column.expand_as(codes), codes)
    return Solution(stored.mT.contiguous(), loss)


def damp(hessian: Tensor, damping: float) -> tuple[Tensor, Tensor]:
    """H (B, C, C) with its diagonal raised, and which columns (B, C) had no input at all.

    Those get the mean diagonal of the others: they neither set the damping nor break the factor.
    """
    diagonal = hessian.diagonal(dim1=-2, dim2=-1)
    dead = diagonal == 0
    num_live = (~dead).sum(dim=-1, keepdim=True)
    mean = diagonal.sum(dim=-1, keepdim=True) / num_live.clamp_min(1)
    mean = torch.where(num_live > 0, mean, 1.0)
    return hessian + torch.diag_embed(damping * mean + mean * dead), dead


def factor_inverse(hessian: Tensor) -> Tensor:
    """U (B, C, C), upper triangular with a positive diagonal: H^-1 = U^T U."""
    lower, failures = torch.linalg.cholesky_ex(hessian.flip(-2, -1))
    if failures.any():
        raise ArtifactError("a Hessian is not positive definite; raise the damping")
    # Reversed both ways the factor is upper triangular, H = V V^T, and U is its inverse.
    upper = lower.flip(-2, -1)
    identity = torch.eye(hessian.shape[-1], dtype=hessian.dtype, device=hessian.device)
    return torch.linalg.solve_triangular(upper, identity.expand_as(upper), upper=True)


def _is_usable(steps: Tensor) -> bool:
    return bool((steps.isfinite() & (steps > 0)).all())


def _permute(hessian: Tensor, order: Tensor) -> Tensor:
    rows = hessian.take_along_dim(order[..., None], dim=-2)
    return rows.take_along_dim(order[:, None], dim=-1)


def _solve_scalar(problem: Problem, options: Options) -> tuple[Tensor, Tensor]:
    """Codes (B, C, R) int16 and losses (B,)."""
    weights, factor = problem.weights, problem.factor
    errors, codes = torch.empty_like(weights), torch.empty_like(weights, dtype=torch.int16)
    bound = options.limit or LARGEST_CODE
    for start in range(0, weights.shape[1], options.block):
        stop = min(start + options.block, weights.shape[1])
        # What earlier blocks ask of this one is one product; within it, one for each column.
        asked = factor[:, :start, start:stop].mT @ errors[:, :start]
        targets = weights[:, start:stop] - asked
        for col in range(start, stop):
            within = factor[:, start:col, col, None].mT @ errors[:, start:col]  # (B, 1, R)
            target = targets[:, col - start] - within[:, 0]
            step = problem.steps[:, col]
            near = (target / step).round_().clamp_(-bound, bound)
            errors[:, col] = (target - near * step) / factor[:, col, col, None]
            codes[:, col] = near
    return codes, errors.square().sum(dim=(-2, -1))


def _solve_trellis(problem: Problem, options: Options) -> tuple[Tensor, Tensor]:
    """Codes (B, C, R) int16 and losses (B,), every survivor with its own errors to the end."""
    batch, num_cols, num_rows = problem.weights.shape
    viterbi = Viterbi(options.num_states, options.limit or LARGEST_CODE, problem.weights.device)
    costs = viterbi.start((batch, num_rows), problem.weights)  # (B, S, R)
    states = torch.arange(options.num_states, device=costs.device)[:, None].expand_as(costs)
    history = costs.new_empty(*costs.shape, num_cols)
    codes, sources = [], []
    for start in range(0, num_cols, options.block):
        stop = min(start + options.block, num_cols)
        asked = history[..., :start].flatten(1, 2) @ problem.factor[:, :start, start:stop]
        asked = asked.mT.unflatten(2, costs.shape[1:])
        targets = problem.weights[:, start:stop, None] - asked  # (B, c, S, R)
        errors = costs.new_zeros(*costs.shape, stop - start)
        # Which survivor at the block's start each survivor stems from.
        origins = states
        for col in range(start, stop):
            within = errors.flatten(1, 2) @ problem.factor[:, start:stop, col, None]
            target = targets[:, col - start].gather(1, origins) - within.view_as(costs)
            step = problem.steps[:, col, None]
            near = viterbi.nearest(target / step)
            error = (target - near * step) / problem.factor[:, col, col, None, None]
            costs, bits = viterbi.arrive(costs + error.square())
            came_from = viterbi.sources(bits)
            errors = _regroup(errors, came_from)
            errors[..., col - start] = viterbi.follow(error, bits)
            origins = origins.gather(1, came_from)
            codes.append(viterbi.follow(near, bits).to(torch.int16))
            sources.append(came_from.to(torch.uint8))
        history = _regroup(history, origins)
        history[..., start:stop] = errors
    return trace(costs, codes, sources), costs.amin(dim=1).sum(dim=-1)


def _regroup(values: Tensor, came_from: Tensor) -> Tensor:
    """Each survivor's values (B, S, R, c), taken from the state (B, S, R) that it came from."""
    batch, num_states, num_rows = came_from.shape
    device = came_from.device
    first = torch.arange(batch, device=device)[:, None, None] * num_states * num_rows
    flat = first + came_from * num_rows + torch.arange(num_rows, device=device)
    # Whole rows are copied: several times as fast as gathering single values.
    return values.flatten(0, 2).index_select(0, flat.flatten()).view_as(values)
