"""Queries, keys, values and the gates of heads in one product.

    [q k v g] = [Wq; Wk; Wv; Wg 0] x

The weights stay parameters of their own, so that Muon sees what it saw; they are joined in the
graph. The gate of a head (`sparse_attn_gate`, `attn_out_gate`) reads the first channels of x only,
so its rows are filled up with zeros. `GATES` false leaves the gates as they are.

Why it could win: x is read once, and its gradient is one product instead of three products, their
sum and the padded gradient of the gate: 0.4 GB less per visit, 0.1 ms at 4.3 TB/s, so 1 ms per step
of 11 visits (prediction: 0 to 1 %). Why it could lose: the columns of gates fill a tile of their
own, an eighth more work, and what reads queries, keys and values reads rows with gaps (PR 670 lost
by copies of them; PR 1615 measured +0.4 %, within noise).
"""

from __future__ import annotations

import types
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from underpar.errors import BenchError
from underpar.model.gpt import GPT
from underpar.recipe import Recipe

GATES = True


def apply(network: GPT, recipe: Recipe) -> None:
    """Replace the projections, and the hook of a gate if there is one."""
    names = [name for name in HOOKS if name in network.levers]
    if len(names) > 1:
        raise BenchError("one_projection knows one gate of heads; switch the other off")
    gate: Any = network.levers[names[0]] if names and GATES else None
    if gate is not None:
        hooks = network.hooks.attn_out
        place = [getattr(hook, "__self__", None) for hook in hooks].index(gate)
        hooks[place] = types.MethodType(HOOKS[names[0]], gate)
        gate.logits = []
    blocks: Any = network.blocks
    for block in blocks:
        # In a tuple, because the weights of the lever are not those of the block.
        block.attn.joined = (gate,)
        block.attn.project = types.MethodType(_project, block.attn)


def _project(attn: Any, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    weights = [attn.q.weight, attn.k.weight, attn.v.weight]
    (gate,) = attn.joined
    if gate is not None:
        rows = gate.gate[attn.layer]
        weights.append(F.pad(rows, (0, x.size(-1) - rows.size(-1))))
    parts = F.linear(x, torch.cat(weights)).split([len(weight) for weight in weights], -1)
    if gate is not None:
        # Until attention has its output.
        gate.logits.append(parts[3])
    return parts[0], parts[1], parts[2]


def _sparse_gate(gate: Any, layer: int, y: Tensor, x: Tensor, v: Tensor) -> Tensor:
    return y * torch.sigmoid(gate.scale * gate.logits.pop()).to(y.dtype)[:, :, None]


def _out_gate(gate: Any, layer: int, y: Tensor, x: Tensor, v: Tensor) -> Tensor:
    return y * (2.0 * torch.sigmoid(gate.logits.pop())).to(y.dtype)[:, :, None]


HOOKS = {"sparse_attn_gate": _sparse_gate, "attn_out_gate": _out_gate}
