"""Context counts: raises the token that most often followed the last few tokens.

Contexts of 5 down to 1 tokens are counted over the scored stream. The longest one that was seen
`min_count` times and has a clear favourite proposes that token. The network knows such statistics
of the training text; here they are those of the text being scored. The strength "hedge" finds the
boost that pays in each case, so useless hints cost next to nothing.

Source: orders 8 to 16 with back-off in PR 1219 and PR 1514, taken down to the orders of PPM (Cleary
and Witten 1984); the strength is a Bayesian mixture (as in Willems et al. 1995).

Legal: hints come from the targets before their own, and the tilted distribution sums to one (R08,
R09). Strengths are learned from committed targets only.

Cost: one table look-up per context length and token; about a million tokens per second with Numba.
"""

from __future__ import annotations

from dataclasses import dataclass

from underpar.infer.ngram import LONGEST_CONTEXT, CountExpert, Gate
from underpar.infer.strengths import check_strength, make_strength
from underpar.recipe import ModelSpec, require

STAGE = "infer"


@dataclass(frozen=True)
class Settings:
    """`orders`: lengths of the n-grams: a context and the token that follows.
    `min_count`: how often a context must have been seen.
    `min_confidence`: confidence that its best token must have, 0 to 1.
    `prior`: the confidence is best / (total + prior), so frequent contexts count for more.
    `strength`: how far a hint is believed: "fixed" (always `boost`), "confidence" (`boost` times
    the hint's confidence) or "hedge" (learned while scoring).
    `boost`: nats added to the logit of a hint; "hedge" does not use it.
    """

    orders: tuple[int, ...] = (2, 3, 4, 5, 6)
    min_count: int = 2
    min_confidence: float = 0.3
    prior: float = 1.0
    strength: str = "hedge"
    boost: float = 1.0

    def __post_init__(self) -> None:
        largest, orders = LONGEST_CONTEXT + 1, self.orders
        in_range = bool(orders) and all(2 <= order <= largest for order in orders)
        unique = len(set(orders)) == len(orders)
        expected = f"expected different numbers from 2 to {largest}"
        require(in_range and unique, f"levers.counts.orders = {list(orders)}: {expected}")
        count, confidence = self.min_count, self.min_confidence
        require(count >= 1, f"levers.counts.min_count = {count}: expected 1 or more")
        require(
            0 <= confidence <= 1, f"levers.counts.min_confidence = {confidence}: expected 0 to 1"
        )
        require(self.prior >= 0, f"levers.counts.prior = {self.prior}: expected 0 or more")
        check_strength("counts", self.strength, self.boost)


# Hints have no effect.
NEUTRAL = Settings(strength="fixed", boost=0.0)


def plug(settings: Settings, spec: ModelSpec) -> CountExpert:
    """The expert for the scorer."""
    gate = Gate(settings.min_count, settings.min_confidence, settings.prior)
    strength = make_strength(settings.strength, settings.boost)
    return CountExpert(tuple(order - 1 for order in settings.orders), gate, strength)
