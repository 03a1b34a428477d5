"""Forecast of the budget before training: packs random weights of the right shapes."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from underpar.artifact.budget import Budget, read_budget
from underpar.artifact.fit import fit_to_cap, guess_other_bytes
from underpar.artifact.pack import pack
from underpar.artifact.table import MAX_WEIGHTS
from underpar.artifact.unpack import Artifact
from underpar.errors import RecipeError
from underpar.quant.allocate import RateCurve
from underpar.quant.logsteps import from_indices, to_index
from underpar.quant.rounding import fixed_rate_curve, round_tensor
from underpar.quant.rules import match_rules, refine, round_model
from underpar.quant.schemes import ONE_COLUMN, QuantizedModel, QuantizedTensor, Scheme
from underpar.recipe import Recipe

# Squeezed bytes of a SentencePiece model for each piece, for forecasts before a tokenizer exists
# (measured: 3.9 at 1,024 pieces and 4.8 at 2,048 on the embedded corpus, 5.4 at 8,192 on web text).
TOKENIZER_BYTES_PER_PIECE = 5


def forecast(
    recipe: Recipe, shapes: dict[str, tuple[int, ...]], code_bytes: int, tokenizer: bytes | None
) -> Budget:
    """The budget of the recipe with Gaussian weights, which are rounded and packed.

    The entropy of trained matrices is that of Gaussian ones to three digits (PR 2046). Their scale
    does not matter, because steps follow the deviations of the rows. (But for +clip, whose steps
    have a least value: of small weights, the file is smaller than the forecast.) Grids fill the
    cap: their forecast is the number of bits per weight.
    """
    num_weights = sum(math.prod(shape) for shape in shapes.values())
    if num_weights > MAX_WEIGHTS:
        raise RecipeError(f"the recipe has {num_weights} weights: expected at most {MAX_WEIGHTS}")
    rng = np.random.default_rng(0)
    weights = {name: rng.standard_normal(shape, np.float32) for name, shape in shapes.items()}
    if tokenizer is None:
        tokenizer = rng.bytes(TOKENIZER_BYTES_PER_PIECE * recipe.model.vocab_size)

    refined = refine(match_rules(list(shapes), recipe.quant.rules), recipe.quant.finer_matrices)
    schemes = dict(sorted(refined.items()))

    def make(constant: float) -> tuple[Budget, int]:
        def solve(
            weights: Mapping[str, np.ndarray], schemes: Mapping[str, Scheme]
        ) -> QuantizedModel:
            return {n: _round(weights[n], scheme, constant) for n, scheme in schemes.items()}

        tensors = round_model(weights, schemes, solve)
        data = pack(Artifact(recipe, tokenizer, tensors))
        budget = read_budget(data, code_bytes, recipe.limits.cap_bytes)
        return budget, budget.total_bytes

    num_grids = sum(math.prod(shapes[n]) for n, scheme in schemes.items() if scheme.states)
    fixed = {name: weights[name] for name, scheme in schemes.items() if scheme.calibrated}
    if num_grids:
        curve, least = RateCurve(np.zeros(1), np.array([num_grids])), 0.0
    elif recipe.quant.fit and fixed:
        curve, least = fixed_rate_curve(fixed, schemes), 1.0
    else:
        return make(1.0)[0]
    other_bytes = code_bytes + len(tokenizer)
    return fit_to_cap(make, curve, recipe.limits.cap_bytes, other_bytes, least=least).made


def grid_bits(
    recipe: Recipe, shapes: Mapping[str, tuple[int, ...]], code_bytes: int, tokenizer: bytes
) -> float:
    """Bits per weight that the cap leaves to the grids, about; no weights are made.

    Below 0 the rest alone exceeds the cap. Without grids: infinite if the model fits, else below 0.
    """
    schemes = match_rules(list(shapes), recipe.quant.rules)
    grids = [name for name, scheme in schemes.items() if scheme.states]
    other = guess_other_bytes(schemes, shapes, code_bytes, tokenizer, grids)
    room_bits = 8 * (recipe.limits.cap_bytes - other)
    num_weights = sum(math.prod(shapes[name]) for name in grids)
    return room_bits / num_weights if num_weights else math.copysign(math.inf, room_bits)


def _round(weight: np.ndarray, scheme: Scheme, constant: float) -> QuantizedTensor:
    """Round a matrix without a calibration, for a scheme that needs one."""
    if not scheme.states:
        columns = np.zeros(weight.shape[1], np.int16) if scheme.columns else None
        plain = round_tensor(weight, Scheme(scheme.bits, scheme.sigmas, log=scheme.log), constant)
        return replace(plain, scheme=scheme, columns=columns)
    rng = np.random.default_rng(0)
    # Steps of rows and columns vary about as much as those of a trained model.
    rows = to_index(np.exp2(rng.normal(np.log2(constant), 0.5, weight.shape[0])))
    columns = np.rint(rng.normal(0, 3, weight.shape[1])).astype(np.int16)
    steps = from_indices(rows, columns if scheme.columns else ONE_COLUMN)
    # Plain rounding stands in for the trellis, which is slow and has the same rate: its points are
    # half as far apart.
    codes = np.rint(weight / (1 + steps**2 / 12) / steps).astype(np.int16)
    plain_grid = Scheme(states=1, columns=scheme.columns)
    return QuantizedTensor(
        weight.shape, plain_grid, rows, codes, columns if scheme.columns else None
    )
