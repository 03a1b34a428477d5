"""Budget and schedules: progress is a number from 0 to 1, everything else follows from it."""

from __future__ import annotations

from underpar.recipe import TrainPart
from underpar.schema import GROUPS, parse_points


def progress(part: TrainPart, seconds: float, step: int, tokens: int, flops: float = 0.0) -> float:
    """Share of the budget that is spent. Of several budgets the one that ends first counts."""
    spent = (
        (seconds, part.budget_seconds - part.reserve_seconds),
        (float(step), float(part.budget_steps)),
        (float(tokens), float(part.budget_tokens)),
        (flops, part.budget_flops),
    )
    return max(used / limit for used, limit in spent if limit > 0)


def lr_scale(part: TrainPart, p: float) -> float:
    """1, then a warm-down over the last `warmdown` of the run, not below `lr_floor`."""
    if part.warmdown == 0:
        return 1.0
    left = min(1.0, max(0.0, (1.0 - p) / part.warmdown))
    return float(max(left**part.warmdown_power, part.lr_floor))


def rewarm(part: TrainPart, steps_since_change: int) -> float:
    """The factor of all rates after a change of context: k / n in step k of n (PR 2014)."""
    if not part.rewarm_steps:
        return 1.0
    return min(1.0, (steps_since_change + 1) / part.rewarm_steps)


def context_at(part: TrainPart, p: float) -> int | None:
    """The length at which documents are cut at progress p; None if the recipe has no stages."""
    for context, until in part.context_stages:
        if p <= until:
            return int(context)
    return None


def decay_scales(part: TrainPart, p: float) -> dict[str, float]:
    """The factor of each group's weight decay: linear between the points of its curve.

    PR 1729 lets all decay fall at the end. A run in the tree of PR 1894 lets that of the matrices
    rise from 0.02 to 0.08 while the rates fall.
    """
    curves = {group: getattr(part, f"{group}_decay_curve") or part.decay_curve for group in GROUPS}
    return {group: value_at(curve, p) for group, curve in curves.items()}


def value_at(curve: tuple[str, ...], p: float) -> float:
    """The value of a curve such as ("1@0.7", "0.5@1") at progress p; 1 without points."""
    points = parse_points(curve, "a curve")
    if not points:
        return 1.0
    before = (points[0][0], 0.0)
    for value, until in points:
        if p <= until:
            share = (p - before[1]) / (until - before[1]) if until > before[1] else 1.0
            return before[0] + share * (value - before[0])
        before = (value, until)
    return points[-1][0]


def momentum(part: TrainPart, p: float, step: int) -> float:
    """Muon's momentum: linear from `momentum_start` over the warm-up, and back in the cool-down."""
    if part.momentum_warmup_steps:
        share = step / part.momentum_warmup_steps
    else:
        share = p / part.momentum_warmup if part.momentum_warmup else 1.0
    if part.momentum_cooldown:
        share = min(share, (1.0 - p) / part.momentum_cooldown)
    return part.momentum_start + (part.momentum - part.momentum_start) * min(1.0, share)
