"""Believe the token that most often followed the last few, the longest known context first.

Contexts of 5 down to 1 tokens are counted over the scored stream; the first that was seen
`min_count` times and has a clear favourite proposes it. A network knows such statistics of the
training text; here it learns those of this one. `hedge` finds the boost that pays in each case, so
useless hints cost next to nothing. Numba makes it fast (about a million tokens a second). Source:
orders 8 to 16 with back-off in PR 1219 and PR 1514, taken down to the orders of PPM (Cleary and
Witten 1984); the strength is a Bayesian mixture (as in Willems et al. 1995). Legal: hints come from
targets before their own and the tilted distribution sums to one (R08, R09); strengths are learnt
from committed targets alone.
"""

from __future__ import annotations

from dataclasses import dataclass

from underpar.infer.ngram import LONGEST_CONTEXT, CountExpert, Gate
from underpar.infer.strengths import check_strength, make_strength
from underpar.recipe import ModelSpec, require

STAGE = "infer"


@dataclass(frozen=True)
class Settings:
    """Confidence is best / (total + `prior`), so that what was seen often is surer.

    `strength`: "hedge" (learnt while scoring), "fixed" (`boost` for every hint) or "confidence" (in
    proportion to it).
    """

    orders: tuple[int, ...] = (2, 3, 4, 5, 6)
    min_count: int = 2
    min_confidence: float = 0.3
    prior: float = 1.0
    strength: str = "hedge"
    boost: float = 1.0

    def __post_init__(self) -> None:
        largest, orders = LONGEST_CONTEXT + 1, self.orders
        known = bool(orders) and all(2 <= order <= largest for order in orders)
        once = len(set(orders)) == len(orders)
        expected = f"expected different numbers from 2 to {largest}"
        require(known and once, f"levers.counts.orders = {list(orders)}: {expected}")
        num, share = self.min_count, self.min_confidence
        require(num >= 1, f"levers.counts.min_count = {num}: expected 1 or more")
        require(0 <= share <= 1, f"levers.counts.min_confidence = {share}: expected 0 to 1")
        require(self.prior >= 0, f"levers.counts.prior = {self.prior}: expected 0 or more")
        check_strength("counts", self.strength, self.boost)


# Hints that are not believed at all.
NEUTRAL = Settings(strength="fixed", boost=0.0)


def plug(settings: Settings, spec: ModelSpec) -> CountExpert:
    """The expert for the scorer."""
    gate = Gate(settings.min_count, settings.min_confidence, settings.prior)
    strength = make_strength(settings.strength, settings.boost)
    return CountExpert(tuple(order - 1 for order in settings.orders), gate, strength)
