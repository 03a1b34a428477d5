"""Rules: name pattern -> scheme, in order; the first match counts (after torchao's FqnToConfig)."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import numpy as np

from underpar.errors import RecipeError
from underpar.quant.rounding import round_tensor
from underpar.quant.schemes import QuantizedModel, Scheme, parse_scheme

# The matrices whose inputs `quant.calibration` reads: those of blocks, and the head.
CALIBRATED = re.compile(
    r"((encoder|main|decoder)\.)?blocks\.\d+\.(attn\.[qkvo]|mlp\.(up|down))\.weight"
    r"|embedding\.weight|lm_head\.weight"
)


def match_rules(names: Sequence[str], rules: Sequence[str]) -> dict[str, Scheme]:
    """The scheme of each tensor: that of the first rule 'pattern scheme' that matches its name."""
    parsed = [(rule.split()[0], parse_scheme(rule.split()[1])) for rule in rules]
    schemes = {}
    for name in names:
        fitting = [scheme for pattern, scheme in parsed if fnmatch.fnmatchcase(name, pattern)]
        if not fitting:
            raise RecipeError(f"quant.rules: no pattern fits {name!r}; end the list with '* fp16'")
        schemes[name] = fitting[0]
    return schemes


def check_rules(shapes: Mapping[str, tuple[int, ...]], rules: Sequence[str]) -> dict[str, Scheme]:
    """The scheme of each tensor; rules that packing could not follow are refused."""
    schemes = match_rules(list(shapes), rules)
    for name, scheme in schemes.items():
        shape = shapes[name]
        start = f"quant.rules: {scheme} for {name!r}"
        if scheme.calibrated and not (CALIBRATED.fullmatch(name) and len(shape) == 2):
            raise RecipeError(
                f"{start} of shape {shape}, whose inputs are not calibrated: expected a matrix of "
                "a block's attn or mlp, or the embedding; use intB:k, as in int6:12.85, or fp16"
            )
        row = shape[-1] if shape else 1
        if scheme.group and row % scheme.group:
            raise RecipeError(
                f"{start}: rows of {row} weights are not whole runs of {scheme.group}; "
                f"choose a divisor of {row}"
            )
    return schemes


def refine(
    schemes: Mapping[str, Scheme], number: int, inputs: Mapping[str, float] | None = None
) -> dict[str, Scheme]:
    """The schemes, of which the gptqB of `number` matrices have one more bit (PR 1105).

    They are those with the largest `inputs`, sums of squares (the trace of the Hessian). Without
    these, for a forecast, they are the first.
    """
    names = [name for name, scheme in schemes.items() if scheme.form == "gptq"]
    if inputs is not None:
        names.sort(key=lambda name: -inputs.get(name, 0.0))
    more = {name: replace(schemes[name], bits=schemes[name].bits + 1) for name in names[:number]}
    return {**schemes, **more}


# (weights, schemes) of the tensors that need a calibration -> these tensors, rounded.
Solve = Callable[[Mapping[str, np.ndarray], Mapping[str, Scheme]], QuantizedModel]


def quantize_model(
    weights: Mapping[str, np.ndarray], rules: Sequence[str], solve: Solve | None = None
) -> QuantizedModel:
    """Every tensor rounded by its rule, in name order; `solve` rounds the calibrated ones."""
    return round_model(weights, match_rules(sorted(weights), rules), solve)


def round_model(
    weights: Mapping[str, np.ndarray], schemes: Mapping[str, Scheme], solve: Solve | None = None
) -> QuantizedModel:
    """Every tensor rounded by its scheme, in the order of `schemes`."""
    calibrated = {name: scheme for name, scheme in schemes.items() if scheme.calibrated}
    solved: QuantizedModel = {}
    if calibrated:
        if solve is None:
            name, scheme = next(iter(calibrated.items()))
            raise RecipeError(
                f"quant.rules: {scheme} for {name!r} needs a calibration and none was given; "
                "run 'underpar calibrate RUN' first, or use intB:k, as in int6:12.85"
            )
        solved = solve({name: weights[name] for name in calibrated}, calibrated)
    return {
        name: solved[name] if name in solved else round_tensor(weights[name], scheme)
        for name, scheme in schemes.items()
    }
