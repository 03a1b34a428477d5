"""SGD with momentum on tokens that were priced: gradients, steps, and passes over documents.

Score-first SGD is from PR 461, PR 549 and PR 1413. The pass over documents is the global phase of
PR 1610 and PR 2014.
"""

from __future__ import annotations

import fnmatch
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor

from underpar.core.dist import sum_over_ranks
from underpar.core.runtime import Runtime
from underpar.data.batch import Batch, segments_from_starts
from underpar.model.kv_cache import PackedCache
from underpar.model.network import Network, products
from underpar.model.sliced_head import backward_head
from underpar.recipe import require
from underpar.seams import BOS_ID

MOST_EPOCHS = 100


@dataclass(frozen=True)
class Descent:
    """SGD at the rate `lr` with `momentum`, `epochs` steps per chunk.

    `clip` bounds the norm of the gradients; 0: no bound. With `horizon_chunks` the rate falls as a
    cosine and is 0 at the last of that many chunks; with `cosine` at the last chunk of the text,
    whose number a decoder has to be told.
    """

    lr: float = 0.005
    momentum: float = 0.9
    clip: float = 1.0
    epochs: int = 1
    horizon_chunks: int = 0
    cosine: bool = False

    def check(self, lever: str) -> None:
        """Refuse values that make no sense, naming the lever that has them."""
        for key in ("lr", "clip", "horizon_chunks"):
            value = getattr(self, key)
            require(value >= 0, f"levers.{lever}.{key} = {value}: expected 0 or more")
        share = self.momentum
        require(0 <= share < 1, f"levers.{lever}.momentum = {share}: expected 0 up to 1")
        both = self.cosine and self.horizon_chunks
        require(not both, f"levers.{lever}: cosine and horizon_chunks; choose one of them")
        few = 1 <= self.epochs <= MOST_EPOCHS
        require(few, f"levers.{lever}.epochs = {self.epochs}: expected 1 to {MOST_EPOCHS}")

    def scale(self, chunk: int) -> float:
        """The factor of all rates after a chunk, counted from 0."""
        last = self.horizon_chunks - 1
        if last < 0:
            return 1.0
        return (1.0 + math.cos(math.pi * chunk / last)) / 2.0 if chunk < last else 0.0


