"""Starts a trainer in a way that this machine can run it.

The warm-up takes every shape of the schedule through the model once, before the clock starts. If
that needs more memory than a GPU has, micro-batches are halved and a step takes twice as many: its
gradients are those of as many tokens. If the compiler fails, training is not compiled. Either is
said in one line.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import replace

import torch

from underpar.core.dist import gather_objects
from underpar.core.runtime import Runtime
from underpar.errors import RecipeError, UnderparError, one_line
from underpar.recipe import Recipe
from underpar.train.loop import Trainer

Make = Callable[[Recipe, Runtime], Trainer]


def start_trainer(
    make: Make, recipe: Recipe, runtime: Runtime, note: Callable[[str], None]
) -> tuple[Recipe, Runtime, Trainer]:
    """A trainer after its warm-up, with the recipe and the runtime that it was made with."""
    if runtime.device.type == "cpu" and not runtime.compiled:
        # Memory was estimated, and nothing is compiled: nothing to try.
        return recipe, runtime, make(recipe, runtime)
    while True:
        trainer = make(recipe, runtime)
        failure = _try_warm_up(trainer)
        # All ranks take the same way: that of the first rank with a failure.
        failure = next(filter(None, gather_objects(failure, runtime)), None)
        if failure is None:
            return recipe, runtime, trainer
        del trainer
        _free_memory(runtime)
        if failure == OUT_OF_MEMORY:
            size = max(recipe.train.micro_sizes or (recipe.train.micro_batch_tokens,))
            recipe = with_half_micro_batches(recipe)
            note(
                f"a micro-batch of {size:,} tokens does not fit in memory: trying halves of it, "
                f"{recipe.train.num_micro_batches} per step"
            )
        else:
            runtime = replace(runtime, compiled=False)
            note(f"not compiled, because compiling failed: {failure}")


OUT_OF_MEMORY = "out of memory"


def _try_warm_up(trainer: Trainer) -> object:
    """What went wrong in the warm-up; None if nothing."""
    try:
        trainer.warm_up()
    except torch.OutOfMemoryError:
        return OUT_OF_MEMORY
    except UnderparError:
        raise
    except Exception as error:
        # Compilers raise errors of many kinds. What fails without them is an error of ours.
        if not trainer.runtime.compiled:
            raise
        return f"{type(error).__name__}: {one_line(error, 200)}"
    return None


def with_half_micro_batches(recipe: Recipe) -> Recipe:
    """The same global batch in twice as many micro-batches of half the size."""
    part = recipe.train
    longest = part.longest_context
    sizes = part.micro_sizes or (part.micro_batch_tokens,)
    if any(size % 2 or size // 2 < longest for size in sizes):
        raise RecipeError(
            f"train.micro_batch_tokens = {min(sizes)}: does not fit in memory, and halves of it "
            f"would be shorter than a context of {longest} tokens; use a shorter context or a "
            "smaller model"
        )
    halved = replace(
        part,
        micro_batch_tokens=part.micro_batch_tokens // 2,
        micro_sizes=tuple(size // 2 for size in part.micro_sizes),
        num_micro_batches=2 * part.num_micro_batches,
    )
    return replace(recipe, train=halved)


def _free_memory(runtime: Runtime) -> None:
    gc.collect()
    if runtime.device.type == "cuda":
        torch.cuda.empty_cache()
