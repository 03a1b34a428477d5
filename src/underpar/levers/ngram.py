"""N-gram experts: tokens after long contexts, within a word and at word starts; one of them tilts.

Three experts count the scored stream. The token expert has contexts of 8 to 16 tokens, each with
its own gate; the longest one whose gate opens proposes its best token. The within-word expert knows
what came after the open word's tokens, the word-start expert which token began the word after the
last four. If two of them propose the same token, both get a bonus; the largest boost is used. This
is the evaluator of PR 1105 with its numbers, and with the repair of PR 1219.

Source: PR 1105; PR 1219 asks the experts of words at every position, where PR 1105 looked at the
class of the target first. PR 1420 gains 0.14 mBPB with the token expert (a boost of 1.5); for the
others see PR 1514: after the repair they gain nothing.

Legal: a hint, and whether there is one, follow from the targets before its own; the tilted
distribution sums to one (R08, R09). PR 1105, PR 1420 and PR 1967 gated their experts by the class
of the target, which gave 1 to 2 bits of it away.

Cost: one table look-up per context length and expert; about a million tokens per second with Numba.
"""

from __future__ import annotations

from dataclasses import dataclass

from underpar.infer.experts import Expert
from underpar.infer.ngram import LONGEST_CONTEXT, CountExpert, Gate, WordExpert
from underpar.infer.panel import Panel
from underpar.infer.strengths import LARGEST_BOOST, make_strength
from underpar.recipe import ModelSpec, require

STAGE = "infer"

EXPERTS = ("token", "within", "start")


@dataclass(frozen=True)
class Settings:
    """`experts`: which of "token", "within" and "start" propose; the last two need a tokenizer.
    `contexts`: lengths of the token expert's contexts.
    `gates`: "length:confidence:count", for contexts from this length to the next gate's: open if
    the context came so often and its best token has this share.
    `boost`: nats of the token expert, times its confidence.
    `within_confidence`: share that the within-word expert's best token must have.
    `within_boost`: nats of the within-word expert.
    `start_words`: words in a context of the word-start expert.
    `start_confidence`: share that the word-start expert's best token must have.
    `start_count`: how often its context must have been seen.
    `start_boost`: nats of the word-start expert.
    `bonus`: nats added to the boosts of experts that propose the same token.
    """

    experts: tuple[str, ...] = EXPERTS
    contexts: tuple[int, ...] = (8, 10, 12, 14, 16)
    gates: tuple[str, ...] = ("8:0.70:3", "11:0.60:2", "14:0.50:2")
    boost: float = 1.0
    within_confidence: float = 0.25
    within_boost: float = 0.55
    start_words: int = 4
    start_confidence: float = 0.8
    start_count: int = 3
    start_boost: float = 0.5
    bonus: float = 0.5

    def __post_init__(self) -> None:
        known = bool(self.experts) and set(self.experts) <= set(EXPERTS)
        some = f"expected some of {', '.join(EXPERTS)}"
        _require("experts", self.experts, known and _differ(self.experts), some)
        in_range = all(1 <= n <= LONGEST_CONTEXT for n in self.contexts)
        lengths = f"expected different numbers from 1 to {LONGEST_CONTEXT}"
        differ = bool(self.contexts) and _differ(self.contexts)
        _require("contexts", self.contexts, in_range and differ, lengths)
        firsts = [first for first, _ in map(_parse, self.gates)]
        covered = bool(firsts) and firsts[0] <= min(self.contexts)
        rising = f"expected rising lengths, the first at most {min(self.contexts)}"
        _require("gates", self.gates, covered and firsts == sorted(set(firsts)), rising)
        for name in ("within_confidence", "start_confidence"):
            share = getattr(self, name)
            _require(name, share, 0 <= share <= 1, "expected 0 to 1")
        for name in ("boost", "within_boost", "start_boost", "bonus"):
            nats = getattr(self, name)
            fits = 0 <= nats <= LARGEST_BOOST / 2
            _require(name, nats, fits, f"expected 0 to {LARGEST_BOOST / 2:g} nats")
        some_words = 1 <= self.start_words <= LONGEST_CONTEXT
        _require("start_words", self.start_words, some_words, f"expected 1 to {LONGEST_CONTEXT}")
        _require("start_count", self.start_count, self.start_count >= 1, "expected 1 or more")


def _require(name: str, value: object, fits: bool, expected: str) -> None:
    shown = list(value) if isinstance(value, tuple) else value
    require(fits, f"levers.ngram.{name} = {shown}: {expected}")


def _differ(values: tuple[object, ...]) -> bool:
    return len(set(values)) == len(values)


def _parse(text: str) -> tuple[int, Gate]:
    """The length from which on a gate holds, and the gate."""
    try:
        first, confidence, count = text.split(":")
        length, gate = int(first), Gate(int(count), float(confidence), prior=0.0)
    except ValueError:
        length, gate = 0, Gate(0, 0.0, prior=0.0)
    fits = length >= 1 and gate.min_count >= 1 and 0 <= gate.min_confidence <= 1
    _require("gates", text, fits, 'expected "length:confidence:count", as in "8:0.70:3"')
    return length, gate


# Hints have no effect.
NEUTRAL = Settings(boost=0.0, within_boost=0.0, start_boost=0.0, bonus=0.0, experts=("token",))


def plug(settings: Settings, spec: ModelSpec) -> Panel:
    """The experts for the scorer."""
    gates = dict(map(_parse, settings.gates))
    by_length = {n: gates[max(g for g in gates if g <= n)] for n in settings.contexts}
    within = Gate(1, settings.within_confidence, prior=0.0)
    start = Gate(settings.start_count, settings.start_confidence, prior=0.0)
    boosts = {
        "token": settings.boost,
        "within": settings.within_boost,
        "start": settings.start_boost,
    }
    strengths = {
        name: make_strength("confidence" if name == "token" else "fixed", nats)
        for name, nats in boosts.items()
    }
    members: dict[str, Expert] = {
        "token": CountExpert(settings.contexts, by_length, strengths["token"]),
        "within": WordExpert(0, within, strengths["within"]),
        "start": WordExpert(settings.start_words, start, strengths["start"]),
    }
    chosen = [name for name in EXPERTS if name in settings.experts]
    largest = max(boosts[name] for name in chosen)
    return Panel([members[name] for name in chosen], largest, settings.bonus)
