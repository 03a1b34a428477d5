"""Name pattern -> scheme: ordered rules, each tensor matched once (after torchao's FqnToConfig)."""

from __future__ import annotations

import fnmatch
from collections.abc import Mapping, Sequence

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


def quantize_model(weights: Mapping[str, np.ndarray], rules: Sequence[str]) -> QuantizedModel:
    """Every tensor by its rule, in name order."""
    schemes = match_rules(sorted(weights), rules)
    return {name: quantize(weights[name], scheme) for name, scheme in schemes.items()}
