"""The training loop, on one screen: progress, step, average, log, checkpoint, stop."""

from __future__ import annotations

import itertools
import json
import signal
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from underpar.data.loader import Batch, Loader, micros_of_rank, prefetch
from underpar.model.gpt import GPT
from underpar.recipe import TrainPart
from underpar.run import RunFolder, write_atomic
from underpar.runtime import Runtime
from underpar.seams import Averager
from underpar.train import schedule
from underpar.train.checkpoint import Position, read_checkpoint, save_checkpoint, save_tensors
from underpar.train.dist import from_main
from underpar.train.optimizer import Optimizer
from underpar.train.step import accumulate, compile_loss, mean_loss

OnStep = Callable[[dict[str, Any]], None]


@dataclass
class Trainer:
    """Everything one run needs; `run` takes it from its checkpoint, or the start, to the end."""

    model: GPT
    loader: Loader
    part: TrainPart
    runtime: Runtime
    folder: RunFolder
    position: Position
    averagers: list[Averager] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.optimizer = Optimizer(self.model, self.part)
        self._loss_of = compile_loss() if self.runtime.compiled else mean_loss
        for averager in self.averagers:
            averager.start(self._weights())

    def run(self, on_step: OnStep | None = None) -> bool:
        """Train until the budget is spent (True) or a signal asks to stop (False)."""
        self._resume()
        step_tokens = self.loader.step_tokens
        before = self.position.seconds
        started = saved = time.perf_counter()
        with interruptible() as interrupted, closing(self.batches()) as batches:
            while True:
                seconds, step = self.position.seconds, self.position.step
                p = schedule.progress(self.part, seconds, step, step * step_tokens)
                p = from_main(p if not interrupted() else -1.0, self.runtime)
                if p < 0 or p >= 1:
                    break
                record = self._step(p, batches)
                # One reading a step decides, is logged and is saved: a resumed run agrees.
                seconds = before + time.perf_counter() - started
                self.position = replace(self.position, step=step + 1, seconds=seconds)
                self._log(record, on_step)
                if time.perf_counter() - saved >= self.part.checkpoint_seconds:
                    self.checkpoint()
                    saved = time.perf_counter()
        self.checkpoint()
        if p >= 1:
            self._finish()
        return p >= 1

    def batches(self) -> Generator[Batch, None, None]:
        """This rank's micro-batches from the current step on, prepared ahead."""
        micros = micros_of_rank(
            self.loader.num_micro_batches, self.runtime.rank, self.runtime.world
        )
        steps = itertools.count(self.position.step)
        places = ((step, m) for step in steps for m in micros)
        yield from prefetch(self.loader, places, pin=self.runtime.device.type == "cuda")

    def _step(self, p: float, batches: Iterator[Batch]) -> dict[str, Any]:
        step = self.position.step
        scale = schedule.lr_scale(self.part, p)
        self.model.set_progress(p)
        num_micro = self.loader.num_micro_batches
        loss = accumulate(self.model, batches, num_micro, self.runtime, self._loss_of)
        norm = self.optimizer.step(scale, schedule.momentum(self.part, p))
        for averager in self.averagers:
            averager.update(self._weights(), step + 1)
        return {"step": step + 1, "progress": p, "lr_scale": scale, "loss": loss, "norm": norm}

    def _log(self, record: dict[str, Any], on_step: OnStep | None) -> None:
        if not self.runtime.is_main or record["step"] % self.part.log_every:
            return
        tokens = self.loader.step_tokens * record["step"]
        line = {key: float(v) if isinstance(v, torch.Tensor) else v for key, v in record.items()}
        line |= {"tokens": tokens, "seconds": self.position.seconds}
        line["epochs"] = self.loader.num_epochs(record["step"])
        if self.runtime.device.type == "cuda":
            line["memory_bytes"] = torch.cuda.max_memory_allocated()
        with self.folder.metrics_file.open("a") as file:
            file.write(json.dumps(line) + "\n")
        if on_step:
            on_step(line)

    def _weights(self) -> dict[str, torch.Tensor]:
        return dict(self.model.state_dict())

    def checkpoint(self) -> None:
        """Write everything a resumed run needs, atomically."""
        if not self.runtime.is_main:
            return
        parts = {"model": self._weights(), "optimizer": self.optimizer.state()}
        parts |= {f"average{i}": a.state() for i, a in enumerate(self.averagers)}
        save_checkpoint(self.folder.checkpoint_file, self.position, parts)

    def _resume(self) -> None:
        if not self.folder.checkpoint_file.exists():
            if self.runtime.is_main:
                self.folder.metrics_file.unlink(missing_ok=True)
            return
        self.position, parts = read_checkpoint(self.folder.checkpoint_file, self.position)
        self.model.load_state_dict(parts["model"])
        self.optimizer.load(parts["optimizer"])
        for i, averager in enumerate(self.averagers):
            averager.load(parts[f"average{i}"])
        if self.runtime.is_main:
            # Steps after the checkpoint are taken again; their old lines go.
            kept = [m for m in self.folder.metrics() if m["step"] <= self.position.step]
            write_atomic(self.folder.metrics_file, "".join(json.dumps(m) + "\n" for m in kept))

    def _finish(self) -> None:
        if self.runtime.is_main:
            weights = self.averagers[-1].state() if self.averagers else self._weights()
            about = {"recipe_hash": self.position.recipe_hash, "step": self.position.step}
            save_tensors(self.folder.weights_file, weights, about)


@contextmanager
def interruptible() -> Iterator[Callable[[], bool]]:
    """Inside, SIGTERM and Ctrl-C only raise a flag, so that the step in hand can be saved."""
    caught: list[int] = []
    signals = (signal.SIGTERM, signal.SIGINT)
    old = [signal.signal(s, lambda number, frame: caught.append(number)) for s in signals]
    try:
        yield lambda: bool(caught)
    finally:
        for number, handler in zip(signals, old, strict=True):
            signal.signal(number, handler)
