"""Steps that are timed: how many, of what, and none that compiles."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from lever_stacks import randomized
from underpar.compile import regions as compiled
from underpar.core.runtime import Runtime
from underpar.errors import BenchError
from underpar.lab.steps import measure_steps
from underpar.recipe import Recipe, load_recipe
from watcher import Watcher

SETS = ["train.micro_batch_tokens=64", "train.num_micro_batches=2", "levers.loop=true"]


@pytest.fixture
def recipe() -> Recipe:
    return load_recipe("pr2014+cpu", SETS)


def runtime(compiled: bool) -> Runtime:
    return Runtime(torch.device("cpu"), compiled=compiled)


def test_steps_are_taken_at_both_ends_of_training(
    recipe: Recipe, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compiled, "inductor", lambda graph, examples: graph)
    speeds = []
    for is_compiled in (False, True):
        progress = Watcher()
        steps = measure_steps(
            randomized(recipe).train(), recipe.train, runtime(is_compiled), 4, progress
        )
        assert steps.step_tokens == 128 and steps.compiled == is_compiled
        assert [phase.steps for phase in steps.phases] == [2, 2]
        assert steps.phases[0].visits < steps.phases[1].visits
        assert all(phase.tokens_per_second > 0 for phase in steps.phases)
        [task] = progress.tasks
        shares = [completed / task.total for completed, _ in task.updates]
        assert shares == sorted(shares) and shares[0] > 0 and shares[-1] < 1
        speeds.append(steps)
    plain, fast = speeds
    assert (plain.num_graphs, fast.num_graphs) == (0, 7)
    assert fast.losses == pytest.approx(plain.losses, abs=1e-4)


def test_what_compiles_after_the_warm_up_is_an_error(
    recipe: Recipe, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = randomized(recipe).train()

    class ChangeConstant(Watcher):
        def update(self, completed: float, remark: str = "") -> None:
            # Another constant: another graph.
            lever: Any = model.levers["leaky_square"]
            lever.slope += 0.1

        @contextmanager
        def task(self, name: str, total: float) -> Iterator[Any]:
            yield self

    monkeypatch.setattr(compiled, "inductor", lambda graph, examples: graph)
    with pytest.raises(BenchError, match="after the warm-up"):
        measure_steps(model, recipe.train, runtime(True), 4, ChangeConstant())
    with pytest.raises(BenchError, match="1 steps"):
        measure_steps(model, recipe.train, runtime(True), 1)
