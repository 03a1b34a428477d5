"""Correct the logits of the rounded model: a scale and a bias for each class of tokens.

The numbers are fitted to the next tokens of training text (PR 1884, PR 1924), but only of text that
is new to the model: it is too sure of text that it has read, most of all of the latest. Numbers
fitted to text that it had read made a small model 5 mnats per token worse on held-out text; numbers
fitted to new text made it 2.7 better. The calibrated logits are linear in the numbers, so that the
mean nats are convex in them: two steps of Newton's method reach the minimum.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, runtime_checkable

import torch
import torch.nn.functional as F
from torch import Tensor

from underpar.core.dist import sum_over_ranks
from underpar.core.runtime import Runtime
from underpar.data.batch import Batch
from underpar.data.folder import DataFolder
from underpar.data.loader import Loader, Place, prefetch
from underpar.errors import DivergedError
from underpar.model.network import ROWS, Network, as_scored, products
from underpar.quant.calibration import hidden_of, require_training_split
from underpar.schema import TrainPart
from underpar.train.step import open_loader

# Steps of Newton's method.
NUM_STEPS = 3
# One in this many tokens is held back, to judge the numbers that the others give.
HELD_BACK = 4
# Standard deviation of the prior: the numbers are expected to lie this close to their start.
WIDTH = 0.03
# Decimals with which the numbers are packed.
DECIMALS = 4


@dataclass(frozen=True, eq=False)
class UnreadText:
    """The batches that a run would have read next: training text that is new to the model.

    The run took `num_steps`. The text ends with the batch in which it reaches `most_tokens`, or
    earlier, where the training text ends.
    """

    data: DataFolder
    part: TrainPart
    num_steps: int
    most_tokens: int

    def __post_init__(self) -> None:
        require_training_split(self.data)

    @property
    def places(self) -> list[tuple[int, int]]:
        """Step and micro-batch of each batch."""
        places: list[tuple[int, int]] = []
        loader, step, num_tokens = self._loader, self.num_steps, 0
        while loader.num_epochs(step + 1) <= 1:
            for micro, batch in enumerate(loader.plan):
                if num_tokens >= self.most_tokens:
                    return places
                places.append((step, micro))
                num_tokens += batch.tokens
            step += 1
        return places

    def batches(self, context: int, runtime: Runtime) -> Iterator[Batch]:
        """This rank's share, cut at `context`."""
        share: list[Place] = [
            (*place, context) for place in self.places[runtime.rank :: runtime.world]
        ]
        return prefetch(self._loader, share, runtime.device.type == "cuda")

    @property
    def _loader(self) -> Loader:
        return open_loader(self.data.train, self.part)


@runtime_checkable
class LogitLever(Protocol):
    """Seam `classes`: a lever that gives the logits of each class of tokens a scale and a bias."""

    classes: Tensor
    """(V,) the class of each token."""
    settings: Any
    """Has `scales` and `biases`, by class."""

    def attach(self, model: Any) -> None:
        """Make the model's logits those with the scales and biases of the settings."""


@dataclass(frozen=True)
class Numbers:
    """Scales and biases by class of tokens."""

    scales: tuple[float, ...]
    biases: tuple[float, ...]


@dataclass(frozen=True)
class LogitFit:
    """The fitted numbers; and mean nats per held-back token before and after.

    If the held-back text shows no gain, or there is no text, the numbers are those of the start.
    """

    numbers: Numbers
    nats: tuple[float, float] | None = None


def fit_logits(
    model: Network,
    classes: Tensor,
    start: Numbers,
    text: UnreadText,
    runtime: Runtime,
    num_steps: int = NUM_STEPS,
) -> LogitFit:
    """The numbers with which `model` predicts `text` best; all ranks together.

    `classes` (V,) is the class of each token. The search begins at `start`. The model is unchanged.
    """
    # Every rank needs a share of the text.
    if len(text.places) < runtime.world:
        return LogitFit(start)
    one_hot = F.one_hot(classes, len(start.scales)).float().to(runtime.device)
    problem = LogitProblem(model, one_hot, runtime)
    with torch.no_grad(), as_scored(model):
        whole = _read(model, text, runtime)
        num_held = len(whole.targets) // HELD_BACK
        held, taught = whole.cut(0, num_held), whole.cut(num_held, None)
        before = problem.measure(held, start).mean_nats
        if not math.isfinite(before):
            raise DivergedError("logits are NaN or infinite")
        fitted = problem.descend(taught, start, num_steps)
        after = problem.measure(held, fitted).mean_nats
    # False for NaN too.
    if not (after < before and min(fitted.scales) > 0):
        return LogitFit(start, (before, before))
    return LogitFit(fitted, (before, after))


