"""Let the vectors that are stored anyway make up for what rounding the matrices did.

Scales, gains, mixes and gates are trained a little, on calibration text, with all matrices frozen
as rounded, so that the model predicts again what it did before. The loss is the divergence from
the distribution of the unrounded model (distillation, arXiv:1503.02531): every token then tells
about the whole vocabulary. The tokens of the text as labels say so little that in as many steps
they left the gap of a small model as it was, where the divergence took 10 to 30 % of it away.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from underpar.core.dist import sum_over_ranks
from underpar.core.runtime import Runtime
from underpar.data.loader import Batch
from underpar.errors import ArtifactError, RecipeError
from underpar.model.gpt import GPT
from underpar.model.network import ROWS, as_scored, products
from underpar.quant.calibration import Text, hidden_of, read
from underpar.quant.fisher import frozen

BETAS = (0.9, 0.99)
# One in so many batches is held back, to judge what the others taught.
HELD_BACK = 4


@dataclass(frozen=True)
class Settings:
    """Steps of Adam, each on one batch a rank, at a rate that falls from `lr` to 0."""

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
    """A batch, and what the teacher's head reads of it (N, dim)."""

    batch: Batch
    hidden: Tensor


def tune(
    model: GPT,
    names: Sequence[str],
    teacher: GPT,
    text: Text,
    runtime: Runtime,
    settings: Settings,
) -> dict[str, Tensor]:
    """Values of the parameters `names`, in fp16, with which `model` is closer to `teacher`.

    `model` holds rounded weights, `teacher` those from before. `text` is read again and again, all
    ranks together; where a held-back part of it shows no gain, the values are those of `model`.
    Both models come back as they were.
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
                raise ArtifactError("logits are NaN or infinite; the run diverged, nothing to tune")
            student.learn(taught, settings)
            tuned = [_to_half(parameter) for parameter in parameters]
            # Neither where it is NaN: a rate far too high ends so.
            final = tuned if student.divergence(held) < before else start
        return dict(zip(names, (value.cpu() for value in final), strict=True))


def _to_half(parameter: nn.Parameter) -> Tensor:
    """Round a parameter in place to what fp16 can hold; returns a copy in fp16."""
    halves = parameter.detach().half()
    parameter.data.copy_(halves)
    return halves


@contextmanager
def _lent(model: GPT, names: Sequence[str]) -> Iterator[list[nn.Parameter]]:
    """Inside, these parameters alone are trained; behind it, everything is as it was."""
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


def _read(text: Text, teacher: GPT, runtime: Runtime) -> list[_Example]:
    """This rank's examples, at least two."""
    with torch.no_grad():
        examples = [
            _Example(batch, hidden_of(teacher, batch, runtime))
            for batch in read(text, teacher, runtime)
        ]
    # Not of this rank's share: ranks must agree on it.
    if text.num_batches < 2 * runtime.world:
        raise RecipeError(
            f"tuning on {text.num_batches} batches of text: expected 2 or more for each of "
            f"{runtime.world} ranks"
        )
    return examples


@dataclass(frozen=True, eq=False)
class _Student:
    """A rounded model, its free parameters, and the model it should be like."""

    model: GPT
    parameters: list[nn.Parameter]
    teacher: GPT
    runtime: Runtime

    def learn(self, examples: Sequence[_Example], settings: Settings) -> None:
        """Take all steps, the same on every rank."""
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
        # The head goes slice by slice up to a copy of its input, then the rest in one pass.
        leaf = hidden.detach().requires_grad_()
        for own, other in zip(leaf.split(ROWS), example.hidden.split(ROWS), strict=True):
            (self._apart(own, other) / (len(leaf) * self.runtime.world)).backward()
        if hidden.requires_grad:
            hidden.backward(leaf.grad)

    @torch.no_grad()
    def divergence(self, examples: Sequence[_Example]) -> float:
        """Mean nats a token over all ranks."""
        total = torch.zeros(2, dtype=torch.float64, device=self.runtime.device)
        for example in examples:
            hidden = hidden_of(self.model, example.batch, self.runtime)
            for own, other in zip(hidden.split(ROWS), example.hidden.split(ROWS), strict=True):
                total[0] += self._apart(own, other)
                total[1] += len(own)
        sum_over_ranks([total], self.runtime)
        return float(total[0] / total[1])

    def _apart(self, own: Tensor, other: Tensor) -> Tensor:
        """Summed divergence in nats of the two heads, each of what it reads (n, dim)."""
        with products(self.runtime.device, self.runtime.dtype):
            logits = self.model.head(own)
            with torch.no_grad():
                wanted = self.teacher.head(other)
        logs, wanted_logs = (z.float().log_softmax(-1) for z in (logits, wanted))
        return F.kl_div(logs, wanted_logs, reduction="sum", log_target=True)
