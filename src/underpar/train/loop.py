"""The training loop, on one screen: progress, step, average, log, checkpoint, stop.

The held-out text is priced, and the packed size forecast, in pauses of the training clock: both
only report.
"""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, field, replace
from statistics import fmean
from typing import Any

import torch

from underpar.compile.regions import TracedRun
from underpar.core.dist import ask_main, from_main, may_fail, require_on_main, require_same
from underpar.core.run_folder import RunFolder, write_atomic, write_json
from underpar.core.runtime import Clock, Runtime, process_age_seconds
from underpar.core.tensor_files import save_tensors
from underpar.data.loader import Loader
from underpar.kernels.attention import backend_of
from underpar.model.gpt import GPT
from underpar.model.network import EAGER
from underpar.recipe import TrainPart
from underpar.seams import Averager, Disguise, Penalty
from underpar.train import schedule
from underpar.train.checkpoint import Position, read_checkpoint, save_checkpoint
from underpar.train.events import EventWriter
from underpar.train.feed import Feed
from underpar.train.guard import Guard
from underpar.train.loss_forecast import Forecast
from underpar.train.meter import Meter, flops_per_token, peak_flops
from underpar.train.optim import Optimizer
from underpar.train.step import accumulate, sum_penalties
from underpar.train.validate import Validation, Validator
from underpar.train.warmup import warm_up

# A logged line -> whether to stop there.
OnStep = Callable[[dict[str, Any]], bool | None]
# Weights by name -> bytes of the artifact, if they were packed now.
SizeOf = Callable[[Mapping[str, torch.Tensor]], int]

# Phases that the budget does not count.
UNCOUNTED = ("compile", "validate", "size")


