"""Ends a run early: if its loss breaks, or if it falls behind a reference run."""

from __future__ import annotations

import math
import shlex
from bisect import bisect_right
from collections import deque
from collections.abc import Iterable, Mapping
from pathlib import Path
from statistics import fmean, median

import torch
from torch import Tensor

from underpar.core.fields import reading
from underpar.core.run_folder import RunFolder
from underpar.core.tensor_files import read_tensors, save_tensors
from underpar.data.batch import Batch, Segments
from underpar.data.loader import Loader
from underpar.errors import RunError, UnderparError

# The usual loss is the median of the last WINDOW_LOSSES. Below FEWEST_LOSSES no loss is usual.
WINDOW_LOSSES = 50
FEWEST_LOSSES = 10
# No rise counts as a break up to this step: the loss falls by nats, and rises by nats in step 2.
SETTLED_STEP = 100
# A rise is a break if so many losses in a row are that high. Text of another kind, such as a table
# between novels, raises the loss for some steps too; a model that learns comes down again.
RISEN_LOSSES = 25

# Two runs are compared over the last WINDOW_SHARE of progress, from FIRST_SHARE of the run on, if
# each has at least FEWEST_POINTS losses there.
WINDOW_SHARE = 0.1
FIRST_SHARE = 0.3
FEWEST_POINTS = 5

# Keys are step and micro-batch, which the loader counts from 0.
Batches = Mapping[tuple[int, int], Batch]
BATCH_FIELDS = ("inputs", "targets", "cu", "positions", "limits")


def lower_rate(folder: RunFolder) -> str:
    """What to run after a run diverged: the same with half of the learning rate, beside it."""
    try:
        data = folder.read_fields(folder.about_file).text("data")
        rate = folder.read_recipe().train.matrix_lr / 2
    except UnderparError:
        data, rate = "DATA", 0.01
    words = ["train", folder.recipe_file, "--data", data, "--out", f"{folder.path}-lower-rate"]
    command = shlex.join(map(str, words))
    return f"train more slowly: 'underpar {command} --set train.matrix_lr={rate:.3g}'"


class Guard:
    """Tells a broken loss from a noisy one, in nats per token. Steps count from 1, as logged."""

    def __init__(self, vocab_size: int, explosion: float = 3.0) -> None:
        self.explosion = explosion
        # A model that knows nothing has a loss of ln V. Every published run survives a spike in
        # step 2 of up to 1.44 ln V (9.0 to 12.9 nats, PR 2014).
        self.ceiling = 2 * math.log(vocab_size)
        self.healthy_step = 0
        self.num_high = 0
        """How many losses in a row were too high, up to the last one."""
        self._first_high = self._last_high = 0
        self._recent: deque[float] = deque(maxlen=WINDOW_LOSSES)

    def check(self, step: int, loss: float) -> str | None:
        """Why the loss of this step should end the run; None if training may go on.

        The loop asks twice about some steps: before it logs the step, and before it saves a
        checkpoint. Each step counts once.
        """
        if step == self.healthy_step:
            return None
        reason = self._reason(loss) if step > SETTLED_STEP else self._above_ceiling(loss)
        if reason is None:
            self._recent.append(loss)
            self.healthy_step, self.num_high = step, 0
            return None
        self._first_high = self._first_high if self.num_high else step
        self.num_high += step != self._last_high
        self._last_high = step
        if not math.isfinite(loss):
            return reason
        if self.num_high < RISEN_LOSSES:
            return None
        return f"{reason}, and {self.num_high} losses in a row were so high"

    def suspects(self, step: int) -> range:
        """The loader's steps whose batches may have broken the loss of `step`.

        The loss of a step is computed before its update, so the update of the last healthy step
        may be the cause. Of a rise, the first step counts.
        """
        return range(max(0, self.healthy_step - 1), self._first_high or step)

    def save_failure(
        self, path: Path, loader: Loader, step: int, reason: str, context: int | None = None
    ) -> RunError:
        """Save the suspects, cut at `context` or as planned. Returns the error to raise."""
        micros = range(loader.num_micro_batches)
        places = ((s, m) for s in self.suspects(step) for m in micros)
        batches = {(s, m): loader.batch(s, m, context) for s, m in places}
        save_batches(path, batches, {"step": step, "reason": reason})
        return RunError(
            f"stopped at step {step}: {reason}; batches since step {max(1, self.healthy_step)} are "
            f"in {path} (see underpar.train.guard.read_batches); if the text changes there, try a "
            "smaller train.piece_tokens (a long document is read in pieces of so many tokens), "
            f"else {lower_rate(RunFolder(path.parent))}"
        )

    def _above_ceiling(self, loss: float) -> str | None:
        if not math.isfinite(loss):
            return f"the loss is {loss}"
        if loss > self.ceiling:
            return f"the loss is {loss:.2f} nats, above 2 ln V = {self.ceiling:.2f}"
        return None

    def _reason(self, loss: float) -> str | None:
        usual = median(self._recent) if len(self._recent) >= FEWEST_LOSSES else math.inf
        if self.explosion + usual < loss < math.inf:
            return f"the loss rose from {usual:.2f} to {loss:.2f} nats"
        return self._above_ceiling(loss)