class SGD:
    """An adapter: SGD on the tensors that `patterns` name."""

    def __init__(self, descent: Descent, patterns: Sequence[str]) -> None:
        self.descent = descent
        self.patterns = tuple(patterns)
        self._rates: list[float] = []
        self._velocity: list[Tensor] = []
        self._num_updates = 0

    @property
    def epochs(self) -> int:
        """Steps per chunk."""
        return self.descent.epochs

    def foresee(self, num_chunks: int) -> bool:
        """Let the rate fall over the whole text, if it shall."""
        if not self.descent.cosine:
            return False
        self.descent = replace(self.descent, cosine=False, horizon_chunks=num_chunks)
        return True

    def rate(self, name: str) -> float:
        """The rate of one tensor, before the schedule."""
        return self.descent.lr

    def attach(self, model: Any) -> None:
        """Nothing to attach: the adapter changes the model's tensors."""

    def parameters(self, named: Mapping[str, Tensor]) -> list[Tensor]:
        """The tensors of the model that `patterns` name."""
        chosen = [n for n in named if any(fnmatch.fnmatchcase(n, p) for p in self.patterns)]
        require(
            bool(chosen),
            f"an adapter's patterns {', '.join(self.patterns)} name no weight that others have not "
            "taken; change them or drop the lever",
        )
        self._rates = [self.rate(name) for name in chosen]
        return [named[name] for name in chosen]

    @torch.no_grad()
    def update(self, parameters: list[Tensor]) -> None:
        """One step from the gradients on `parameters`; a tensor without one stays."""
        if not self._velocity:
            self._velocity = [torch.zeros_like(p) for p in parameters]
        if self.descent.clip:
            torch.nn.utils.clip_grad_norm_(parameters, self.descent.clip)
        scale = self.descent.scale(self._num_updates // self.epochs)
        for parameter, velocity, lr in zip(parameters, self._velocity, self._rates, strict=True):
            if parameter.grad is not None:
                velocity.mul_(self.descent.momentum).add_(parameter.grad)
                parameter.sub_(velocity, alpha=lr * scale)
        self._num_updates += 1

    def state(self) -> dict[str, Tensor]:
        """Velocities and the number of steps, without the model's weights."""
        velocity = {f"velocity/{i}": v for i, v in enumerate(self._velocity)}
        return {"num_updates": torch.tensor(self._num_updates), **velocity}

    def load(self, state: Mapping[str, Tensor]) -> None:
        """Restore a state."""
        self._num_updates = int(state["num_updates"])
        self._velocity = [state[f"velocity/{i}"].clone() for i in range(len(state) - 1)]


@contextmanager
def gradients_on(parameters: Sequence[Tensor]) -> Iterator[None]:
    """Inside, `parameters` collect gradients, starting from none; after it they are as before."""
    before = [(parameter.requires_grad, parameter.grad) for parameter in parameters]
    try:
        for parameter in parameters:
            parameter.requires_grad_(True).grad = None
        with torch.enable_grad():
            yield
    finally:
        for parameter, (required, grad) in zip(parameters, before, strict=True):
            parameter.requires_grad_(required).grad = grad


def backward(
    model: Network,
    batch: Batch,
    num_targets: int,
    dtype: torch.dtype,
    rows: Tensor | None = None,
) -> None:
    """Add the gradients of the batch's summed nats divided by `num_targets`.

    With `rows` only the targets there count.
    """
    device, targets = batch.inputs.device, batch.targets
    with products(device, dtype):
        hidden = model.hidden(batch.inputs, PackedCache(batch.segments))
    if rows is not None:
        hidden, targets = hidden[rows], targets[rows]

    def loss(x: Tensor, targets: Tensor) -> Tensor:
        with products(device, dtype):
            logits = model.head(x)
        return F.cross_entropy(logits.float(), targets, reduction="sum") / num_targets

    backward_head(hidden, targets, loss)


def train_on_stream(
    model: Network,
    stream: npt.NDArray[Any],
    chunk_tokens: int,
    context: int,
    descent: Descent,
    runtime: Runtime,
) -> int:
    """One step on every chunk of a stream but the last; returns the number of steps.

    The rate falls as a cosine over the chunks. The loss of a chunk is the mean over its full rows
    of `context` tokens, for any number of ranks that share the rows.
    """
    num_chunks = -(-(len(stream) - 1) // chunk_tokens)
    sgd = SGD(replace(descent, horizon_chunks=num_chunks), ("*",))
    parameters = sgd.parameters(_trained(model))
    row_tokens = min(context, chunk_tokens)
    num_targets = chunk_tokens // row_tokens * row_tokens
    # Zeros, so that a rank without rows takes part in the sum over ranks.
    grads = [torch.zeros_like(parameter) for parameter in parameters]
    with gradients_on(parameters):
        for parameter, grad in zip(parameters, grads, strict=True):
            parameter.grad = grad
        for begin in range(0, (num_chunks - 1) * chunk_tokens, chunk_tokens):
            torch._foreach_zero_(grads)
            span = stream[begin : begin + num_targets + 1]
            batch = _own_rows(span, row_tokens, runtime)
            if batch is not None:
                backward(model, batch.to(runtime.device), num_targets, runtime.dtype)
            sum_over_ranks(grads, runtime)
            sgd.update(parameters)
    return max(0, num_chunks - 1)


def _trained(model: Network) -> dict[str, Tensor]:
    """The weights by name, but for those that training leaves alone (PR 2014: the soft cap)."""
    modules = dict(model.named_modules()).items()
    frozen = {f"{path}.{name}" for path, m in modules for name in getattr(m, "frozen", ())}
    return {name: weight for name, weight in model.named_parameters() if name not in frozen}


def _own_rows(span: npt.NDArray[Any], row_tokens: int, runtime: Runtime) -> Batch | None:
    """This rank's rows of a span, cut where documents begin; None if it has none."""
    num_rows = (len(span) - 1) // row_tokens
    # Consecutive rows, so that levers that look one token back find the right token.
    first, end = (num_rows * r // runtime.world for r in (runtime.rank, runtime.rank + 1))
    if first == end:
        return None
    tokens = span[first * row_tokens : end * row_tokens + 1].astype(np.int64)
    inputs, targets = tokens[:-1], tokens[1:]
    starts = inputs == BOS_ID
    starts[::row_tokens] = True
    segments = segments_from_starts(starts, len(inputs), row_tokens)
    return Batch(torch.from_numpy(inputs), torch.from_numpy(targets), segments)
