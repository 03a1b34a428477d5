"""Name pattern -> scheme: ordered rules, each tensor matched once (after torchao's FqnToConfig)."""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from underpar.errors import RecipeError
from underpar.quant.schemes import QuantizedTensor, Scheme, parse_scheme, quantize

QuantizedModel = dict[str, QuantizedTensor]


def match_rules(names: Sequence[str], rules: Sequence[str]) -> dict[str, Scheme]:
    """The scheme of each tensor: the first rule 'pattern scheme' whose pattern fits its name."""
    parsed = [(rule.split()[0], parse_scheme(rule.split()[1])) for rule in rules]
    schemes = {}
    for name in names:
        fitting = [scheme for pattern, scheme in parsed if fnmatch.fnmatchcase(name, pattern)]
        if not fitting:
            raise RecipeError(f"quant.rules: no pattern fits {name!r}; end the list with '* fp16'")
        schemes[name] = fitting[0]
    return schemes


def check_rules(names: Sequence[str], rules: Sequence[str]) -> None:
    """Refuse rules that packing could not follow: better now than after training."""
    for name, scheme in match_rules(names, rules).items():
        if scheme.calibrated:
            raise _needs_calibration(name, scheme)


def _needs_calibration(name: str, scheme: Scheme) -> RecipeError:
    return RecipeError(
        f"quant.rules: {scheme} for {name!r} needs a calibration, which no command makes yet; use "
        "intB:k, as in int6:12.85"
    )


# Name, weight and scheme -> the tensor, rounded with a calibration.
Solve = Callable[[str, np.ndarray, Scheme], QuantizedTensor]


def quantize_model(
    weights: Mapping[str, np.ndarray], rules: Sequence[str], solve: Solve | None = None
) -> QuantizedModel:
    """Every tensor by its rule, in name order; `solve` rounds those that need a calibration."""
    tensors = {}
    for name, scheme in match_rules(sorted(weights), rules).items():
        if not scheme.calibrated:
            tensors[name] = quantize(weights[name], scheme)
        elif solve is None:
            raise _needs_calibration(name, scheme)
        else:
            tensors[name] = solve(name, weights[name], scheme)
    return tensors
