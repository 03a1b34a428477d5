"""N-gram tilt: raises the probability of the token that followed the same fifteen tokens before.

A table over the scored stream keeps what came after every context of order - 1 tokens. If one token
came in at least `min_confidence` of the cases, its logit gets `boost` nats and the distribution is
normalized again. Long repetitions are rare (1.3 % of FineWeb's targets) and nearly certain, and a
small model cannot remember them.

Source: the token expert of PR 1420, PR 1514 and PR 2135, worth about 0.5 mBPB there.

Legal: a hint is made from the targets before its own, whether or not it comes true, and the tilted
distribution sums to one (R08, R09). Experts that are gated by the class of the target itself, as in
PR 1967, are not here: their silence gives the target away.

Cost: one table look-up per token; millions of tokens per second with Numba, tens of times slower
without it. The table has up to 2 GB.
"""

from __future__ import annotations

from dataclasses import dataclass

from underpar.infer.ngram import LONGEST_CONTEXT, CountExpert, Gate
from underpar.infer.strengths import check_strength, make_strength
from underpar.recipe import ModelSpec, require

STAGE = "infer"


@dataclass(frozen=True)
class Settings:
    """`order`: length of an n-gram: the context and the token that follows.
    `min_confidence`: share of a context's past that its best token must have, 0 to 1.
    `strength`: how far a hint is believed: "fixed" (always `boost`), "confidence" (`boost` times
    the hint's confidence) or "hedge" (learned while scoring).
    `boost`: nats added to the logit of a hint; "hedge" does not use it.
    """

    order: int = 16
    min_confidence: float = 0.8
    strength: str = "fixed"
    boost: float = 2.625

    def __post_init__(self) -> None:
        largest = LONGEST_CONTEXT + 1
        order, confidence = self.order, self.min_confidence
        require(2 <= order <= largest, f"levers.tilt.order = {order}: expected 2 to {largest}")
        require(0 <= confidence <= 1, f"levers.tilt.min_confidence = {confidence}: expected 0 to 1")
        check_strength("tilt", self.strength, self.boost)


# Hints have no effect.
NEUTRAL = Settings(boost=0.0)


def plug(settings: Settings, spec: ModelSpec) -> CountExpert:
    """The expert for the scorer."""
    gate = Gate(min_count=1, min_confidence=settings.min_confidence, prior=0.0)
    strength = make_strength(settings.strength, settings.boost)
    return CountExpert((settings.order - 1,), gate, strength)
