"""The rules of the audit, in the order in which they are judged, and the loop over them.

A rule is a function: case in, finding out. Rule ids (R01 ...) are those of the contest, numbers of
checks (A01 ...) those of the field guide to valid scores, parameter-golf issue 1017.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial

from underpar.audit.behaviour import (
    causality,
    decodable_order,
    normalization,
    random_text_saves_nothing,
    score_before_update,
)
from underpar.audit.case import Case
from underpar.audit.clock import training_time
from underpar.audit.data import byte_count, identity, memorization, splits
from underpar.audit.finding import Finding, apply_rule
from underpar.audit.packing import packing
from underpar.audit.retrain import training
from underpar.audit.scores import (
    coded_bits,
    coverage,
    reproduction,
    score_files,
    scoring_time,
)
from underpar.audit.script import script
from underpar.audit.size import size

Rule = Callable[[Case], Finding]

RULES: dict[str, Rule] = {
    "size": size,
    "time": training_time,
    "identity": identity,
    "splits": splits,
    "memorization": memorization,
    "training": training,
    "packing": packing,
    "script": script,
    "score files": score_files,
    "coverage": coverage,
    "bytes": byte_count,
    "causality": causality,
    "normalization": normalization,
    "random text": random_text_saves_nothing,
    "score before update": score_before_update,
    "order": decodable_order,
    "reproduction": reproduction,
    "scoring time": scoring_time,
    "coded bits": coded_bits,
}


def run_audit(
    case: Case, on_rule: Callable[[Finding], None] | None = None, rules: Iterable[str] = RULES
) -> list[Finding]:
    """The rules in turn. An error that a rule raises is a fail, with its message as the summary."""
    findings = []
    for name in rules:
        findings.append(apply_rule(name, partial(RULES[name], case)))
        if on_rule:
            on_rule(findings[-1])
    return findings
