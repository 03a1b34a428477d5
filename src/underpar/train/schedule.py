"""Budget and schedules: progress is a number from 0 to 1, everything else follows from it."""

from __future__ import annotations

from underpar.recipe import TrainPart


def progress(part: TrainPart, seconds: float, step: int, tokens: int) -> float:
    """Share of the budget spent; the tightest of the budgets given decides."""
    spent = (
        (seconds, part.budget_seconds),
        (float(step), float(part.budget_steps)),
        (float(tokens), float(part.budget_tokens)),
    )
    return max(used / limit for used, limit in spent if limit > 0)


def lr_scale(part: TrainPart, p: float) -> float:
    """1, then a linear warm-down over the last `warmdown` of the run, not below `lr_floor`."""
    if part.warmdown == 0:
        return 1.0
    return max(min(1.0, (1.0 - p) / part.warmdown), part.lr_floor)


def momentum(part: TrainPart, p: float) -> float:
    """Muon's momentum: linear from `momentum_start` over the first `momentum_warmup` of the run."""
    share = min(1.0, p / part.momentum_warmup) if part.momentum_warmup else 1.0
    return part.momentum_start + (part.momentum - part.momentum_start) * share
