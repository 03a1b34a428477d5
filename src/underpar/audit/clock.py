"""R02, R04: the seconds of all work that reads training text to change the model."""

from __future__ import annotations

from underpar.audit.case import Case
from underpar.audit.finding import Finding, judge

# Training ends with a whole step, so slightly after its time: a share of the budget.
OVERSHOOT = 0.01


def training_time(case: Case) -> Finding:
    """Training, calibration and tuning fit the auditor's limit, and the recipe's own budget."""
    spent = sum(case.spent_seconds.values())
    own = case.recipe.train.budget_seconds or case.limits.train_seconds
    limit = min(own, case.limits.train_seconds)
    parts = ", ".join(f"{name} {value:.1f}" for name, value in case.spent_seconds.items())
    return judge(
        "time",
        0 < spent <= limit * (1 + OVERSHOOT),
        f"{spent:.1f} of {limit:g} seconds with training text ({parts})",
        limit_seconds=limit,
        **case.spent_seconds,
    )
