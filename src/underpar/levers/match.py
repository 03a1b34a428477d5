"""Follow the last passage that agrees with the text so far, and believe what comes next in it.

Quotations, boilerplate and lists repeat at any distance, far beyond the context. The last 32, 16 or
8 tokens lead to the place where they were seen last; from there the passage is followed for as long
as it agrees, and the longer it does the surer is its next token. `hedge` learns how sure. Numba
makes it fast (millions of tokens a second). Source: the match model of PAQ (Mahoney 2005,
"Adaptive Weighing of Context Models for Lossless Data Compression"), as a proposal in the manner of
PR 1514. Legal: hints come from targets before their own and the tilted distribution sums to one
(R08, R09); strengths are learnt from committed targets alone.
"""

from __future__ import annotations

from dataclasses import dataclass

from underpar.infer.ngram import LONGEST_CONTEXT, MatchExpert
from underpar.infer.strengths import check_strength, make_strength
from underpar.recipe import ModelSpec, require

STAGE = "infer"


@dataclass(frozen=True)
class Settings:
    """`lengths`: tokens by which a passage is found.

    `strength`: "hedge" (learnt while scoring), "fixed" (`boost` for every hint) or "confidence" (in
    proportion to it).
    """

    lengths: tuple[int, ...] = (8, 16, 32)
    strength: str = "hedge"
    boost: float = 2.0

    def __post_init__(self) -> None:
        lengths = self.lengths
        known = bool(lengths) and all(1 <= length <= LONGEST_CONTEXT for length in lengths)
        once = len(set(lengths)) == len(lengths)
        expected = f"expected different numbers from 1 to {LONGEST_CONTEXT}"
        require(known and once, f"levers.match.lengths = {list(lengths)}: {expected}")
        check_strength("match", self.strength, self.boost)


# Hints that are not believed at all.
NEUTRAL = Settings(strength="fixed", boost=0.0)


def plug(settings: Settings, spec: ModelSpec) -> MatchExpert:
    """The expert for the scorer."""
    return MatchExpert(settings.lengths, make_strength(settings.strength, settings.boost))
