"""LQER: low-rank corrections of rounding errors, for the matrices that gain most per byte.

LQER (arXiv:2402.02446) adds a product A B of low rank, close to the rounding error E, to a rounded
matrix. PR 1797 takes the leading singular vectors of E. Here the product is the closest one in the
norm of what an error D costs, sum_r g_r D_r H D_r^T. In this norm E is much nearer to low rank: in
a small model, half of the cost of GPTQ's errors with a step per row was of rank 1.

With `published` everything is as in PR 1797: the matrices with the largest errors, their leading
singular vectors, and steps from the largest values. (But steps are stored as log steps.)

B is rounded first, with the error feedback of GPTQ. A is then fitted to the rounded B by least
squares, and rounded too. Steps are those of least cost. PR 1797 takes them from the largest value,
which leaves 59 % of the energy of a Gaussian factor of 2 bits; the best step leaves 19 %.

Steps by column (`gridS+columns`) spread the cost so evenly that hardly any of it is of low rank.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from underpar.errors import RecipeError
from underpar.quant.allocate import Sensitivity
from underpar.quant.calibration import Calibration
from underpar.quant.gptq import TINY, Options, damp, factor_inverse
from underpar.quant.logsteps import LARGEST_INDEX, STEPS_PER_OCTAVE, from_index, to_index
from underpar.quant.lowrank import Factor, LowRank
from underpar.quant.schemes import QuantizedModel, QuantizedTensor, dequantize
from underpar.schema import QuantPart

# How far below the step that clips nothing the search for the best step goes.
OCTAVES = 6
# A share of the mean diagonal: enough for a right factor with rows of zeros.
_LEAST_DAMPING = 1e-9


@dataclass(frozen=True)
class Settings:
    """The largest number of matrices that are corrected, and how their factors are stored.

    The left factor has one step, and the right factor one step for each `group` entries in row
    order. With `symmetric`, each row of both factors has a step. With `weighted`, the norm counts
    what errors cost; without it all errors of a matrix cost the same. `damping` is that of GPTQ.
    With `published`, matrices are chosen and factors rounded as in PR 1797, whatever errors cost.
    """

    tensors: int = 0
    rank: int = 4
    left_bits: int = 2
    right_bits: int = 4
    group: int = 64
    symmetric: bool = False
    weighted: bool = True
    published: bool = False
    damping: float = Options.damping

    def __post_init__(self) -> None:
        if self.tensors < 0 or self.rank < 1 or self.group < 1 or not self.damping > 0:
            raise RecipeError(
                f"LQER of {self.tensors} tensors, rank {self.rank}, group {self.group} and damping "
                f"{self.damping}: expected 0 or more tensors, and more than 0 of the others"
            )
        for bits in (self.left_bits, self.right_bits):
            if not 2 <= bits <= 8:
                raise RecipeError(f"LQER with a factor of {bits} bits: expected 2 ... 8")


def settings_of(part: QuantPart) -> Settings:
    """The settings that a [quant] section holds."""
    return Settings(
        part.lqer_tensors,
        part.lqer_rank,
        part.lqer_left_bits,
        part.lqer_right_bits,
        part.lqer_group,
        part.lqer_symmetric,
        part.lqer_weighted,
        part.lqer_published,
    )


@dataclass(frozen=True, eq=False)
class Norm:
    """The cost of an error D (R, C), the sum of rows[r] D_r H D_r^T, with H^-1 = U^T U; fp64."""

    rows: Tensor  # (R,)
    inverse: Tensor  # U (C, C)

    def whiten(self, error: Tensor) -> Tensor:
        """D U^-1 (R, C): its squares times `rows` sum up to the cost."""
        return torch.linalg.solve_triangular(self.inverse, error, upper=True, left=False)

    def cost(self, error: Tensor) -> float:
        """The cost of an error (R, C)."""
        return float(self.rows @ self.whiten(error).square().sum(1))


@torch.no_grad()
def correct(
    tensors: QuantizedModel,
    weights: Mapping[str, np.ndarray],
    calibration: Calibration,
    sensitivity: Mapping[str, Sensitivity] | None,
    settings: Settings,
    device: torch.device,
) -> QuantizedModel:
    """The model with corrections of the matrices in which they remove the most loss per byte.

    At most `settings.tensors` are corrected. A matrix is left as it is if finer steps would remove
    as much loss with the same bytes. Candidates have calibrated inputs and a step per row.
    `sensitivity` None: all errors of all matrices cost the same.
    """
    if not settings.tensors:
        return dict(tensors)
    if settings.published:
        names = [n for n in calibration.hessians if n in tensors and _is_matrix(tensors[n])]
        return correct_as_published(tensors, {n: weights[n] for n in names}, settings, device)
    # q, k and v share a Hessian: its factor is computed once.
    sharing: dict[int, list[str]] = {}
    for name, hessian in calibration.hessians.items():
        if name in tensors and _is_matrix(tensors[name]):
            sharing.setdefault(id(hessian), []).append(name)
    gains, corrected = {}, {}
    for names in sharing.values():
        hessian = calibration.hessians[names[0]].to(device).double()
        inverse = _invert(hessian, settings)
        for name in names:
            plain = replace(tensors[name], correction=None)
            error = torch.from_numpy(weights[name] - dequantize(plain)).to(device).double()
            # Errors in columns without any input cost nothing; GPTQ makes these columns 0.
            error[:, hessian.diagonal() == 0] = 0
            rows = np.ones(len(error)) if sensitivity is None else sensitivity[name].rows
            costs = torch.as_tensor(rows, device=device).double()
            norm = Norm(costs if settings.weighted else costs.mean().expand_as(costs), inverse)
            correction = correct_error(error, norm, settings)
            gains[name] = _gain_per_byte(error, correction, norm)
            corrected[name] = replace(plain, correction=correction)
    best = sorted(gains, key=lambda name: (-gains[name], name))[: settings.tensors]
    return {**tensors, **{name: corrected[name] for name in best if gains[name] > 0}}


@torch.no_grad()
def correct_as_published(
    tensors: QuantizedModel,
    weights: Mapping[str, np.ndarray],
    settings: Settings,
    device: torch.device,
) -> QuantizedModel:
    """The model with corrections of those `weights` that have the largest errors (PR 1797)."""
    plain = {name: replace(tensors[name], correction=None) for name in weights}
    errors = {name: weights[name] - dequantize(tensor) for name, tensor in plain.items()}
    largest = sorted(errors, key=lambda name: (-float(np.linalg.norm(errors[name])), name))
    corrected = {}
    for name in largest[: settings.tensors]:
        error = torch.from_numpy(errors[name]).to(device).double()
        left, right = singular_factors(error, settings.rank)
        whole = settings.rank if settings.symmetric else left.numel()
        group = error.shape[1] if settings.symmetric else settings.group
        correction = LowRank(
            round_to_largest(left, settings.left_bits, whole),
            round_to_largest(right, settings.right_bits, group),
        )
        corrected[name] = replace(plain[name], correction=correction)
    return {**tensors, **corrected}


def singular_factors(error: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    """U S (R, k) and V^T (k, C) of the leading singular vectors, the largest first."""
    tall = len(error) > error.shape[1]
    matrix = error if tall else error.T
    # Eigenvectors of the shorter side are exact, and reproducible unlike randomized methods.
    vectors = torch.linalg.eigh(matrix.T @ matrix).eigenvectors.flip(1)[:, :rank]
    others = matrix @ vectors
    if tall:
        return others, vectors.T
    values = others.norm(dim=0).clamp_min(TINY)
    return vectors * values, (others / values).T


def round_to_largest(values: Tensor, bits: int, group: int) -> Factor:
    """A factor with the step of each group from its largest value, which is half a step beyond.

    Integers reach from -2^(bits-1) to 2^(bits-1) - 1.
    """
    limit = 2 ** (bits - 1)
    runs = torch.nn.functional.pad(values.flatten().abs(), (0, -values.numel() % group))
    largest = runs.view(-1, group).amax(1).cpu().numpy()
    indices = to_index(largest / (limit - 0.5))
    steps = _spread(indices, group, values)
    codes = (values / steps).round().clamp(-limit, limit - 1)
    return Factor(codes.cpu().numpy().astype(np.int8), indices, group)


def _is_matrix(tensor: QuantizedTensor) -> bool:
    return tensor.codes is not None and tensor.codes.shape == tensor.shape


def _invert(hessian: Tensor, settings: Settings) -> Tensor:
    """U (C, C) of the damped Hessian; without weighting, of its mean diagonal."""
    if not settings.weighted:
        hessian = torch.diag(hessian.diagonal().mean().expand(len(hessian)))
    return factor_inverse(damp(hessian[None], settings.damping)[0])[0]


def _gain_per_byte(error: Tensor, correction: LowRank, norm: Norm) -> float:
    """Removed cost per byte; 0 if finer steps with the same bytes would remove as much.

    One more bit per weight divides the cost by 4.
    """
    before = norm.cost(error)
    gain = before - norm.cost(error - torch.from_numpy(correction.product()).to(error))
    num_bytes = stored_bytes(correction)
    by_steps = before * (1 - 0.25 ** (8 * num_bytes / error.numel()))
    return gain / num_bytes if gain > by_steps else 0.0


def stored_bytes(correction: LowRank) -> float:
    """About the bytes of a correction: integers coded by their counts, the counts, the steps."""
    total = 0.0
    for factor in (correction.left, correction.right):
        counts = np.unique(factor.codes, return_counts=True)[1]
        bits = float(counts @ np.log2(counts.sum() / counts))
        total += bits / 8 + 2 * len(counts) + len(factor.steps)
    return total


def correct_error(error: Tensor, norm: Norm, settings: Settings) -> LowRank:
    """Stored factors whose product is close to `error` (R, C)."""
    white = norm.whiten(error)
    values = factorize(white, norm.rows, settings.rank)[1] @ norm.inverse
    rank, num_cols = values.shape
    by_rank = Norm(norm.rows.new_ones(rank), norm.inverse)
    group = num_cols if settings.symmetric else settings.group
    right = round_factor(values, by_rank, settings.right_bits, group)
    basis = norm.whiten(torch.from_numpy(right.values()).to(error))
    hessian, _ = damp((basis @ basis.T)[None], _LEAST_DAMPING)
    by_row = Norm(norm.rows, factor_inverse(hessian)[0])
    group = rank if settings.symmetric else rank * len(error)
    left = round_factor(fit_left(white, basis), by_row, settings.left_bits, group)
    return LowRank(left, right)


def factorize(white: Tensor, rows: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    """Factors (R, k) and (k, C), k at most `rank`, with the product closest to `white` (R, C).

    Squared errors of row r cost `rows[r]`. Errors in all columns of the left factor cost the same,
    so that one step is right for all of them.
    """
    scaled = (rows / rows.mean()).sqrt()[:, None] * white
    rank = min(rank, *white.shape)
    # Eigenvectors of the shorter side are exact, and reproducible unlike randomized methods.
    if len(white) <= white.shape[1]:
        vectors = torch.linalg.eigh(scaled @ scaled.T).eigenvectors[:, -rank:]
        basis = vectors.T @ scaled
    else:
        values, vectors = torch.linalg.eigh(scaled.T @ scaled)
        basis = values[-rank:, None].clamp_min(0).sqrt() * vectors[:, -rank:].T
    basis /= math.sqrt(len(white))
    return fit_left(white, basis), basis


def fit_left(white: Tensor, basis: Tensor) -> Tensor:
    """The left factor (R, k) whose product with `basis` (k, C) is closest to `white` (R, C)."""
    return white @ basis.T @ torch.linalg.pinv(basis @ basis.T, hermitian=True)


def round_factor(values: Tensor, norm: Norm, bits: int, group: int) -> Factor:
    """A factor (m, n) in integers of `bits` bits, with one step per `group` entries in row order.

    Errors are fed back column by column, as in GPTQ.
    """
    # Factors are so small that a GPU would spend its time on launches.
    values, rows, inverse = (t.cpu() for t in (values, norm.rows, norm.inverse))
    costs = rows[:, None] / inverse.diagonal().square()
    indices = _search_steps(values, costs.expand_as(values), bits, group)
    steps = _spread(indices, group, values)
    low, high = -(2 ** (bits - 1)), 2 ** (bits - 1) - 1
    codes, errors = torch.empty_like(values), torch.empty_like(values)
    for col in range(values.shape[1]):
        target = values[:, col] - errors[:, :col] @ inverse[:col, col]
        codes[:, col] = (target / steps[:, col]).round().clamp(low, high)
        errors[:, col] = (target - codes[:, col] * steps[:, col]) / inverse[col, col]
    return Factor(codes.numpy().astype(np.int8), indices, group)


def _search_steps(values: Tensor, costs: Tensor, bits: int, group: int) -> np.ndarray:
    """Log steps (G,) int16 of least cost if each entry is rounded on its own."""
    padding = -values.numel() % group
    runs, weights = (
        torch.nn.functional.pad(t.flatten(), (0, padding)).view(-1, group) for t in (values, costs)
    )
    low, high = -(2 ** (bits - 1)), 2 ** (bits - 1) - 1
    largest = to_index((runs.abs().amax(1) / high).numpy())
    best, least = largest, torch.full_like(runs[:, 0], torch.inf)
    for below in range(OCTAVES * STEPS_PER_OCTAVE):
        indices = np.maximum(largest - below, -LARGEST_INDEX).astype(np.int16)
        steps = torch.from_numpy(from_index(indices)).to(runs)[:, None]
        restored = (runs / steps).round().clamp(low, high) * steps
        cost = (weights * (restored - runs).square()).sum(1)
        best = np.where((cost < least).numpy(), indices, best)
        least = torch.minimum(cost, least)
    return best


def _spread(indices: np.ndarray, group: int, like: Tensor) -> Tensor:
    """The step of each value (m, n)."""
    steps = torch.from_numpy(from_index(indices)).to(like)
    return steps.repeat_interleave(group)[: like.numel()].view_as(like)
