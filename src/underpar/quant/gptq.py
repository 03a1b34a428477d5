"""GPTQ: round a matrix column by column; each column makes up for the errors of those before it.

Source: Frantar et al. 2022 (arXiv:2210.17323). H = X^T X is the Hessian of the layer's inputs, and
H^-1 = U^T U with U upper triangular. Column j is rounded after the corrections that the errors of
earlier columns ask for are subtracted. It leaves the error e_j = (w_j - n_j step_j) / U_jj. The sum
of e^2 is exactly the calibration loss tr(D H D^T) with D = W - W^. U comes from one Cholesky factor
of H reversed (PR 1948).

Steps may differ by row and by column. Steps in proportion to U_jj spread the loss evenly over
columns, which brings the solve near the limit for any H (WaterSIC, arXiv:2603.04956).

With a trellis (trellis.py, viterbi.py) every survivor of the search carries its own errors, and so
its own corrections; the sum of e^2 is the cost of its path.

The rate penalty (`weigh_bits`) counts the bits of the integers too: entropy-constrained
quantization (Chou, Lookabaugh and Gray 1989). Coded as a Gaussian of deviation s, integer n takes
(n step)^2 / (2 s^2 ln 2) bits more than 0. If a bit has the same price everywhere, it is worth
2 ln 2 times the mean loss of a column, step^2 / (12 U_jj^2). The cheapest n is then that of the
target divided by 1 + step^2 / (12 s^2). With fine steps this gains next to nothing (PR 2046). With
steps near s and above it gains much: without it, errors fed back to a coarse row lead to integers
that cost more bits than they save loss.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from underpar.errors import ArtifactError, DivergedError, RecipeError
from underpar.quant.trellis import LARGEST_CODE
from underpar.quant.viterbi import Viterbi, trace

# Mean squares of rows and shares of columns below this count as this: smaller ones may underflow.
TINY = 1e-30
# Enough to round any weight to 0, and far from overflow.
LARGEST_PENALTY = 1e6


@dataclass(frozen=True)
class Options:
    """How a matrix is solved.

    `damping` is a share of H's mean diagonal. `limit` is the largest |n| (0: none). `act_order`
    takes columns with large inputs first; a trellis needs columns in the stored order, because its
    decoder reads them so. `block` only schedules the work. `weigh_bits` adds the rate penalty,
    which suits entropy-coded integers with steps by sensitivity (`quant.allocate`).
    """

    damping: float = 0.01
    block: int = 128
    act_order: bool = False
    limit: int = 0
    num_states: int = 1
    weigh_bits: bool = False

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


@dataclass(frozen=True, eq=False)
class Inverse:
    """What a solve needs of a Hessian: U (..., C, C), with columns in the order of solving."""

    factor: Tensor
    order: Tensor
    """(..., C) the stored column that is solved at each place."""
    dead: Tensor
    """(..., C) whether a stored column has no input."""

    @staticmethod
    def stack(inverses: Sequence[Inverse]) -> Inverse:
        """Several inverses as one with a leading axis."""
        parts = ((inverse.factor, inverse.order, inverse.dead) for inverse in inverses)
        return Inverse(*(torch.stack(part) for part in zip(*parts, strict=True)))


@dataclass(frozen=True)
class Problem:
    """Columns in solving order: weights and steps (B, C, R), U (B, C, C)."""

    weights: Tensor
    steps: Tensor
    widths: Tensor
    """(B, C, R) what targets are divided by: the steps, times 1 + rate penalty if there is one."""
    limits: Tensor
    """Largest |n|, (B, C, 1)."""
    factor: Tensor


def round_to_nearest(weight: Tensor, steps: Tensor, limit: int = 0) -> Tensor:
    """The nearest multiples of the steps, at most `limit` (0: no limit) steps from 0; int16."""
    bound = limit or LARGEST_CODE
    return (weight / steps).round().clamp(-bound, bound).to(torch.int16)


@torch.no_grad()
def invert(hessian: Tensor, options: Options) -> Inverse:
    """The factor of a damped Hessian (..., C, C), for any number of solves."""
    if not hessian.isfinite().all():
        raise DivergedError("a Hessian is NaN or infinite")
    damped, dead = damp(hessian, options.damping)
    order = torch.arange(hessian.shape[-1], device=hessian.device).expand(dead.shape)
    if options.act_order:
        diagonal = damped.diagonal(dim1=-2, dim2=-1)
        order = diagonal.sort(dim=-1, descending=True, stable=True).indices
    rows = damped.take_along_dim(order[..., None], dim=-2)
    permuted = rows.take_along_dim(order[..., None, :], dim=-1)
    return Inverse(factor_inverse(permuted), order, dead)


@torch.no_grad()
def solve(
    weight: Tensor, inverse: Inverse, steps: Tensor, options: Options, limits: Tensor | None = None
) -> Solution:
    """Integers that, times the steps, give about the same outputs as `weight` on the inputs.

    `weight` is (R, C); `steps` are (R, 1), (1, C) or (R, C); `limits` (C,) replace the limit of the
    options. All may have a leading axis. Rows do not depend on one another. A trellis takes about
    12 bytes of memory per weight and state.
    """
    if weight.dim() == 2:
        limits = None if limits is None else limits[None]
        batch = solve(weight[None], Inverse.stack([inverse]), steps[None], options, limits)
        return Solution(batch.codes[0], batch.loss[0])
    if not (weight.isfinite().all() and _is_usable(steps)):
        raise ArtifactError("a weight or a step is NaN, infinite or not above 0")
    assert limits is None or options.num_states == 1
    codes, loss = (_solve_scalar if options.num_states == 1 else _solve_trellis)(
        _arrange(weight, inverse, steps, options, limits), options
    )
    stored = torch.empty_like(codes)
    stored.scatter_(1, inverse.order[..., None].expand_as(codes), codes)
    return Solution(stored.mT.contiguous(), loss)


def _arrange(
    weight: Tensor, inverse: Inverse, steps: Tensor, options: Options, limits: Tensor | None
) -> Problem:
    order = inverse.order[..., None]  # (B, C, 1)
    weights = weight.masked_fill(inverse.dead[:, None], 0).mT.take_along_dim(order, dim=1)
    ordered = steps.to(weight.dtype).expand_as(weight).mT.take_along_dim(order, dim=1)
    if limits is None:
        limits = weight.new_full(inverse.order.shape, options.limit or LARGEST_CODE)
    factor = inverse.factor.to(weight.dtype)
    widths = ordered
    if options.weigh_bits:
        # The integers that a trellis allows are two steps apart.
        spacing = ordered if options.num_states == 1 else 2 * ordered
        widths = ordered * (1 + _rate_penalty(weights, spacing, factor))
    bounds = limits.to(weight.dtype)[..., None].take_along_dim(order, dim=1)
    return Problem(weights, ordered, widths, bounds, factor)


def _rate_penalty(weights: Tensor, spacing: Tensor, factor: Tensor) -> Tensor:
    """(B, C, R) what is added to the 1 that targets are divided by, so that bits count too."""
    squares = weights.square()
    by_row = squares.mean(dim=1, keepdim=True).clamp_min(TINY)  # (B, 1, R)
    by_column = (squares / by_row).mean(dim=2, keepdim=True)  # (B, C, 1)
    variances = factor.diagonal(dim1=-2, dim2=-1)[..., None].pow(-2)
    shares = variances / variances.mean(dim=1, keepdim=True)
    # All bits of a row have the same price, whether or not its steps follow the columns' variances.
    prices = (spacing / by_row.sqrt()).square_().mul_(shares).mean(dim=1, keepdim=True) / 12
    return (prices / (shares * by_column).clamp_min(TINY)).clamp_max_(LARGEST_PENALTY)


def damp(hessian: Tensor, damping: float) -> tuple[Tensor, Tensor]:
    """H (B, C, C) with a raised diagonal, and which columns (B, C) have no input at all.

    Columns without input get the mean diagonal of the others. They do not change the damping and
    keep H invertible.
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
    # Reversed along both axes, the factor V is upper triangular with H = V V^T; U is its inverse.
    upper = lower.flip(-2, -1)
    identity = torch.eye(hessian.shape[-1], dtype=hessian.dtype, device=hessian.device)
    return torch.linalg.solve_triangular(upper, identity.expand_as(upper), upper=True)