@dataclass(frozen=True, eq=False)
class Example:
    """Hidden states of some tokens (N, dim), and the tokens that follow them (N,)."""

    hidden: Tensor
    targets: Tensor

    def cut(self, begin: int, end: int | None) -> Example:
        """The tokens from `begin` to `end`."""
        return Example(self.hidden[begin:end], self.targets[begin:end])


def _read(model: Network, text: UnreadText, runtime: Runtime) -> Example:
    """Hidden states and targets of this rank's share of the text."""
    batches = [b.to(runtime.device) for b in text.batches(model.spec.context, runtime)]
    hidden = torch.cat([hidden_of(model, batch, runtime) for batch in batches])
    return Example(hidden, torch.cat([batch.targets for batch in batches]))


class Sums(NamedTuple):
    """Sums over some tokens, in fp64: nats, with their gradient and Hessian in all numbers."""

    num_tokens: Tensor
    nats: Tensor
    slope: Tensor  # (2 K,)
    curvature: Tensor  # (2 K, 2 K)

    @property
    def mean_nats(self) -> float:
        """Nats per token."""
        return float(self.nats / self.num_tokens)


@dataclass(frozen=True, eq=False)
class LogitProblem:
    """A model, and the classes of its tokens as one_hot (V, K)."""

    model: Network
    one_hot: Tensor
    runtime: Runtime

    def descend(self, example: Example, start: Numbers, num_steps: int) -> Numbers:
        """The numbers of least nats and prior over an example, rounded as they are packed."""
        origin = torch.tensor((*start.scales, *start.biases), dtype=torch.float64)
        values, prior = origin, torch.eye(len(origin), dtype=torch.float64) / WIDTH**2
        for _ in range(num_steps):
            sums = self.measure(example, as_numbers(values))
            slope = sums.slope.cpu() + prior @ (values - origin)
            values = values - torch.linalg.solve(sums.curvature.cpu() + prior, slope)
        return as_numbers(values, DECIMALS)

    def measure(self, example: Example, numbers: Numbers) -> Sums:
        """The sums of an example with these numbers, over all ranks."""
        scales, biases = (
            self.one_hot @ self.one_hot.new_tensor(values)  # (V,)
            for values in (numbers.scales, numbers.biases)
        )
        slices = zip(example.hidden.split(ROWS), example.targets.split(ROWS), strict=True)
        parts = [self._measure_slice(x, t, scales, biases) for x, t in slices]
        total = Sums(*(torch.stack(column).sum(0) for column in zip(*parts, strict=True)))
        sum_over_ranks(total, self.runtime)
        return total

    def _measure_slice(self, x: Tensor, targets: Tensor, scales: Tensor, biases: Tensor) -> Sums:
        """The sums of tokens with hidden states x (n, dim); the numbers are given by token (V,)."""
        with products(self.runtime.device, self.runtime.dtype):
            z = self.model.head(x)
        z, index = z.float(), targets[:, None]
        log_p = torch.addcmul(biases, z, scales).log_softmax(-1)
        p = log_p.exp()
        # The scale of a class multiplies z and its bias multiplies 1. Their moments are the sums of
        # p z^2, p z and p over the tokens of the class (n, K).
        squares, means, masses = ((v @ self.one_hot).double() for v in (p * z * z, p * z, p))
        expected = torch.cat((means, masses), dim=1)  # (n, 2 K)
        target_class = self.one_hot[targets]
        observed = torch.cat((target_class * z.gather(1, index), target_class), dim=1)
        upper, mixed, lower = (v.sum(0).diag() for v in (squares, means, masses))
        second = torch.cat((torch.cat((upper, mixed), 1), torch.cat((mixed, lower), 1)))
        return Sums(
            num_tokens=expected.new_tensor(len(x)),
            nats=-log_p.gather(1, index).double().sum(),
            slope=(expected - observed).sum(0),
            curvature=second - expected.T @ expected,
        )


def as_numbers(values: Tensor, decimals: int | None = None) -> Numbers:
    """Scales, then biases, from one vector."""
    plain = values.tolist()
    plain = plain if decimals is None else [round(value, decimals) for value in plain]
    num = len(plain) // 2
    return Numbers(tuple(plain[:num]), tuple(plain[num:]))