@dataclass
class Trainer:
    """Everything one run needs; `run` takes it from its checkpoint, or the start, to the end."""

    model: GPT
    loader: Loader
    part: TrainPart
    runtime: Runtime
    folder: RunFolder
    position: Position
    forecast: Forecast
    validator: Validator
    averagers: list[Averager] = field(default_factory=list)
    penalties: list[Penalty] = field(default_factory=list)
    disguises: list[Disguise] = field(default_factory=list)
    size_of: SizeOf | None = None

    def __post_init__(self) -> None:
        self.optimizer = Optimizer(self.model, self.part, self.runtime)
        self.guard = Guard(self.model.spec.vocab_size)
        peak = peak_flops(self.runtime.device)
        self.meter = Meter(Clock("train"), peak and peak * self.runtime.world)
        self.events = EventWriter(self.folder.path)
        # Step and loss: read where the device is waited for anyway.
        self._last = (0, torch.zeros(()))
        self._logged_seconds = 0.0
        self._sized_seconds = 0.0
        # From the command to the first step, compilation and all.
        self._start_seconds = 0.0
        self._run = TracedRun() if self.runtime.compiled else EAGER
        for averager in self.averagers:
            averager.start(self._weights())

    def run(self, on_step: OnStep | None = None) -> bool:
        """Train until the budget is spent (True) or a signal asks to stop (False)."""
        self._resume()
        if self.runtime.compiled:
            with self.meter.clock.phase("compile"):
                warm_up(self.model, self.loader, self.part, self.runtime, self._run)
        step_tokens = self.loader.step_tokens
        before, started = self.position.seconds, self._spent_seconds()
        self._start_seconds = process_age_seconds()
        saved = time.perf_counter()
        self.meter.start(self.position.step * step_tokens, before)
        stop = False
        with interruptible() as interrupted, closing(Feed(self.loader, self.runtime)) as feed:
            while True:
                seconds, step = self.position.seconds, self.position.step
                flops = self.position.flops
                p = schedule.progress(self.part, seconds, step, step * step_tokens, flops)
                p = from_main(-1.0 if stop or interrupted() else p, self.runtime)
                if p < 0 or p >= 1:
                    break
                record = self._step(p, feed)
                # One reading a step decides, is logged and is saved: a resumed run agrees.
                seconds = before + self._spent_seconds() - started
                flops += step_tokens * self._token_flops()
                self.position = replace(self.position, step=step + 1, seconds=seconds, flops=flops)
                record |= self._validate_if_due()
                with may_fail(self.runtime):
                    stop = self._log(record, on_step)
                    if time.perf_counter() - saved >= self.part.checkpoint_seconds:
                        self.checkpoint()
                        saved = time.perf_counter()
        with may_fail(self.runtime):
            self.checkpoint()
            if p >= 1:
                self._save_weights()
        # No rank goes on before all is written.
        finished = from_main(p, self.runtime) >= 1
        if finished:
            self._report()
        return finished

    def _spent_seconds(self) -> float:
        """Seconds of this start that the budget counts; they stand still while others pass."""
        phases = self.meter.clock.read()
        return sum(spent for name, spent in phases.items() if name not in UNCOUNTED)

    def _step(self, p: float, feed: Feed) -> dict[str, Any]:
        step = self.position.step
        context = self._stage(p)
        scale = schedule.lr_scale(self.part, p)
        if self.position.changed_at >= 0:
            scale *= schedule.rewarm(self.part, step - self.position.changed_at)
        self.model.set_progress(p)
        num_micro = self.loader.num_micro_batches
        batches = feed.at(step, context)
        with ExitStack() as disguise:
            for lever in self.disguises:
                disguise.enter_context(lever.disguise(self._weights(), p))

            def penalty() -> torch.Tensor | None:
                # What reads the weights alone reads the true ones.
                disguise.close()
                return sum_penalties(self.penalties, self.model, step, p)

            loss = accumulate(self.model, batches, num_micro, self.runtime, self._run, penalty)
        decay_scale = schedule.decay_scale(self.part, p)
        norm = self.optimizer.step(scale, schedule.momentum(self.part, p), decay_scale)
        for averager in self.averagers:
            averager.update(self._weights(), step + 1)
        self._last = (step + 1, loss)
        record = {"step": step + 1, "progress": p, "lr_scale": scale, "loss": loss, "norm": norm}
        return record | ({"context": context} if context else {})

    def _stage(self, p: float) -> int | None:
        """The context of this step; a change of it is noted, so that rates rise again."""
        context = schedule.context_at(self.part, p)
        if context and self.position.context not in (0, context):
            self.position = replace(self.position, changed_at=self.position.step)
        self.position = replace(self.position, context=context or 0)
        return context

    def _log(self, record: dict[str, Any], on_step: OnStep | None) -> bool:
        """Write and show a line where one is due; True asks for the end of the run."""
        if not self.runtime.is_main or record["step"] % self.part.log_every:
            return False
        tokens = self.loader.step_tokens * record["step"]
        line = {key: float(v) if isinstance(v, torch.Tensor) else v for key, v in record.items()}
        line |= {"tokens": tokens, "seconds": self.position.seconds, "flops": self.position.flops}
        line["epochs"] = self.loader.num_epochs(record["step"])
        line["start_seconds"] = self._start_seconds
        line |= self.forecast.see(line)
        line |= self._forecast_size_if_due(line)
        line |= self.meter.read(tokens, self.position.seconds, self._token_flops())
        if self.runtime.device.type == "cuda":
            line["memory_bytes"] = torch.cuda.max_memory_allocated()
        with self.folder.metrics_file.open("a") as file:
            file.write(json.dumps(line) + "\n")
        self.events.write(record["step"], line)
        self._check()
        return bool(on_step and on_step(line))

    def _token_flops(self) -> float:
        """Operations a token of the last step, forward and backward."""
        planned = fmean(micro.context for micro in self.loader.plan)
        context = self.position.context or planned
        return flops_per_token(self.model.spec, self.model.plan, context)

    def _validate_if_due(self) -> dict[str, float]:
        """Fields of the metrics line in which a pass over the held-out text is due."""
        every = self.part.validate_every_seconds
        if not every or self.position.step % self.part.log_every:
            return {}
        seconds, before = self.position.seconds, self._logged_seconds
        self._logged_seconds = seconds
        # Clocks of ranks differ, and a pass takes all of them.
        if not from_main(float(seconds // every > before // every), self.runtime):
            return {}
        found = self._validate()
        average_bpb = found.average_bpb
        line = {"val_bpb": found.live_bpb}
        return line if average_bpb is None else line | {"average_val_bpb": average_bpb}

    def _validate(self) -> Validation:
        """Price the held-out text, outside the training clock."""
        # What the device still has to do of training is training's time.
        self.runtime.synchronize()
        with self.meter.clock.phase("validate"):
            average = self.averagers[-1].average() if self.averagers else None
            return self.validator.run(self.model, average)

    def _forecast_size_if_due(self, line: dict[str, Any]) -> dict[str, int]:
        """Field of a metrics line with a validation, or so many seconds after the last such one."""
        passed = self.position.seconds - self._sized_seconds
        if "val_bpb" not in line and passed < self.part.checkpoint_seconds:
            return {}
        self._sized_seconds = self.position.seconds
        return self._forecast_size()

    def _forecast_size(self) -> dict[str, int]:
        """Bytes of the artifact if it were packed now, outside the training clock."""
        if self.size_of is None:
            return {}
        self.runtime.synchronize()
        with self.meter.clock.phase("size"):
            return {"forecast_bytes": self.size_of(self._packed_weights())}

    def _check(self) -> None:
        """End a run whose loss broke, before a checkpoint of it is written."""
        step, loss = self._last
        reason = self.guard.check(step, float(loss))
        if reason is not None:
            path, context = self.folder.path / "broken.safetensors", self.position.context or None
            raise self.guard.save_failure(path, self.loader, step, reason, context)

    def _weights(self) -> dict[str, torch.Tensor]:
        return dict(self.model.state_dict())

    def _packed_weights(self) -> dict[str, torch.Tensor]:
        """What packing gets."""
        return self.averagers[-1].average() if self.averagers else self._weights()

    def checkpoint(self) -> None:
        """Write everything a resumed run needs, atomically."""
        if not self.runtime.is_main:
            return
        self._check()
        parts = {"model": self._weights(), "optimizer": self.optimizer.state()}
        parts |= {f"average{i}": a.state() for i, a in enumerate(self.averagers)}
        with self.meter.clock.phase("checkpoint"):
            save_checkpoint(self.folder.checkpoint_file, self.position, parts)

    def _resume(self) -> None:
        file, own = self.folder.checkpoint_file, self.position
        require_same(f"recipe {own.recipe_hash}, data {own.data_identity}", self.runtime)
        require_on_main(file, self.runtime)
        # One rank reads for all: nodes need not share a folder, nor can they differ in the step.
        found = ask_main(
            lambda: read_checkpoint(file, own) if file.exists() else None, self.runtime
        )
        if found is None:
            if self.runtime.is_main:
                self.folder.metrics_file.unlink(missing_ok=True)
                self.folder.validation_file.unlink(missing_ok=True)
            return
        self.position, parts = found
        # Reading restored the random state where the file was read.
        torch.set_rng_state(ask_main(torch.get_rng_state, self.runtime))
        self.model.load_state_dict(parts["model"])
        self.optimizer.load(parts["optimizer"])
        for i, averager in enumerate(self.averagers):
            averager.load(parts[f"average{i}"])
        if self.runtime.is_main:
            # Steps after the checkpoint are taken again; their old lines go.
            kept = [m for m in self.folder.metrics() if m["step"] <= self.position.step]
            for line in kept:
                self.guard.check(line["step"], line["loss"])
                self.forecast.see(line)
                self._logged_seconds = line["seconds"]
                if "forecast_bytes" in line:
                    self._sized_seconds = line["seconds"]
            write_atomic(self.folder.metrics_file, "".join(json.dumps(m) + "\n" for m in kept))

    def _save_weights(self) -> None:
        if self.runtime.is_main:
            about = {"recipe_hash": self.position.recipe_hash, "step": self.position.step}
            save_tensors(self.folder.weights_file, self._packed_weights(), about)

    def _report(self) -> None:
        """Price text and size of the final weights, before they are quantized."""
        found = self._validate()
        if self.runtime.is_main:
            step, seconds = self.position.step, self.position.seconds
            about = {"step": step, "seconds": seconds, "tokens": step * self.loader.step_tokens}
            values = found.as_dict() | self._forecast_size()
            chosen = {"attention": backend_of(self.runtime.device, self.runtime.dtype)}
            write_json(self.folder.validation_file, about | values | chosen)


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
