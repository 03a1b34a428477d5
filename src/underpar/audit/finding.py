"""A finding: one rule, its verdict, and the numbers behind it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from underpar.errors import DAMAGE, UnderparError, one_line

# DEVIATION: accepted records break this rule too, in this way (section 4 of the field guide,
# parameter-golf issue 1017). NOT_SHOWN: the evidence is missing.
PASS, DEVIATION, NOT_SHOWN, FAIL = "pass", "deviation", "not shown", "fail"
# From the best to the worst.
VERDICTS = (PASS, DEVIATION, NOT_SHOWN, FAIL)

# strict: a decoder must be able to follow. precedent: deviations of accepted records are tolerated.
STRICT, PRECEDENT = "strict", "precedent"
PROFILES = (STRICT, PRECEDENT)


@dataclass(frozen=True)
class Finding:
    """The verdict on one rule. "not shown" is no pass: the summary names the missing evidence."""

    rule: str
    verdict: str
    summary: str
    evidence: dict[str, Any] = field(default_factory=dict)
    seconds: float = 0.0

    def as_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return asdict(self)


def judge(rule: str, holds: bool, summary: str, **evidence: Any) -> Finding:
    """A pass if the rule holds, else a fail."""
    return Finding(rule, PASS if holds else FAIL, summary, evidence)


def not_shown(rule: str, why: str, **evidence: Any) -> Finding:
    """A finding without the evidence that a verdict needs."""
    return Finding(rule, NOT_SHOWN, why, evidence)


def apply_rule(name: str, rule: Callable[[], Finding]) -> Finding:
    """What a rule finds, with its seconds. An error that the rule raises is a fail."""
    started = time.perf_counter()
    try:
        finding = rule()
    # A rule reads what the judged party wrote: files of other shapes are no evidence.
    except (UnderparError, OSError, AssertionError, *DAMAGE) as error:
        said = str(error) if isinstance(error, UnderparError) else repr(error)
        finding = judge(name, False, f"refused: {one_line(said)}")
    return replace(finding, seconds=time.perf_counter() - started)


def deviates(finding: Finding, ids: Sequence[str], why: str) -> Finding:
    """The finding as a deviation of accepted records, with its numbers (D1 to D10)."""
    summary = f"{finding.summary}; deviation {' and '.join(ids)}: {why}"
    evidence = finding.evidence | {"deviations": list(ids)}
    return replace(finding, verdict=DEVIATION, summary=summary, evidence=evidence)


def overall(findings: Iterable[Finding], profile: str = STRICT) -> str:
    """The verdict on a run: that of its worst finding. A strict audit fails for a deviation."""
    return worst((finding.verdict for finding in findings), profile)


def worst(verdicts: Iterable[str], profile: str = STRICT) -> str:
    """The worst of some verdicts; a deviation is a fail in a strict audit."""
    several = set(verdicts)
    if profile == STRICT and DEVIATION in several:
        return FAIL
    return max(several, key=VERDICTS.index)


def verdict_text(verdicts: Sequence[tuple[str, str]], on_all: str) -> str:
    """An audit in words, from pairs of rule and verdict and the verdict on all of them."""
    kinds = {kind: [rule for rule, each in verdicts if each == kind] for kind in VERBS}
    told = [
        f"{len(rules)} {VERBS[kind][len(rules) > 1]} ({', '.join(rules)})"
        for kind, rules in kinds.items()
        if rules
    ]
    if not told and on_all == PASS:
        return f"all {len(verdicts)} checks pass"
    return f"{on_all}, of {len(verdicts)} checks {' and '.join(told)}" if told else on_all


# How verdicts are told: of one rule, of several.
VERBS = {
    FAIL: ("fails", "fail"),
    NOT_SHOWN: ("is not shown", "are not shown"),
    DEVIATION: ("deviates", "deviate"),
}
