"""The loss of a chunk of logits in plain torch, and its gradients: what `tiles.py` computes."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def turn_into_gradients(
    logits: Tensor, targets: Tensor, nats: Tensor, cap: float, share: float
) -> None:
    """Write the nats (R,) of each token, and `share` times their gradients in place of the logits.

    logits (R, V) are raw; `cap` bounds them here.
    """
    bent = torch.tanh(logits / cap)
    nats.copy_(F.cross_entropy(cap * bent, targets, reduction="none"))
    is_target = F.one_hot(targets, logits.size(1))
    logits.copy_(((cap * bent).softmax(1) - is_target) * (1.0 - bent.square()) * share)
