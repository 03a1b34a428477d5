"""R02, R04: the seconds of all work that reads training text to change the model."""

from __future__ import annotations

from underpar.audit.case import Case
from underpar.audit.finding import PASS, Finding, judge, not_shown

# Training ends with a whole step, so slightly after its time: a share of the budget.
OVERSHOOT = 0.01


def training_time(case: Case) -> Finding:
    """Training, calibration and tuning fit the auditor's limit, and the recipe's own budget."""
    spent = sum(case.spent_seconds.values())
    own = case.recipe.train.budget_seconds or case.limits.train_seconds
    limit = min(own, case.limits.train_seconds)
    parts = ", ".join(f"{name} {value:.1f}" for name, value in case.spent_seconds.items())
    told = f"{spent:.1f} of {limit:g} seconds with training text ({parts})"
    evidence = {"limit_seconds": limit, **case.spent_seconds}
    finding = judge("time", 0 < spent <= limit * (1 + OVERSHOOT), told, **evidence)
    # The rule "training" compares the chain with the clock that is judged here.
    if finding.verdict == PASS and not (chain := case.folder.evidence_file).is_file():
        return not_shown("time", f"{told}; no {chain.name} has the clock of each step", **evidence)
    return finding
