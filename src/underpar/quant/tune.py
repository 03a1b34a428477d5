"""Tune the fp16 parameters so that they make up for the rounding of the matrices.

Scales, gains, mixes and gates are trained a little on calibration text; all matrices stay as
rounded. The loss is the divergence from the distribution of the unrounded model (distillation,
arXiv:1503.02531), because every token then tells about the whole vocabulary. With the tokens of the
text as labels, the same number of steps left the gap of a small model as it was; with the
divergence they closed 10 to 30 % of it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from underpar.core.dist import sum_over_ranks
from underpar.core.runtime import Runtime
from underpar.data.batch import Batch
from underpar.errors import DivergedError, RecipeError
from underpar.model.network import ROWS, Network, as_scored, products
from underpar.model.sliced_head import backward_head
from underpar.quant.calibration import Text, hidden_of, read
from underpar.quant.fisher import frozen
from underpar.quant.schemes import QuantizedModel

BETAS = (0.9, 0.99)
# One in this many batches is held back, to judge the values that the others give.
HELD_BACK = 4


@dataclass(frozen=True)
class Settings:
    """Steps of Adam, each on one batch per rank, at a rate that falls from `lr` to 0."""

    steps: int = 30
    lr: float = 0.01

    def __post_init__(self) -> None:
        if self.steps < 0 or not 0 < self.lr < math.inf:
            raise RecipeError(
                f"tuning of {self.steps} steps at a rate of {self.lr}: expected 0 or more steps "
                "and a rate above 0"
            )


@dataclass(frozen=True, eq=False)
class _Example:
    """A batch, and the teacher's hidden states (N, dim) for it."""

    batch: Batch
    hidden: Tensor


def tune(
    model: Network,
    names: Sequence[str],
    teacher: Network,
    text: Text,
    runtime: Runtime,
    settings: Settings,
) -> dict[str, Tensor]:
    """Values of the parameters `names`, in fp16, with which `model` is closer to `teacher`.

    `model` holds rounded weights, `teacher` the weights from before rounding. All ranks read `text`
    together, repeatedly. If its held-back part shows no gain, the values are those of `model`.
    Both models are unchanged afterwards.
    """
    with as_scored(teacher), _lent(model, names) as parameters:
        start = [_to_half(parameter) for parameter in parameters]
        final = start
        if settings.steps and parameters:
            student = _Student(model, parameters, teacher, runtime)
            examples = _read(text, teacher, runtime)
            num_held = max(1, len(examples) // HELD_BACK)
            held, taught = examples[:num_held], examples[num_held:]
            before = student.divergence(held)
            if not math.isfinite(before):
                raise DivergedError("logits are NaN or infinite")
            student.learn(taught, settings)
            tuned = [_to_half(parameter) for parameter in parameters]
            # False for NaN too, which a far too high rate leads to.
            final = tuned if student.divergence(held) < before else start
        return dict(zip(names, (value.cpu() for value in final), strict=True))


def tune_halves(
    tensors: QuantizedModel,
    model: Network,
    teacher: Network,
    text: Text,
    runtime: Runtime,
    settings: Settings,
    largest: int | None = None,
) -> QuantizedModel:
    """`tensors` with tuned fp16 parameters, those of at most `largest` weights (None: all).

    `model` holds `tensors`, `teacher` the weights from before rounding.
    """
    parameters = {name for name, _ in model.named_parameters()}
    names = [
        name
        for name, tensor in tensors.items()
        if tensor.scheme.is_half
        and name in parameters
        and (largest is None or tensor.steps.size <= largest)
    ]
    values = tune(model, names, teacher, text, runtime, settings)
    tuned = {n: replace(tensors[n], steps=v.numpy().reshape(-1)) for n, v in values.items()}
    return {**tensors, **tuned}


def _to_half(parameter: nn.Parameter) -> Tensor:
    """Round a parameter in place to what fp16 can hold; returns a copy in fp16."""
    halves = parameter.detach().half()
    parameter.data.copy_(halves)
    return halves


@contextmanager
def _lent(model: Network, names: Sequence[str]) -> Iterator[list[nn.Parameter]]:
    """Inside, only these parameters can be trained; afterwards everything is as before."""
    parameters = [model.get_parameter(name) for name in names]
    before = [(parameter.detach().clone(), parameter.grad) for parameter in parameters]
    with as_scored(model), frozen(model), torch.enable_grad():
        for parameter in parameters:
            parameter.requires_grad_(True).grad = None
        try:
            yield parameters
        finally:
            for parameter, (value, grad) in zip(parameters, before, strict=True):
                parameter.data.copy_(value)
                parameter.requires_grad_(False).grad = grad


def _read(text: Text, teacher: Network, runtime: Runtime) -> list[_Example]:
    """This rank's examples, two or more."""
    with torch.no_grad():
        examples = [
            _Example(batch, hidden_of(teacher, batch, runtime))
            for batch in read(text, teacher, runtime)
        ]
    # Checked for the whole text, not for this rank's share, so that all ranks agree.
    if text.num_batches < 2 * runtime.world:
        raise RecipeError(
            f"tuning on {text.num_batches} batches of text: expected 2 or more for each of "
            f"{runtime.world} ranks"
        )
    return examples


@dataclass(frozen=True, eq=False)
class _Student:
    """A rounded model, its trainable parameters, and the model that it should imitate."""

    model: Network
    parameters: list[nn.Parameter]
    teacher: Network
    runtime: Runtime

    def learn(self, examples: Sequence[_Example], settings: Settings) -> None:
        """Take all steps; every rank gets the same parameters."""
        adam = torch.optim.Adam(self.parameters, settings.lr, BETAS)
        for step in range(settings.steps):
            self._backward(examples[step % len(examples)])
            gradients = [p.grad for p in self.parameters if p.grad is not None]
            sum_over_ranks(gradients, self.runtime)
            for group in adam.param_groups:
                group["lr"] = settings.lr * (1 - step / settings.steps)
            adam.step()
            adam.zero_grad()

    def _backward(self, example: _Example) -> None:
        hidden = hidden_of(self.model, example.batch, self.runtime)
        num_targets = len(hidden) * self.runtime.world
        backward_head(hidden, example.hidden, lambda x, y: self._sum_divergence(x, y) / num_targets)

    @torch.no_grad()
    def divergence(self, examples: Sequence[_Example]) -> float:
        """Mean divergence in nats per token, over all ranks."""
        total = torch.zeros(2, dtype=torch.float64, device=self.runtime.device)
        for example in examples:
            hidden = hidden_of(self.model, example.batch, self.runtime)
            for x, y in zip(hidden.split(ROWS), example.hidden.split(ROWS), strict=True):
                total[0] += self._sum_divergence(x, y)
                total[1] += len(x)
        sum_over_ranks([total], self.runtime)
        return float(total[0] / total[1])

    def _sum_divergence(self, x: Tensor, teacher_x: Tensor) -> Tensor:
        """Divergence in nats, summed over tokens, from the hidden states (n, dim) of both."""
        with products(self.runtime.device, self.runtime.dtype):
            logits = self.model.head(x)
            with torch.no_grad():
                wanted = self.teacher.head(teacher_x)
        logs, wanted_logs = (z.float().log_softmax(-1) for z in (logits, wanted))
        return F.kl_div(logs, wanted_logs, reduction="sum", log_target=True)
