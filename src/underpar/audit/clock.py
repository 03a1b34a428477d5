"""R02, R04: the seconds of all work that reads training text to change the model.

Who owns a run folder can write any clock into it. The rule checks that the clocks agree with each
other and that no stage is left out; only repeated steps show how long a step takes.
"""

from __future__ import annotations

import math
from itertools import pairwise

from underpar.audit.case import Case
from underpar.audit.finding import PASS, Finding, judge, not_shown
from underpar.build.levers import plug_levers

# Training ends with a whole step, so slightly after its time: a share of the budget.
OVERSHOOT = 0.01


def training_time(case: Case) -> Finding:
    """Training, calibration and tuning fit the auditor's limit, and the recipe's own budget."""
    spent = sum(case.spent_seconds.values())
    limit = limit_seconds(case)
    parts = ", ".join(f"{name} {value:.1f}" for name, value in case.spent_seconds.items())
    told = f"{spent:.1f} of {limit:g} seconds with training text ({parts})"
    evidence = {"limit_seconds": limit, **case.spent_seconds}
    if missing := [stage for stage in stages_of(case) if stage not in case.spent_seconds]:
        why = f"no clock of {', '.join(missing)}, which this artifact needs"
        return not_shown("time", f"{told}; {why}", **evidence)
    wrong = [f"{n} {v:g} seconds" for n, v in case.spent_seconds.items() if not 0 < v < math.inf]
    wrong += _other_clocks(case)
    holds = spent <= limit * (1 + OVERSHOOT) and not wrong
    finding = judge("time", holds, "; ".join([told, *wrong]), wrong=wrong, **evidence)
    # The rule "training" compares the chain with the clock that is judged here.
    if finding.verdict == PASS and not (chain := case.folder.evidence_file).is_file():
        return not_shown("time", f"{told}; no {chain.name} has the clock of each step", **evidence)
    return finding


def limit_seconds(case: Case) -> float:
    """The auditor's limit, or the recipe's own budget if that is tighter."""
    budget = case.recipe.train.budget_seconds or case.limits.train_seconds
    return min(budget, case.limits.train_seconds)


def stages_of(case: Case) -> list[str]:
    """The stages that read training text on the way to this artifact, by its content."""
    infer = plug_levers(case.recipe, "infer").values()
    is_tuned = case.recipe.quant.tune_steps > 0 or any(hasattr(i, "classes") for i in infer)
    is_calibrated = any(t.scheme.calibrated for t in case.artifact.tensors.values())
    return ["train", *["calibrate"] * is_calibrated, *["tune"] * is_tuned]


def _other_clocks(case: Case) -> list[str]:
    """What validation.json says otherwise than metrics.jsonl."""
    about = case.folder.read_json(case.folder.validation_file)
    lines = list(case.folder.metrics())
    if not lines:
        is_short = about["step"] < case.recipe.train.log_every
        return [] if is_short else ["metrics.jsonl is missing or empty"]
    wrong = []
    is_last_logged = lines[-1]["step"] == about["step"]
    for key in ("step", "seconds", "tokens"):
        values, end = [line[key] for line in lines], about[key]
        if any(not before < after for before, after in pairwise(values)):
            wrong.append(f"{key} in metrics.jsonl do not rise")
        if not values[-1] <= end or (is_last_logged and values[-1] != end):
            wrong.append(f"validation.json says {end:g} {key}, metrics.jsonl {values[-1]:g}")
    return wrong
