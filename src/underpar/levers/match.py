"""Match model: finds the last passage that agrees with the text so far and raises its next token.

Quotations, boilerplate and lists repeat at any distance, far beyond the context. The last 32, 16 or
8 tokens lead to the place where they were seen last. From there the passage is followed as long as
it agrees; the longer it agrees, the higher the confidence in its next token.

Source: the match model of PAQ (Mahoney 2005, "Adaptive Weighing of Context Models for Lossless Data
Compression"), as a proposal in the manner of PR 1514.

Legal: hints come from the targets before their own, and the tilted distribution sums to one (R08,
R09). Strengths are learned from committed targets only.

Cost: one table look-up per token; millions of tokens per second with Numba.
"""

from __future__ import annotations

from dataclasses import dataclass

from underpar.infer.ngram import LONGEST_CONTEXT, MatchExpert
from underpar.infer.strengths import check_strength, make_strength
from underpar.recipe import ModelSpec, require

STAGE = "infer"


@dataclass(frozen=True)
class Settings:
    """`lengths`: numbers of tokens by which a passage is found.
    `strength`: how far a hint is believed: "fixed" (always `boost`), "confidence" (`boost` times
    the hint's confidence) or "hedge" (learned while scoring).
    `boost`: nats added to the logit of a hint; "hedge" does not use it.
    """

    lengths: tuple[int, ...] = (8, 16, 32)
    strength: str = "hedge"
    boost: float = 2.0

    def __post_init__(self) -> None:
        lengths = self.lengths
        in_range = bool(lengths) and all(1 <= length <= LONGEST_CONTEXT for length in lengths)
        unique = len(set(lengths)) == len(lengths)
        expected = f"expected different numbers from 1 to {LONGEST_CONTEXT}"
        require(in_range and unique, f"levers.match.lengths = {list(lengths)}: {expected}")
        check_strength("match", self.strength, self.boost)


# Hints have no effect.
NEUTRAL = Settings(strength="fixed", boost=0.0)


def plug(settings: Settings, spec: ModelSpec) -> MatchExpert:
    """The expert for the scorer."""
    return MatchExpert(settings.lengths, make_strength(settings.strength, settings.boost))
