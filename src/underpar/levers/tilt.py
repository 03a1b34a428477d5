"""Believe a token that has followed the last fifteen before: more weight for it, then renormalize.

A table over the scored stream keeps what came behind every context of order - 1 tokens; where one
token came `min_confidence` of the time, its logit gets `boost` nats. Long repetitions are rare
(1.3 % of FineWeb's targets) and nearly sure, and a small model cannot remember them. Numba makes it
fast (millions of tokens a second); without it the same proposals take tens of times as long.
Source: the token expert of PR 1420, PR 1514 and PR 2135, worth about 0.5 mBPB there. Legal: a hint
is made from targets before its own, whether or not it comes true, and the tilted distribution sums
to one (R08, R09). The experts gated by the class of the target itself, as in PR 1967, are not here:
their silence gives the target away.
"""

from __future__ import annotations

from dataclasses import dataclass

from underpar.infer.ngram import LONGEST_CONTEXT, CountExpert, Gate
from underpar.infer.strengths import check_strength, make_strength
from underpar.recipe import ModelSpec, require

STAGE = "infer"


@dataclass(frozen=True)
class Settings:
    """`min_confidence`: share of a context's past that its best token must have.

    `strength`: "fixed" (`boost` for every hint), "confidence" (in proportion to it) or "hedge"
    (learnt while scoring).
    """

    order: int = 16
    min_confidence: float = 0.8
    strength: str = "fixed"
    boost: float = 2.625

    def __post_init__(self) -> None:
        largest = LONGEST_CONTEXT + 1
        order, share = self.order, self.min_confidence
        require(2 <= order <= largest, f"levers.tilt.order = {order}: expected 2 to {largest}")
        require(0 <= share <= 1, f"levers.tilt.min_confidence = {share}: expected 0 to 1")
        check_strength("tilt", self.strength, self.boost)


# A hint that is not believed at all.
NEUTRAL = Settings(boost=0.0)


def plug(settings: Settings, spec: ModelSpec) -> CountExpert:
    """The expert for the scorer."""
    gate = Gate(min_count=1, min_confidence=settings.min_confidence, prior=0.0)
    strength = make_strength(settings.strength, settings.boost)
    return CountExpert((settings.order - 1,), gate, strength)
