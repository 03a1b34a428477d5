"""Fill the byte cap: find the constant that sets the steps of all grids by packing a few times.

Steps that are given by a recipe are left alone if the file fits, and else widened by one factor.

`quant.allocate` predicts the bytes of a constant except for an offset: side data, code, tokenizer,
overhead of the coder. The offset hardly depends on the constant. Each round packs once, measures
the offset and predicts the next constant. Published runs left 16 to 100 kB of their cap unused.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Generic, TypeVar

from underpar.artifact.format import squeeze
from underpar.errors import ArtifactError
from underpar.quant.allocate import RateCurve, gaussian_bits
from underpar.quant.schemes import Scheme

T = TypeVar("T")

# Shares of the cap that may stay unused: what the search aims at, and what it accepts.
AIM, CLOSE = 0.0002, 0.0005
CLOSE_BYTES = 64
MOST_ROUNDS = 5
# Bits per weight. Finer steps gain nothing: a model that would need them does not fill its cap.
MOST_BITS = 8.0


@dataclass(frozen=True)
class Round:
    """One try: the constant and the bytes it took, code and tokenizer included."""

    constant: float
    total_bytes: int


@dataclass(frozen=True)
class Fitted(Generic[T]):
    """The result of the best constant, and all rounds."""

    made: T
    best: Round
    rounds: tuple[Round, ...]


def guess_other_bytes(
    schemes: Mapping[str, Scheme],
    shapes: Mapping[str, tuple[int, ...]],
    code_bytes: int,
    tokenizer: bytes,
    fitted: Collection[str] = (),
) -> float:
    """A first guess of all bytes except the integers of the matrices that are fitted."""
    total: float = code_bytes + len(squeeze(tokenizer))
    for name, scheme in schemes.items():
        shape = shapes[name]
        total += 2 * scheme.num_halves(shape) + scheme.num_indices(shape)
        if name not in fitted:
            total += expected_bits(scheme) * math.prod(shape) / 8
    return total


def expected_bits(scheme: Scheme) -> float:
    """Bits per Gaussian weight of the integers; 0 for fp16, and for grids, which vary."""
    if not scheme.sigmas:
        return scheme.bits
    return float(gaussian_bits(scheme.sigmas / scheme.limit))


def fit_to_cap(
    make: Callable[[float], tuple[T, int]],
    curve: RateCurve,
    cap_bytes: int,
    other_bytes: float,
    on_round: Callable[[Round], None] | None = None,
    least: float = 0.0,
) -> Fitted[T]:
    """The largest result under the cap. `make` gives the result of a constant, and its bytes.

    `other_bytes` is a first guess of the bytes that `curve` does not predict. `least` is the least
    constant; with it, a file may stay far below the cap.
    """
    finest = MOST_BITS * int(curve.counts.sum())
    best: tuple[T, Round] | None = None
    rounds: list[Round] = []
    while len(rounds) < MOST_ROUNDS:
        rate_bits = min(8 * (cap_bytes * (1 - AIM) - other_bytes), finest)
        if rate_bits <= 0:
            break
        constant = max(curve.constant_for(rate_bits), least)
        made, total_bytes = make(constant)
        rounds.append(Round(constant, total_bytes))
        if on_round:
            on_round(rounds[-1])
        if total_bytes <= cap_bytes and (best is None or total_bytes > best[1].total_bytes):
            best = made, rounds[-1]
        is_close = cap_bytes - total_bytes <= max(CLOSE * cap_bytes, CLOSE_BYTES)
        is_finest = constant == least or rate_bits == finest
        if total_bytes <= cap_bytes and (is_close or is_finest):
            break
        other_bytes = total_bytes - curve.bits(constant) / 8
    if best is None:
        size = f"{min(r.total_bytes for r in rounds)} at best" if rounds else "no room for weights"
        raise ArtifactError(
            f"the model does not fit into {cap_bytes} bytes ({size}); give fewer weights, another "
            "tokenizer or a larger cap"
        )
    return Fitted(*best, tuple(rounds))