def _is_usable(steps: Tensor) -> bool:
    return bool((steps.isfinite() & (steps > 0)).all())


def _solve_scalar(problem: Problem, options: Options) -> tuple[Tensor, Tensor]:
    """Codes (B, C, R) int16 and losses (B,)."""
    weights, factor = problem.weights, problem.factor
    errors, codes = torch.empty_like(weights), torch.empty_like(weights, dtype=torch.int16)
    floors, ceilings = -problem.limits, problem.limits
    for start in range(0, weights.shape[1], options.block):
        stop = min(start + options.block, weights.shape[1])
        # Corrections from earlier blocks are one product; within the block, one product per column.
        correction = factor[:, :start, start:stop].mT @ errors[:, :start]
        targets = weights[:, start:stop] - correction
        for col in range(start, stop):
            within = factor[:, start:col, col, None].mT @ errors[:, start:col]  # (B, 1, R)
            target = targets[:, col - start] - within[:, 0]
            step = problem.steps[:, col]
            near = (target / problem.widths[:, col]).round_()
            near.clamp_(floors[:, col], ceilings[:, col])
            errors[:, col] = (target - near * step) / factor[:, col, col, None]
            codes[:, col] = near
    return codes, errors.square().sum(dim=(-2, -1))


def _solve_trellis(problem: Problem, options: Options) -> tuple[Tensor, Tensor]:
    """Codes (B, C, R) int16 and losses (B,); every survivor keeps its own errors to the end."""
    batch, num_cols, num_rows = problem.weights.shape
    viterbi = Viterbi(options.num_states, options.limit or LARGEST_CODE, problem.weights.device)
    costs = viterbi.start((batch, num_rows), problem.weights)  # (B, S, R)
    states = torch.arange(options.num_states, device=costs.device)[:, None].expand_as(costs)
    history = costs.new_empty(*costs.shape, num_cols)
    codes, sources = [], []
    for start in range(0, num_cols, options.block):
        stop = min(start + options.block, num_cols)
        correction = history[..., :start].flatten(1, 2) @ problem.factor[:, :start, start:stop]
        correction = correction.mT.unflatten(2, costs.shape[1:])
        targets = problem.weights[:, start:stop, None] - correction  # (B, c, S, R)
        errors = costs.new_zeros(*costs.shape, stop - start)
        # The survivor at the start of the block from which each survivor descends.
        origins = states
        for col in range(start, stop):
            within = errors.flatten(1, 2) @ problem.factor[:, start:stop, col, None]
            target = targets[:, col - start].gather(1, origins) - within.view_as(costs)
            step = problem.steps[:, col, None]
            width = problem.widths[:, col, None]
            near = viterbi.nearest(target / width)
            error = (target - near * step) / problem.factor[:, col, col, None, None]
            branches = costs + error.square()
            if options.weigh_bits:
                scale = (width - step) * step / problem.factor[:, col, col, None, None].square()
                branches += near.square() * scale
            costs, bits = viterbi.arrive(branches)
            came_from = viterbi.sources(bits)
            errors = _regroup(errors, came_from)
            errors[..., col - start] = viterbi.follow(error, bits)
            origins = origins.gather(1, came_from)
            codes.append(viterbi.follow(near, bits).to(torch.int16))
            sources.append(came_from.to(torch.uint8))
        history = _regroup(history, origins)
        history[..., start:stop] = errors
    best = costs.argmin(dim=1)[:, None, :, None].expand(-1, -1, -1, num_cols)
    return trace(costs, codes, sources), history.gather(1, best).square().sum(dim=(1, 2, 3))


def _regroup(values: Tensor, came_from: Tensor) -> Tensor:
    """Each survivor's values (B, S, R, c), taken from the state (B, S, R) that it came from."""
    batch, num_states, num_rows = came_from.shape
    device = came_from.device
    first = torch.arange(batch, device=device)[:, None, None] * num_states * num_rows
    flat = first + came_from * num_rows + torch.arange(num_rows, device=device)
    # Copying whole rows is several times as fast as gathering single values.
    return values.flatten(0, 2).index_select(0, flat.flatten()).view_as(values)
