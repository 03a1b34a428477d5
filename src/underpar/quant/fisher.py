"""Sensitivity of the loss to each output of a matrix: the true Fisher information.

An error e of a matrix moves its output by e x_s at each of its S inputs (visits times tokens). Let
G_s be the gradient of the summed loss at output s, with labels drawn from the model itself. Then
the Fisher information gives the increase of the loss, in nats over all T tokens:

    1/2 mean of (sum_s G_s' e x_s)^2  ~  1/2 sum_rj e_rj^2 (mean_s G_sr^2) (sum_s x_sj^2)

The approximation takes gradients to be independent of inputs, one input to be independent of
another (K-FAC, arXiv:1503.05671; shared weights: arXiv:2311.00636), and errors of different weights
to be independent. In nats per token this is 1/2 sum_rj g_r d_j e_rj^2, with g_r = mean_s G_sr^2 and
d_j = H_jj / T. Where the solver feeds errors back, the variance of column j given the later columns
takes the place of H_jj.

The tied embedding has two roles. As the head, its outputs are the logits y, and the mean over
labels is known: g_r = mean of (dz_r/dy_r)^2 p_r (1 - p_r), with z the capped logits. As the table,
row r is read wherever the token is r. Its error moves the input of the first block by e_r there,
and the increase is 1/2 sum_rj a_r e_rj^2. Here a_r is 1/T times the sum, over these places, of the
squared gradient at the looked-up row, averaged over channels. Both roles are in nats per token, so
they add up: (g_r + a_r / mean(d)) d_j has the same sum over a row as g_r d_j + a_r.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from underpar.core.dist import sum_over_ranks
from underpar.core.runtime import Runtime
from underpar.errors import DivergedError
from underpar.model.network import ROWS, Network, as_scored, products
from underpar.quant.calibration import (
    HEAD,
    SEED,
    Text,
    hidden_of,
    read,
    sites_of,
    watching,
)

# Rows have at least this share of the mean sensitivity of their tensor, however rare they were.
FLOOR = 1e-3


@dataclass(frozen=True, eq=False)
class Fisher:
    """Mean squared gradients by weight name, in fp32; the loss is in nats, summed over tokens."""

    outputs: Mapping[str, Tensor]
    """(R,) at each output, averaged over inputs; of the embedding, in its role as the head."""
    lookup: Tensor
    """(V,) at the row of a token: mean over channels, sum over its places, per token of text."""
    num_tokens: int

    def rows(self, name: str, mean_variance: float) -> Tensor:
        """g (R,) of a matrix, whose errors cost 1/2 sum g_r d_j e_rj^2 nats per token.

        `mean_variance` is the mean of d. No row is below a thousandth of the mean.
        """
        rows = self.outputs[name]
        if name == HEAD:
            rows = rows + self.lookup / mean_variance
        return rows.clamp_min(FLOOR * float(rows.mean()))


def measure(model: Network, text: Text, runtime: Runtime, seed: int = SEED) -> Fisher:
    """Measure by one backward pass per batch of `text`, all ranks together; no weight changes."""
    shared = sites_of(model).values()
    names = [name for together in shared for name in together if name != model.head_name]
    outputs = {name: _Squares(model.get_parameter(name)) for name in names}
    table = _Table(model.get_parameter(f"{model.table_name}.weight"))
    head = torch.zeros_like(table.squares)
    num_tokens = torch.zeros((), dtype=torch.int64, device=runtime.device)
    watches = {name.removesuffix(".weight"): outputs[name].watch for name in names}
    with as_scored(model), frozen(model):
        for index, batch in enumerate(read(text, model, runtime)):
            source = torch.Generator(runtime.device)
            source.manual_seed(seed + index * runtime.world + runtime.rank)
            with torch.enable_grad(), watching(model, {**watches, model.table_name: table.watch}):
                hidden = hidden_of(model, batch, runtime)
                hidden.backward(_score(model, hidden, head, source, runtime))
            num_tokens += len(batch.inputs)
    sum_over_ranks([*(sums.squares for sums in outputs.values()), head, table.squares], runtime)
    sum_over_ranks([*(sums.num_inputs for sums in outputs.values()), num_tokens], runtime)
    means = {name: sums.squares / sums.num_inputs for name, sums in outputs.items()}
    means[model.head_name] = head / num_tokens
    for name, mean in means.items():
        if not mean.isfinite().all():
            raise DivergedError(f"gradients at {name} are NaN or infinite")
    return Fisher(means, table.squares / num_tokens, int(num_tokens))


class _Squares:
    """A running sum of squared gradients at each output of a weight (R, C)."""

    def __init__(self, weight: Tensor) -> None:
        self.squares = weight.new_zeros(len(weight), dtype=torch.float32)
        self.num_inputs = torch.zeros((), dtype=torch.int64, device=weight.device)

    def watch(self, module: nn.Module, inputs: tuple[Tensor], output: Tensor) -> None:
        """The forward hook of the module; each visit of a loop calls it."""
        # Counted here and not in `_add`, because an unused output gets no gradient.
        self.num_inputs += len(output)
        output.register_hook(self._add)

    def _add(self, gradient: Tensor) -> None:
        self.squares += gradient.float().square().sum(0)


class _Table:
    """A running sum of squared gradients at the looked-up rows of an embedding (V, dim)."""

    def __init__(self, weight: Tensor) -> None:
        self.squares = weight.new_zeros(len(weight), dtype=torch.float32)

    def watch(self, module: nn.Module, inputs: tuple[Tensor], output: Tensor) -> Tensor:
        """The forward hook of the embedding: gradients end at the looked-up rows."""
        rows = output.detach().requires_grad_()
        rows.register_hook(lambda gradient: self._add(inputs[0], gradient))
        return rows

    def _add(self, tokens: Tensor, gradient: Tensor) -> None:
        self.squares.index_add_(0, tokens, gradient.float().square().mean(-1))


def _score(
    model: Network, hidden: Tensor, head: Tensor, source: torch.Generator, runtime: Runtime
) -> Tensor:
    """The gradient (N, dim) at `hidden` of the summed loss with sampled labels.

    Adds the squared gradients at the head to `head` (V,).
    """
    gradients = []
    for rows in hidden.detach().split(ROWS):
        rows = rows.detach().requires_grad_()
        with products(runtime.device, runtime.dtype):
            raw = F.linear(rows, model.get_parameter(model.head_name))
        capped = model.cap(raw)
        # Checked before sampling: on a GPU, sampling from NaN kills the process.
        if not capped.isfinite().all():
            raise DivergedError("logits are NaN or infinite")
        (slope,) = torch.autograd.grad(capped.sum(), raw, retain_graph=True)
        log_probs = capped.float().log_softmax(-1)
        probs = log_probs.detach().exp()
        head += (probs * (1.0 - probs) * slope.float().square()).sum(0)
        labels = torch.multinomial(probs, 1, generator=source)[:, 0]
        loss = F.nll_loss(log_probs, labels, reduction="sum")
        gradients += torch.autograd.grad(loss, rows)
    return torch.cat(gradients)


@contextmanager
def frozen(model: nn.Module) -> Iterator[None]:
    """Inside, no parameter requires a gradient; afterwards `requires_grad` is as before."""
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    try:
        for parameter in trainable:
            parameter.requires_grad_(False)
        yield
    finally:
        for parameter in trainable:
            parameter.requires_grad_(True)
