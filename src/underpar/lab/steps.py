"""Training steps of a recipe on made-up documents: tokens per second, memory, number of graphs.

A compilation after the warm-up is an error.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from itertools import cycle

import numpy as np
import torch
from torch import Tensor

from underpar.build.model import build_model
from underpar.compile.rewrites import choose_rewrites
from underpar.compile.traced_run import TracedRun
from underpar.core.progress import SILENT, Progress, Task
from underpar.core.runtime import Runtime, seed_everything
from underpar.data.loader import weights_of
from underpar.data.made_up import made_up_batch
from underpar.errors import BenchError
from underpar.kernels.attention import backend_of
from underpar.model.network import EAGER, Network
from underpar.recipe import Recipe, TrainPart
from underpar.train.optim import Optimizer
from underpar.train.step import accumulate, step_of

WARMUP_STEPS = 2
# Progress at which steps are timed: at the start of training a loop is off, at the end it is on.
ENDS = (0.0, 1.0)


@dataclass(frozen=True)
class Phase:
    """Equal steps at one progress of training."""

    progress: float
    visits: int
    steps: int
    step_ms: float
    tokens_per_second: float


@dataclass(frozen=True)
class Steps:
    """What the steps of one recipe took; `memory_bytes` is the peak on a GPU, else 0."""

    attention: str
    compiled: bool
    step_tokens: int
    warmup_seconds: float
    num_graphs: int
    memory_bytes: int
    losses: tuple[float, float]
    phases: tuple[Phase, ...]


def measure_recipe(
    recipe: Recipe, runtime: Runtime, num_steps: int = 50, progress: Progress = SILENT
) -> Steps:
    """Training steps of a recipe with fresh weights."""
    seed_everything(recipe.train.seed)
    model = build_model(recipe).to(runtime.device)
    return measure_steps(model, recipe.train, runtime, num_steps, progress)


def measure_steps(
    model: Network,
    part: TrainPart,
    runtime: Runtime,
    num_steps: int = 50,
    progress: Progress = SILENT,
) -> Steps:
    """Take `num_steps` steps: half as at the start of training, half as at its end."""
    if num_steps < len(ENDS):
        raise BenchError(f"{num_steps} steps: expected at least {len(ENDS)}, one for each end")
    with progress.task("speed", 1 + len(ENDS)) as task:
        return _measure(_Training(model, part, runtime), num_steps, task)


def _measure(training: _Training, num_steps: int, task: Task) -> Steps:
    model, runtime = training.model, training.runtime
    if runtime.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    started = time.perf_counter()
    warm = [float(training.step(p)) for p in ENDS for _ in range(WARMUP_STEPS)]
    warmup_seconds = time.perf_counter() - started
    num_graphs = training.num_graphs
    phases: list[Phase] = []
    for p in ENDS:
        task.update(1 + len(phases))
        seconds, loss = training.timed(p, num_steps // len(ENDS))
        speed = training.step_tokens / seconds
        visits = len(model.plan)
        phases.append(Phase(p, visits, num_steps // len(ENDS), 1e3 * seconds, speed))
    if training.num_graphs > num_graphs:
        raise BenchError(f"{training.num_graphs - num_graphs} graphs compiled after the warm-up")
    on_gpu = runtime.device.type == "cuda"
    return Steps(
        attention=backend_of(runtime.device, runtime.dtype),
        compiled=runtime.compiled,
        step_tokens=training.step_tokens,
        warmup_seconds=warmup_seconds,
        num_graphs=num_graphs,
        memory_bytes=torch.cuda.max_memory_allocated() if on_gpu else 0,
        losses=(warm[0], loss),
        phases=tuple(phases),
    )


class _Training:
    """A model, its optimizer and endless batches."""

    def __init__(self, model: Network, part: TrainPart, runtime: Runtime) -> None:
        self.plan = step_of(part)
        self.step_tokens = sum(micro.tokens for micro in self.plan)
        self._weights = weights_of(self.plan)
        self.model, self.runtime = model, runtime
        self._optimizer = Optimizer(model, part, runtime)
        rng = np.random.default_rng(part.seed)
        self._batches = (
            made_up_batch(micro, model.spec.vocab_size, rng, part.order)
            for micro in cycle(self.plan)
        )
        rewrites = choose_rewrites("auto", model, runtime).names
        self._run = TracedRun(rewrites=rewrites) if runtime.compiled else EAGER

    @property
    def num_graphs(self) -> int:
        """Graphs compiled so far."""
        return self._run.num_graphs if isinstance(self._run, TracedRun) else 0

    def step(self, p: float) -> Tensor:
        """Take one step at progress p; returns its loss."""
        self.model.set_progress(p)
        loss = accumulate(self.model, self._batches, self._weights, self.runtime, self._run)
        self._optimizer.step(1.0, 0.9)
        return loss

    def timed(self, p: float, num_steps: int) -> tuple[float, float]:
        """Seconds per step, and the last loss."""
        self.runtime.synchronize()
        started = time.perf_counter()
        for _ in range(num_steps):
            loss = self.step(p)
        self.runtime.synchronize()
        return (time.perf_counter() - started) / num_steps, float(loss)
