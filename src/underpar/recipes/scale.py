"""Scales a recipe to a smaller budget: the table [scale] of a recipe file, resolved when read.

The factors apply to what the file stands on: its base, or what it is stacked on. Only values that
depend on the size or the number of steps change. Shares of the run and rates stay.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from underpar.schema import TrainPart, require

# Settings that count steps. Those of levers are scaled where the recipe writes them.
TRAIN_STEPS = ("momentum_warmup_steps", "rewarm_steps")
LEVER_STEPS = (("lawa", "every"),)
# Shares that a step keeps of an average: with 0.9965, some 286 steps count.
LEVER_DECAYS = (("ema", "decay"),)


@dataclass(frozen=True)
class Scale:
    """`batch`: factor on the tokens of a step.
    `steps`: factor on what is counted in steps.
    """

    batch: float = 1.0
    steps: float = 1.0

    def __post_init__(self) -> None:
        for name, factor in (("batch", self.batch), ("steps", self.steps)):
            require(0 < factor <= 1000, f"scale.{name} = {factor}: expected above 0, at most 1000")


def scaled(scale: Scale, part: TrainPart, levers: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """What the factors change, by key such as "train.rewarm_steps": the value before, and after."""
    after = batch(part, scale)
    after |= {name: steps(getattr(part, name), scale) for name in TRAIN_STEPS}
    changed = {f"train.{name}": (plain(getattr(part, name)), v) for name, v in after.items()}
    for lever, name in LEVER_STEPS:
        before = settings_of(levers, lever).get(name)
        if type(before) is int:
            changed[f"levers.{lever}.{name}"] = before, steps(before, scale)
    for lever, name in LEVER_DECAYS:
        before = settings_of(levers, lever).get(name)
        if isinstance(before, float) and before:
            changed[f"levers.{lever}.{name}"] = before, decay(before, scale)
    return {key: (before, after) for key, (before, after) in changed.items() if before != after}


def batch(part: TrainPart, scale: Scale) -> dict[str, Any]:
    """A step of `scale.batch` times the tokens: fewer micro-batches if that comes out even.

    Micro-batches of several lengths are all kept, so that each length has its share of the loss.
    They shrink instead, to whole sequences of the longest length.
    """
    number = part.num_micro_batches * scale.batch
    is_mixed = len(part.contexts) > 1 or len(part.micro_sizes) > 1
    if number == int(number) and not is_mixed:
        return {"num_micro_batches": int(number)}
    longest = part.longest_context

    def whole(tokens: int) -> int:
        return max(1, int(tokens * scale.batch / longest + 0.5)) * longest

    if part.micro_sizes:
        return {"micro_sizes": [whole(tokens) for tokens in part.micro_sizes]}
    return {"micro_batch_tokens": whole(part.micro_batch_tokens)}


def steps(number: int, scale: Scale) -> int:
    """`scale.steps` times a number of steps; no step only where there was none."""
    return max(1, round(number * scale.steps)) if number else 0


def decay(share: float, scale: Scale) -> float:
    """The share that averages over `scale.steps` times as many steps."""
    new_share = (1.0 - share) / scale.steps
    require(new_share <= 1, f"scale.steps = {scale.steps}: an average with decay {share} would end")
    return round(1.0 - new_share, 9)


def settings_of(levers: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """The settings that a recipe writes for a lever; none for `true` and `false`."""
    table = levers.get(name)
    return table if isinstance(table, Mapping) else {}


def plain(value: Any) -> Any:
    """The value as TOML has it: a list instead of a tuple."""
    return list(value) if isinstance(value, tuple) else value
