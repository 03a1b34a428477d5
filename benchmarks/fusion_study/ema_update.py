"""Muon's update, its weight decay and the average of weights in one pass over each bank.

    w <- keep w - rate u          u: the orthogonalized update, bf16, one bank (B, rows, columns)
    e <- e + share (w - e)        e: the exponential average of w

One launch per bank, though weights and averages are tensors of their own: the kernel reads their
addresses from a table.

Sources: fused optimizers (torch's AdamW, apex); one pass per step for the average, PR 2014; merged
optimizer kernels, modded-nanogpt records 42 to 61 (4 % of a step there, 1 to 2 % predicted here).

Why it could win: 18 bytes per weight instead of 38. Why it could lose: all of it is 0.3 ms of a
step of 82.

In `bench step` the candidate replaces Muon's update without the average, which the harness keeps.
"""

# mypy: disallow-untyped-defs=False

from __future__ import annotations

import types
from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from underpar.lab.operators import Operator, runs_triton
from underpar.model.network import Network
from underpar.recipe import Recipe
from underpar.train.muon import Muon
from underpar.train.optim import Optimizer

# Weights of a program: 8 in each of 256 threads.
BLOCK = 2048


def plain(
    updates: Tensor, weights: list[Tensor], averages: list[Tensor], rates: tuple[float, ...]
) -> None:
    """Change weights and averages; `rates` are keep, rate and share. No averages: none change."""
    keep, rate, share = rates
    torch._foreach_mul_(weights, keep)
    wide = updates.to(weights[0].dtype)
    torch._foreach_add_(weights, list(wide.unbind()), alpha=-rate)
    if averages:
        torch._foreach_lerp_(averages, weights, share)


def update(
    updates: Tensor, weights: list[Tensor], averages: list[Tensor], rates: tuple[float, ...]
) -> None:
    """As `plain`."""
    if runs_triton(updates):
        torch.ops.fusion_study.update(updates, weights, averages, list(rates))
    else:
        plain(updates, weights, averages, rates)


@triton.jit
def _update(
    updates_ptr, weights_ptr, averages_ptr, size, keep, rate, share,
    AVERAGES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    member = tl.program_id(1)
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    exists = at < size
    # Addresses of tensors are multiples of 16.
    weight_ptr = tl.multiple_of(tl.load(weights_ptr + member).to(tl.pointer_type(tl.float32)), 16)
    u = tl.load(updates_ptr + member.to(tl.int64) * size + at, exists, 0.0).to(tl.float32)
    w = keep * tl.load(weight_ptr + at, exists, 0.0) - rate * u
    tl.store(weight_ptr + at, w, exists)
    if AVERAGES:
        address = tl.load(averages_ptr + member).to(tl.pointer_type(tl.float32))
        average_ptr = tl.multiple_of(address, 16)
        e = tl.load(average_ptr + at, exists, 0.0)
        tl.store(average_ptr + at, e + share * (w - e), exists)


@cache
def _addresses(addresses: tuple[int, ...], device: torch.device) -> Tensor:
    return torch.tensor(addresses, dtype=torch.int64, device=device)


@torch.library.custom_op("fusion_study::update", mutates_args=("weights", "averages"))
def _apply_update(
    updates: Tensor, weights: list[Tensor], averages: list[Tensor], rates: list[float]
) -> None:
    updates = updates.contiguous()
    size = updates[0].numel()
    assert all(t.is_contiguous() and t.numel() == size for t in (*weights, *averages))
    assert all(t.dtype == torch.float32 for t in (*weights, *averages))
    tables = [
        _addresses(tuple(t.data_ptr() for t in tensors), updates.device)
        for tensors in (weights, averages or weights)
    ]
    grid = (triton.cdiv(size, BLOCK), len(weights))
    _update[grid](updates, *tables, size, *rates, bool(averages), BLOCK, num_warps=8)


def apply(network: Network, recipe: Recipe) -> None:
    """Nothing: the network stays as it is."""


def apply_optimizer(optimizer: Optimizer, recipe: Recipe) -> None:
    """Replace Muon's update of the weights."""
    muon: Any = optimizer.muon
    muon.step = types.MethodType(_muon_step, muon)


@torch.no_grad()
def _muon_step(muon: Muon, lr: float, momentum: float, decay_scale: float = 1.0) -> None:
    for shape, names in muon._banks.items():
        weights = [muon._parameters[name] for name in names]
        scale = max(1.0, shape[0] / shape[1]) ** 0.5
        rates = (1.0 - lr * muon.decay * decay_scale, lr * scale, 0.0)
        update(muon._update(names, momentum), weights, [], rates)


def _inputs(device: torch.device, tokens: int) -> tuple[Any, ...]:
    on_gpu = device.type == "cuda"
    num, rows, columns = (11, 2048, 512) if on_gpu else (3, 5, 7)
    updates = torch.randn(num, rows, columns, device=device) / columns**0.5
    weights = [torch.randn(rows, columns, device=device) for _ in range(2 * num)]
    return updates.to(torch.bfloat16) if on_gpu else updates, (0.99, 0.02, 0.05), *weights


def _with(version: Any) -> Any:
    def changed(updates: Tensor, rates: tuple[float, ...], *tensors: Tensor) -> tuple[Tensor, ...]:
        num = len(updates)
        version(updates, list(tensors[:num]), list(tensors[num:]), rates)
        return tensors

    return changed


OPERATORS = {
    "ema_update": Operator(
        what="Muon's update, decay and average of 11 matrices of 2048 x 512",
        source="PR 2014, modded-nanogpt records 42 to 61",
        plain=_with(plain),
        fused=_with(update),
        inputs=_inputs,
        flops=0.0,
        bytes=18 * 11 * 2048 * 512,
        plain_bytes=38 * 11 * 2048 * 512,
        compiled=False,
    )
}


def check(device: torch.device) -> None:
    """Weights and averages against fp64."""
    OPERATORS["ema_update"].check(device)