def save_batches(path: Path, batches: Batches, about: Mapping[str, object]) -> None:
    """Write micro-batches and a description (JSON) as one safetensors file, atomically."""
    tensors = {}
    for (step, micro), batch in batches.items():
        for name, tensor in zip(BATCH_FIELDS, _fields(batch), strict=True):
            tensors[f"{step}/{micro}/{name}"] = tensor.to(torch.int32)
    save_tensors(path, tensors, about)


def read_batches(path: Path) -> tuple[dict[tuple[int, int], Batch], dict[str, object]]:
    """What `save_batches` wrote: (step, micro-batch) -> batch, and the description."""
    tensors, about = read_tensors(path)
    with reading(path, "it holds no batches of this version"):
        places = {tuple(map(int, name.split("/")[:2])) for name in tensors}
        batches = {(step, micro): _batch(tensors, step, micro) for step, micro in sorted(places)}
    return batches, about


def _fields(batch: Batch) -> tuple[Tensor, ...]:
    cuts = batch.segments
    limits = torch.tensor([cuts.max_len, cuts.context])
    return batch.inputs, batch.targets, cuts.cu, cuts.positions, limits


def _batch(tensors: Mapping[str, Tensor], step: int, micro: int) -> Batch:
    inputs, targets, cu, positions, limits = (
        tensors[f"{step}/{micro}/{name}"] for name in BATCH_FIELDS
    )
    max_len, context = limits.tolist()
    segments = Segments(cu, max_len, positions.long(), context)
    return Batch(inputs.long(), targets.long(), segments)


class Reference:
    """The losses of another run, with which this run is compared."""

    def __init__(self, points: Iterable[tuple[float, float]], margin: float = 0.1) -> None:
        self.margin = margin
        self._theirs = _Curve(points)
        self._ours = _Curve(())

    def add(self, progress: float, loss: float) -> None:
        """Add a logged loss of this run, in nats per token."""
        self._ours.add(progress, loss)

    def gap(self) -> float | None:
        """Mean loss of this run minus that of the other, in nats, over the last tenth of progress.

        Below 0 this run is better. None before 0.3 of the run, or if a run has too few losses.
        """
        end = self._ours.end
        ours, theirs = (c.mean(end - WINDOW_SHARE, end) for c in (self._ours, self._theirs))
        if end < FIRST_SHARE or ours is None or theirs is None:
            return None
        return ours - theirs

    def check(self, progress: float, loss: float) -> str | None:
        """Add a logged loss; returns why the run should end, or None."""
        self.add(progress, loss)
        gap = self.gap()
        if gap is None or gap <= self.margin:
            return None
        return f"{gap:.3f} nats behind at {progress:.0%} of the run"


class _Curve:
    """Finite losses, in the order of their progress."""

    def __init__(self, points: Iterable[tuple[float, float]]) -> None:
        self._progress: list[float] = []
        self._losses: list[float] = []
        for progress, loss in points:
            self.add(progress, loss)

    @property
    def end(self) -> float:
        """Progress of the last loss."""
        return self._progress[-1] if self._progress else 0.0

    def add(self, progress: float, loss: float) -> None:
        """Add a loss at the end."""
        # A resumed run repeats steps: the repeated ones replace the earlier ones.
        keep = bisect_right(self._progress, progress)
        del self._progress[keep:], self._losses[keep:]
        if math.isfinite(loss):
            self._progress.append(progress)
            self._losses.append(loss)

    def mean(self, begin: float, end: float) -> float | None:
        """Mean loss after `begin` and up to `end`; None if there are too few."""
        first, last = (bisect_right(self._progress, share) for share in (begin, end))
        losses = self._losses[first:last]
        return fmean(losses) if len(losses) >= FEWEST_POINTS else None


def read_reference(folder: RunFolder, margin: float = 0.1) -> Reference:
    """The losses that another run logged."""
    if not 0 <= margin < math.inf:
        raise RunError(f"margin {margin}: expected nats, 0 or more")
    lines = folder.metrics("progress", "loss")
    points = [(float(line["progress"]), float(line["loss"])) for line in lines]
    if not points:
        raise RunError(
            f"{folder.metrics_file} holds no losses to compare with; name a run that was trained"
        )
    return Reference(points, margin)
