"""A finding: one rule, its verdict, and the numbers behind it."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

PASS, FAIL, NOT_SHOWN = "pass", "fail", "not shown"


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


def not_shown(rule: str, why: str) -> Finding:
    """A finding without evidence."""
    return Finding(rule, NOT_SHOWN, why)
