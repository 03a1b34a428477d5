"""One step of L lanes: what the network reads, and the log-probabilities and loss that follow.

The eager forward pass is here; `score/ttt/forward.py` compiles the same functions.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from underpar.infer.predictor import log_probs_of
from underpar.model.network import Network
from underpar.seams import KVCache


@dataclass(frozen=True, eq=False)
class StepInputs:
    """A step of L lanes with C tokens each, N = L * C; n targets are predicted from them."""

    tokens: Tensor  # (N,), lane by lane
    counts: Tensor  # (L,) tokens per lane that are real; the rest is padding
    rows: Tensor | None
    """(n,) rows of N that the targets are predicted from; None: all of them, n = N."""
    wanted: Tensor
    """(n, 1 + K) the target, then K further tokens whose probability is asked; -1 for none."""
    weights: Tensor
    """(n,) weight of each target in the loss."""

    @property
    def width(self) -> int:
        """C."""
        return len(self.tokens) // len(self.counts)


# Log-probabilities (n, 1 + K), and the loss: a weighted sum over targets.
StepOutputs = tuple[Tensor, Tensor]


def forward_step(model: Network, inputs: StepInputs, cache: KVCache) -> StepOutputs:
    """The forward pass of one step, eager."""
    hidden = model.hidden(inputs.tokens, cache)
    return outputs_of(model, hidden, inputs.rows, inputs.wanted, inputs.weights)


def outputs_of(
    model: Network,
    hidden: Tensor,
    rows: Tensor | None,
    wanted: Tensor,
    weights: Tensor,
    fused: bool = False,
) -> StepOutputs:
    """Log-probabilities and loss from hidden states (N, dim); `fused`: for a compiler."""
    if rows is not None:
        # Plain indexing would sort in its backward pass.
        hidden = hidden.index_select(0, rows)
    log_p = log_probs_of(model, hidden, wanted, fused)
    return log_p, -(log_p[:, 0] * weights).sum()
