"""The training loop: `Trainer.run` reads from top to bottom.

The loss of a batch is in step.py, the network in model/gpt.py. The held-out text is priced, and the
packed size forecast, while the training clock stands still: both only report.
"""

from __future__ import annotations

import json
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, field, replace
from statistics import fmean
from typing import Any

import torch

from underpar.compile.rewrites import Choice, choose_rewrites
from underpar.compile.traced_run import TracedRun
from underpar.core.dist import ask_main, from_main, may_fail, require_on_main, require_same
from underpar.core.fields import reading
from underpar.core.run_folder import RunFolder, write_atomic, write_json, writing
from underpar.core.runtime import Clock, Runtime, process_age_seconds
from underpar.core.tensor_files import save_tensors
from underpar.data.loader import Batch, Loader, weights_of
from underpar.kernels.attention import backend_of
from underpar.model.network import EAGER, Eager, Network
from underpar.recipe import TrainPart
from underpar.seams import (
    Averager,
    Equipper,
    FakeQuantizer,
    MoreTargets,
    Penalty,
    Pusher,
    Weigher,
)
from underpar.train import schedule
from underpar.train.checkpoint import Parts, Position, read_checkpoint, save_checkpoint
from underpar.train.events import EventWriter
from underpar.train.evidence import Evidence
from underpar.train.feed import Feed
from underpar.train.guard import Guard
from underpar.train.loss_forecast import Forecast
from underpar.train.meter import Meter, network_flops, peak_flops
from underpar.train.optim import Optimizer
from underpar.train.step import LossLever, accumulate, sum_penalties
from underpar.train.validate import Validation, Validator
from underpar.train.warmup import warm_up

# Is given each logged line; True asks for the end of the run.
OnStep = Callable[[dict[str, Any]], bool | None]
# Weights by name -> bytes of the artifact, if they were packed now.
SizeOf = Callable[[Mapping[str, torch.Tensor]], int]

# Phases that the budget does not count.
UNCOUNTED = ("compile", "validate", "size")


@dataclass
class LastTime:
    """When once-in-a-while work was last done, in seconds of the training clock."""

    logged: float = 0.0
    sized: float = 0.0


