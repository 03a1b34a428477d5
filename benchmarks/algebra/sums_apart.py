"""Residual sums that are not part of the product before them.

With folded scales (`compile/rewrites.py`) a branch ends with its product, and torch's Inductor
makes product and residual sum one `addmm`. cuBLAS adds in place, so torch copies the stream first.
From attention's product to the MLP's norm, 6 tensors of the stream's size are then read or written
instead of 5; from the MLP's product to the end of the visit, 4 instead of 4, in one kernel more.
Here the sum is one of fp32 numbers, which the pattern of `addmm` does not match. The compiler fuses
it with the norm, and adds in fp32 anyway.

Why it could win: 0.1 GB and two launches per visit; of 17 visits 1.7 GB, 0.41 ms at 4.16 TB/s
(prediction: 0.3 % of a step). Why it could lose: torch may have learnt to add without the copy.

Source: `should_prefer_unfused_addmm` of torch 2.11, which fuses if anything but element-wise
operations reads the sum.
"""

from __future__ import annotations

import types
from typing import Any

from torch import Tensor

from underpar.model.gpt import Block
from underpar.model.network import EAGER, Eager, Network
from underpar.recipe import Recipe
from underpar.seams import Stream, Visit


def apply(network: Network, recipe: Recipe) -> None:
    """Replace the blocks' own sums; levers that rewire a block have theirs."""
    blocks: list[Any] = [block for trunk in network.trunks for block in trunk.blocks]
    for block in blocks:
        if block.wiring is None:
            block.forward = types.MethodType(_forward, block)


def _forward(block: Block, visit: Visit, stream: Stream, run: Eager = EAGER) -> None:
    x = block.mix(stream.x, stream)
    x = _add(x, run.attention(block, x, visit, stream))
    stream.x = _add(x, run.mlp(block, x, visit))


def _add(x: Tensor, y: Tensor) -> Tensor:
    return (x.float() + y.float()).to(x.dtype)
