"""The compiled loss: one graph for each order of visits, none after the warm-up."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from underpar.data.loader import Batch
from underpar.train.step import LossOf, mean_loss


def compile_loss() -> LossOf:
    """`mean_loss` as one compiled graph; a break in it is an error, not a slow run."""
    compiled = torch.compile(mean_loss, fullgraph=True, dynamic=False)

    def loss_of(model: nn.Module, batch: Batch) -> Tensor:
        # The number of pieces alone differs from batch to batch: one graph for all of them.
        torch._dynamo.mark_dynamic(batch.segments.cu, 0)
        return compiled(model, batch)

    return loss_of