@dataclass
class Trainer:
    """Everything one run needs; `run` takes it from its checkpoint, or the start, to the end."""

    model: Network
    loader: Loader
    part: TrainPart
    runtime: Runtime
    folder: RunFolder
    evidence: Evidence
    position: Position
    forecast: Forecast
    validator: Validator
    averagers: list[Averager] = field(default_factory=list)
    penalties: list[Penalty] = field(default_factory=list)
    weighers: list[Weigher] = field(default_factory=list)
    more_targets: list[MoreTargets] = field(default_factory=list)
    fake_quantizers: list[FakeQuantizer] = field(default_factory=list)
    pushers: list[Pusher] = field(default_factory=list)
    equippers: list[Equipper] = field(default_factory=list)
    size_of: SizeOf | None = None
    rewrites: Choice = field(init=False)
    """Other forms of the network that compiled passes compute."""
    runner: Eager = field(init=False)
    """Runs the parts of each forward pass: as they are written, or compiled."""
    is_warm: bool = field(init=False, default=False)
    """Whether the warm-up has been made."""

    def __post_init__(self) -> None:
        self.optimizer = Optimizer(self.model, self.part, self.runtime)
        self.guard = Guard(self.model.spec.vocab_size)
        peak = peak_flops(self.runtime.device)
        self.meter = Meter(Clock("train"), peak and peak * self.runtime.world)
        self.events = EventWriter(self.folder.path)
        self.last_time = LastTime()
        self.rewrites = choose_rewrites("auto", self.model, self.runtime, self.loss_levers)
        compiled = self.runtime.compiled
        self.runner = TracedRun(rewrites=self.rewrites.names) if compiled else EAGER
        for averager in self.averagers:
            averager.start(self.weights())
        for pusher in self.pushers:
            pusher.start(self.weights())

    def run(self, on_step: OnStep | None = None) -> bool:
        """Train until the budget is spent (True) or a signal asks to stop (False)."""
        part, runtime = self.part, self.runtime
        is_new = self._resume()
        if runtime.compiled and not self.is_warm:
            self.warm_up()
        if runtime.is_main:
            self._begin_evidence(is_new)
        seconds_before, started = self.position.seconds, self._counted_seconds()
        # From the command to the first step, compilation included.
        start_seconds = process_age_seconds()
        self.meter.start(self.position.step * self.loader.step_tokens, seconds_before)
        saved_at = time.perf_counter()
        stop, loss = False, None
        with interruptible() as interrupted, closing(Feed(self.loader, runtime)) as feed:
            while True:
                # The main rank decides for all ranks whether another step is taken.
                p = from_main(-1.0 if stop or interrupted() else self._progress(), runtime)
                if p < 0 or p >= 1:
                    break

                line = self._take_step(feed, p)
                loss = line["loss"]

                # Bookkeeping. One reading of the clock per step decides, is logged and is saved,
                # so a resumed run agrees.
                seconds = seconds_before + self._counted_seconds() - started
                self.position = position = replace(self.position, seconds=seconds)
                self.evidence.add_step(seconds)
                is_logged = position.step % part.log_every == 0

                # Once in a while: price the held-out text. All ranks take part.
                if is_logged and self._validation_is_due(seconds):
                    validation = self.validate()
                    line["val_bpb"] = validation.live_bpb
                    if validation.average_bpb is not None:
                        line["average_val_bpb"] = validation.average_bpb

                # An error on the main rank ends all ranks.
                with may_fail(runtime):
                    # Once in a while: write a line of metrics.
                    if is_logged and runtime.is_main:
                        line = self._complete(line, start_seconds)
                        self._write(line)
                        self._stop_if_broken(loss)
                        stop = bool(on_step and on_step(line))
                    # Once in a while: save everything a resumed run needs.
                    if time.perf_counter() - saved_at >= part.checkpoint_seconds:
                        self._stop_if_broken(loss)
                        # While a high loss may turn out to be a broken one, the last one is kept.
                        if not self.guard.num_high:
                            self._checkpoint()
                            saved_at = time.perf_counter()

        with may_fail(runtime):
            if loss is not None:
                self._stop_if_broken(loss)
            self._checkpoint()
            if p >= 1:
                self._save_weights()
        # No rank goes on before all is written.
        finished = from_main(p, runtime) >= 1
        if finished:
            self._report()
        return finished

    @property
    def loss_levers(self) -> list[LossLever]:
        """The levers that change the loss."""
        return [*self.weighers, *self.more_targets]

    def warm_up(self) -> None:
        """Compile every graph of the schedule; where nothing is compiled, try every shape."""
        with self.meter.clock.phase("compile"):
            parts = (self.model, self.loader, self.part, self.runtime, self.runner)
            warm_up(*parts, self.loss_levers)
        self.is_warm = True

    def replay(self, seconds: Iterable[float]) -> Iterator[dict[str, Any]]:
        """Take steps of a recorded run again, from the current state; writes nothing.

        `seconds` is the training clock after each step. Progress follows from the clock, and the
        whole schedule from progress.
        """
        with closing(Feed(self.loader, self.runtime)) as feed:
            for after in seconds:
                line = self._take_step(feed, self._progress())
                self.position = replace(self.position, seconds=after)
                yield line

    def restore(self, position: Position, parts: Parts) -> None:
        """Take the state of a checkpoint."""
        self.position = position
        self.model.load_state_dict(dict(parts["model"]))
        self.optimizer.load(parts["optimizer"])
        for i, averager in enumerate(self.averagers):
            averager.load(parts[f"average{i}"])
        for i, pusher in enumerate(self.pushers):
            pusher.load(parts[f"push{i}"])
        for i, equipper in enumerate(self.equippers):
            equipper.load(parts[f"equip{i}"])

    def parts(self) -> Parts:
        """Everything that steps change, besides the position: the live tensors."""
        parts = {"model": self.weights(), "optimizer": self.optimizer.state()}
        parts |= {f"average{i}": a.state() for i, a in enumerate(self.averagers)}
        parts |= {f"push{i}": pusher.state() for i, pusher in enumerate(self.pushers)}
        return parts | {f"equip{i}": each.state() for i, each in enumerate(self.equippers)}

    def weights(self) -> dict[str, torch.Tensor]:
        """The live weights."""
        return dict(self.model.state_dict())

    def packed_weights(self) -> dict[str, torch.Tensor]:
        """The weights that packing gets: the last average, if there is one."""
        return self.averagers[-1].average() if self.averagers else self.weights()

    def _progress(self) -> float:
        """The share of the budget that is spent."""
        now = self.position
        tokens = now.step * self.loader.step_tokens
        return schedule.progress(self.part, now.seconds, now.step, tokens, now.flops)

    def _take_step(self, feed: Feed, p: float) -> dict[str, Any]:
        """One step at progress p; the first values of its line of metrics."""
        part, position, step = self.part, self.position, self.position.step

        # The schedule of this step. After a change of context, rates rise again.
        context = schedule.context_at(part, p)
        changed = bool(context) and position.context not in (0, context)
        changed_at = step if changed else position.changed_at
        planned_scale = lr_scale = schedule.lr_scale(part, p)
        if changed_at >= 0:
            lr_scale *= schedule.rewarm(part, step - changed_at)
        momentum, decay_scales = schedule.momentum(part, p, step), schedule.decay_scales(part, p)

        # A single training step.
        self.model.set_progress(p)
        for lever in self.more_targets:
            lever.progress(p)
        for pusher in self.pushers:
            pusher.push(self.weights(), p, planned_scale)
        for equipper in self.equippers:
            equipper.begin_step()
        loss = self._accumulate(feed.at(step, context), step, p)
        norm = self.optimizer.step(lr_scale, momentum, decay_scales)
        for pusher in self.pushers:
            pusher.see(self.weights())
        for averager in self.averagers:
            averager.update(self.weights(), step + 1, planned_scale)

        self.position = replace(
            position,
            step=step + 1,
            flops=position.flops + self.loader.step_tokens * self._token_flops(context),
            context=context or 0,
            changed_at=changed_at,
        )
        line: dict[str, Any] = {"step": step + 1, "progress": p, "lr_scale": lr_scale}
        return line | {"loss": loss, "norm": norm} | ({"context": context} if context else {})

    def _accumulate(self, batches: Iterator[Batch], step: int, p: float) -> torch.Tensor:
        """Leave the gradients of one global batch on every rank; returns its mean loss."""
        with ExitStack() as fake_quantized:
            for lever in self.fake_quantizers:
                fake_quantized.enter_context(lever.fake_quantize(self.weights(), p))

            def penalty() -> torch.Tensor | None:
                # Penalties read the true weights.
                fake_quantized.close()
                return sum_penalties(self.penalties, self.model, step, p)

            weights = weights_of(self.loader.plan)[self.runtime.rank :: self.runtime.world]
            rest = (self.runtime, self.runner, penalty, self.loss_levers)
            return accumulate(self.model, batches, weights, *rest)

    def _counted_seconds(self) -> float:
        """Seconds of this start that the budget counts."""
        phases = self.meter.clock.read()
        return sum(spent for name, spent in phases.items() if name not in UNCOUNTED)

    def _token_flops(self, context: int | None) -> float:
        """Operations per token, forward and backward, of a step cut at `context` or as planned."""
        plan = self.loader.plan
        planned = fmean((micro.context for micro in plan), (micro.tokens for micro in plan))
        return network_flops(self.model, context or planned)

    def _validation_is_due(self, seconds: float) -> bool:
        """Whether a multiple of `validate_every_seconds` has passed since the last logged step."""
        every = self.part.validate_every_seconds
        if not every:
            return False
        before, self.last_time.logged = self.last_time.logged, seconds
        # Clocks of ranks differ, and a validation takes all of them: the main rank decides.
        return bool(from_main(float(seconds // every > before // every), self.runtime))

    def validate(self) -> Validation:
        """Price the held-out text, outside the training clock."""
        # What the device still has to do for training is training's time.
        self.runtime.synchronize()
        with self.meter.clock.phase("validate"):
            average = self.averagers[-1].average() if self.averagers else None
            return self.validator.run(self.model, average)

    def _complete(self, line: dict[str, Any], start_seconds: float) -> dict[str, Any]:
        """A line of metrics: what the step gave, with budgets spent, forecasts and speed."""
        position, tokens = self.position, self.loader.step_tokens * self.position.step
        line = {key: float(v) if isinstance(v, torch.Tensor) else v for key, v in line.items()}
        line |= {"tokens": tokens, "seconds": position.seconds, "flops": position.flops}
        line |= self.model.figures()
        line["epochs"] = self.loader.num_epochs(position.step)
        line["start_seconds"] = start_seconds
        line |= self.forecast.see(line)
        # The size is forecast with each validation, and as often as checkpoints are written.
        since = position.seconds - self.last_time.sized
        if "val_bpb" in line or since >= self.part.checkpoint_seconds:
            self.last_time.sized = position.seconds
            line |= self._forecast_size()
        token_flops = self._token_flops(position.context)
        line |= self.meter.read(tokens, position.seconds, token_flops)
        if self.runtime.device.type == "cuda":
            line["memory_bytes"] = torch.cuda.max_memory_allocated()
        return line

    def _forecast_size(self) -> dict[str, int]:
        """Bytes of the artifact if it were packed now, outside the training clock."""
        if self.size_of is None:
            return {}
        self.runtime.synchronize()
        with self.meter.clock.phase("size"):
            return {"forecast_bytes": self.size_of(self.packed_weights())}

    def _write(self, line: dict[str, Any]) -> None:
        text = json.dumps(line) + "\n"
        with writing(self.folder.metrics_file), self.folder.metrics_file.open("a") as file:
            file.write(text)
        self.evidence.add_metrics(text, self.weights())
        with writing(self.folder.path):
            self.events.write(line["step"], line)

    def _stop_if_broken(self, loss: torch.Tensor) -> None:
        """End a run whose last loss broke, before a checkpoint of it is written."""
        if not self.runtime.is_main:
            return
        step = self.position.step
        reason = self.guard.check(step, float(loss))
        if reason is not None:
            path, context = self.folder.path / "broken.safetensors", self.position.context or None
            raise self.guard.save_failure(path, self.loader, step, reason, context)

    def _checkpoint(self) -> None:
        """Write everything a resumed run needs, atomically."""
        if not self.runtime.is_main:
            return
        parts = self.parts()
        with self.meter.clock.phase("checkpoint"):
            self.evidence.add_checkpoint(self.position, parts)
            save_checkpoint(self.folder.checkpoint_file, self.position, parts)

    def _resume(self) -> bool:
        """Continue from the checkpoint, or clear what an earlier start left without one.

        Returns whether the run begins here.
        """
        file, start = self.folder.checkpoint_file, self.position
        require_same(f"recipe {start.recipe_hash}, data {start.data_identity}", self.runtime)
        require_on_main(file, self.runtime)
        # One rank reads for all: nodes need not share a folder, nor can they differ in the step.
        checkpoint = ask_main(
            lambda: read_checkpoint(file, start) if file.exists() else None, self.runtime
        )
        if checkpoint is None:
            if self.runtime.is_main:
                self.folder.metrics_file.unlink(missing_ok=True)
                self.folder.validation_file.unlink(missing_ok=True)
            return True
        position, parts = checkpoint
        # Reading restored the random state where the file was read.
        torch.set_rng_state(ask_main(torch.get_rng_state, self.runtime))
        with reading(file, "train again in another folder"):
            self.restore(position, parts)
        if self.runtime.is_main:
            # Steps after the checkpoint are taken again; their old lines go.
            lines = self.folder.metrics("progress", "loss", "seconds")
            kept = [line for line in lines if line["step"] <= self.position.step]
            for line in kept:
                self.guard.check(line["step"], line["loss"])
                self.forecast.see(line)
                self.last_time.logged = line["seconds"]
                if "forecast_bytes" in line:
                    self.last_time.sized = line["seconds"]
            write_atomic(self.folder.metrics_file, "".join(json.dumps(m) + "\n" for m in kept))
        return False

    def _begin_evidence(self, is_new: bool) -> None:
        if is_new:
            self.evidence.begin(self.position, self.parts())
        else:
            self.evidence.resume(self.position.step)

    def _save_weights(self) -> None:
        if self.runtime.is_main:
            about = {"recipe_hash": self.position.recipe_hash, "step": self.position.step}
            save_tensors(self.folder.weights_file, self.packed_weights(), about)
            self.evidence.end()

    def _report(self) -> None:
        """Price text and size of the final weights, before they are quantized."""
        validation = self.validate()
        if self.runtime.is_main:
            step, seconds = self.position.step, self.position.seconds
            about = {"step": step, "seconds": seconds, "tokens": step * self.loader.step_tokens}
            values = validation.as_dict() | self._forecast_size()
            chosen = {"attention": backend_of(self.runtime.device, self.runtime.dtype)}
            write_json(self.folder.validation_file, about | values | chosen)


@contextmanager
def interruptible() -> Iterator[Callable[[], bool]]:
    """Inside, SIGTERM and Ctrl-C only raise a flag, so that the step in hand can be saved.

    Python lets only the main thread handle signals: elsewhere the flag is never raised.
    """
    if threading.current_thread() is not threading.main_thread():
        yield lambda: False
        return
    caught: list[int] = []
    signals = (signal.SIGTERM, signal.SIGINT)
    old = [signal.signal(s, lambda number, frame: caught.append(number)) for s in signals]
    try:
        yield lambda: bool(caught)
    finally:
        for number, handler in zip(signals, old, strict=True):
            signal.signal(number, handler)
