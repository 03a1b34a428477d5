"""The curves of `lab.quant_curves`: how each of them rounds a model, and counts its bytes.

A curve has two functions. The first one rounds a model; it takes a factor that scales all
published step widths. The second one counts the bytes of the rounded model by part.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import Executor
from dataclasses import dataclass, field, replace

import numpy as np
import torch

from underpar.artifact import matrix_encoder
from underpar.artifact.budget import class_of
from underpar.artifact.pack import pack
from underpar.artifact.unpack import Artifact, LazyArtifact
from underpar.core.runtime import Runtime
from underpar.lab.published_coders import (
    SMALL_WEIGHTS,
    Compressor,
    lzma_bytes,
    per_group_bytes,
    shrink,
    side_bytes,
    split,
)
from underpar.model.network import Network
from underpar.quant import lqer, tune
from underpar.quant.allocate import Layout, RateCurve, gaussian_bits, rate_curve
from underpar.quant.calibration import TrainingText
from underpar.quant.files import Measured
from underpar.quant.rules import match_rules, quantize_model
from underpar.quant.schemes import QuantizedModel, Scheme, dequantize, parse_scheme
from underpar.quant.solve import Solver
from underpar.stages.calibrate import Trained
from underpar.train.validate import Validator

# Bits and step widths of PR 2014; widths are in standard deviations of a row.
PUBLISHED = {"embedding": (7, 14.0), "attn": (6, 13.0), "mlp": (6, 11.5)}
# Low-rank corrections as published (PR 1797), and ours.
PLAIN_LQER = lqer.Settings(tensors=3, weighted=False)
LQER = lqer.Settings(tensors=3)


@dataclass(frozen=True, eq=False)
class Case:
    """One trained model, the costs of errors in its weights, and the text to price it on."""

    trained: Trained
    measured: Measured
    solver: Solver
    model: Network
    """Holds the weights that are being priced."""
    teacher: Network
    """Holds the trained weights."""
    text: TrainingText
    tuning: tune.Settings
    validator: Validator
    runtime: Runtime
    compressor: Compressor
    pool: Executor
    """Runs the compressor."""
    rate_curves: dict[Scheme, RateCurve] = field(default_factory=dict)

    @property
    def matrices(self) -> dict[str, np.ndarray]:
        """The weights whose inputs were calibrated."""
        known = self.measured.calibration.hessians
        return {name: w for name, w in self.trained.weights.items() if name in known}

    def round(
        self, schemes: Mapping[str, Scheme], factor: float, constant: float = 1.0
    ) -> QuantizedModel:
        """The model with matrices rounded by `schemes`, the rest by the recipe's rules.

        Schemes of the recipe that need a calibration are replaced by fp16.
        """
        others = match_rules(list(self.trained.weights), self.trained.recipe.quant.rules)
        plain = {n: Scheme() if s.calibrated else widen(s, factor) for n, s in others.items()}
        rules = [f"{name} {scheme}" for name, scheme in {**plain, **schemes}.items()]
        solve = replace(self.solver, constant=constant).solve
        return quantize_model(self.trained.weights, rules, solve)

    def correct(self, tensors: QuantizedModel, settings: lqer.Settings) -> QuantizedModel:
        """The model with low-rank corrections."""
        costs = self.solver.sensitivity if settings.weighted else None
        calibration = self.measured.calibration
        weights, device = self.trained.weights, self.solver.device
        return lqer.correct(tensors, weights, calibration, costs, settings, device)

    def tune(self, tensors: QuantizedModel) -> QuantizedModel:
        """The model with its control tensors fitted to the rounded matrices."""
        load(self.model, {name: dequantize(t) for name, t in tensors.items()})
        return tune.tune_halves(
            tensors, self.model, self.teacher, self.text, self.runtime, self.tuning, SMALL_WEIGHTS
        )

    def price(self, weights: Mapping[str, np.ndarray]) -> float:
        """Bits per byte of the held-out documents with these weights."""
        load(self.model, weights)
        return self.validator.run(self.model, None).live_bpb


def widen(scheme: Scheme, factor: float) -> Scheme:
    """The scheme with its step width, if it has one, times a factor."""
    return replace(scheme, sigmas=round(scheme.sigmas * factor, 6))


def load(model: Network, weights: Mapping[str, np.ndarray]) -> None:
    """Give a model these weights."""
    model.load_state_dict(
        {n: torch.from_numpy(np.ascontiguousarray(w)) for n, w in weights.items()}
    )


def _published_schemes(case: Case, factor: float) -> dict[str, Scheme]:
    schemes = {}
    for name in case.matrices:
        bits, sigmas = PUBLISHED[class_of(name)]
        schemes[name] = widen(Scheme(bits, sigmas, "gptq"), factor)
    return schemes


def _round_fixed(case: Case, factor: float) -> QuantizedModel:
    return case.round(_published_schemes(case, factor), factor)


def _round_by_importance(case: Case, factor: float) -> QuantizedModel:
    schemes = _published_schemes(case, factor)
    return case.round({n: replace(s, rule="hq") for n, s in schemes.items()}, factor)


def _round_published(case: Case, factor: float) -> QuantizedModel:
    return case.correct(_round_fixed(case, factor), PLAIN_LQER)


def _round_grid(case: Case, factor: float, scheme: Scheme) -> QuantizedModel:
    """Grids with the rate that the published steps have for Gaussian weights."""
    matrices = case.matrices
    if scheme not in case.rate_curves:
        layout = Layout(columns=scheme.columns, num_states=scheme.states)
        layouts = dict.fromkeys(matrices, layout)
        case.rate_curves[scheme] = rate_curve(matrices, case.solver.sensitivity, layouts)
    rate_bits = sum(
        matrices[name].size * float(gaussian_bits(published.sigmas / published.limit))
        for name, published in _published_schemes(case, factor).items()
    )
    constant = case.rate_curves[scheme].constant_for(rate_bits)
    return case.round(dict.fromkeys(matrices, scheme), factor, constant)


def _round_corrected(case: Case, factor: float, scheme: Scheme) -> QuantizedModel:
    return case.tune(case.correct(_round_grid(case, factor, scheme), LQER))


# Bytes by part, and a remark.
Count = tuple[dict[str, int], str]


def _count_lzma(case: Case, tensors: QuantizedModel) -> Count:
    return {"symbols": lzma_bytes(split(tensors)[0]), **side_bytes(tensors, shrink)}, "lzma"


def _count_groups(case: Case, tensors: QuantizedModel) -> Count:
    codes, _ = split(tensors)
    groups = per_group_bytes(codes, case.compressor, case.pool, case.solver.device)
    with_sort = groups.sorted_bytes + groups.permutation_bytes
    remark = (
        f"{case.compressor.name}, rows {'sorted' if groups.sort_pays else 'unsorted'} "
        f"({with_sort} bytes of symbols and permutations with the sort, {groups.unsorted_bytes} "
        "without)"
    )
    return {**groups.parts(), **side_bytes(tensors, shrink)}, remark


def _count_coder(case: Case, tensors: QuantizedModel) -> Count:
    codes, _ = split(tensors)
    symbols = sum(map(len, matrix_encoder.encode_many([*codes.values()])))
    parts = {"symbols": symbols, **side_bytes(tensors)}
    # Each stream is stored with its length.
    parts["framing"] += 4 * len(codes)
    return parts, "row and column widths"


def _count_file(case: Case, tensors: QuantizedModel) -> Count:
    """The bytes of the artifact that `pack` would write, with an empty tokenizer."""
    data = pack(Artifact(case.trained.recipe, b"", tensors))
    _, _, halves, indices, codes, corrections = LazyArtifact(data).section_bytes
    parts = {"symbols": codes, "steps": indices, "controls": halves, "corrections": corrections}
    return {**parts, "framing": len(data) - sum(parts.values())}, "packed file"


@dataclass(frozen=True)
class Curve:
    """A way to round at a size, and a way to store what comes out."""

    what: str
    round: Callable[[Case, float], QuantizedModel]
    count: Callable[[Case, QuantizedModel], Count]


def _grid(what: str, name: str, make: Callable[[Case, float, Scheme], QuantizedModel]) -> Curve:
    scheme = parse_scheme(name)
    return Curve(what, lambda case, factor: make(case, factor, scheme), _count_file)


# (b) first: its compressors take longest, and run while the other curves are rounded.
CURVES = {
    "b": Curve("int6/int7 + groups, lrzip/zpaq, LQER", _round_published, _count_groups),
    "a": Curve("int6/int7 + lzma", _round_fixed, _count_lzma),
    "c": Curve("int6/int7 + row and column coder", _round_fixed, _count_coder),
    "h": Curve("int6/int7, steps by importance of rows", _round_by_importance, _count_coder),
    "d": _grid("+ steps by sensitivity", "grid1", _round_grid),
    "d+": _grid("+ steps by sensitivity, columns too", "grid1+columns", _round_grid),
    "e": _grid("+ trellis", "grid8", _round_grid),
    "e+": _grid("+ trellis, columns too", "grid8+columns", _round_grid),
    "f": _grid("+ trellis, columns, corrections", "grid8+columns", _round_corrected),
}
