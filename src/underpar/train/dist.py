"""The few collectives used: what is reduced, and when.

Each step: gradients are summed over ranks after the last micro-batch, Muon's updates are gathered,
one message for all matrices of a shape, and the main rank's progress is sent to all, so that every
rank takes the same step with the same rates and stops together.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor

from underpar.runtime import Runtime

# A single rank: nothing is sent, so its device does not matter.
ALONE = Runtime(torch.device("cpu"))


@contextmanager
def process_group(runtime: Runtime) -> Iterator[None]:
    """Join the ranks that torchrun started, if there is more than one."""
    if runtime.world == 1:
        yield
        return
    dist.init_process_group("nccl" if runtime.device.type == "cuda" else "gloo")
    try:
        yield
    finally:
        dist.destroy_process_group()


def sum_over_ranks(tensors: Iterable[Tensor], runtime: Runtime) -> None:
    """Replace each tensor by its sum over ranks, in one flat message."""
    if runtime.world == 1:
        return
    parts = list(tensors)
    flat = torch.cat([t.reshape(-1) for t in parts])
    dist.all_reduce(flat)
    for tensor, total in zip(parts, flat.split([t.numel() for t in parts]), strict=True):
        tensor.copy_(total.view_as(tensor))


def gather_shares(share: Tensor, runtime: Runtime) -> Tensor:
    """Every rank's share (B, ...), in rank order, as one (world * B, ...) on every rank.

    Called in the optimizer's step, once for each shape of matrix, with the orthogonalized updates
    in the precision they were computed in: bf16 on a GPU, fp32 elsewhere. Shares are equally long.
    """
    if runtime.world == 1:
        return share
    whole = share.new_empty(runtime.world * len(share), *share.shape[1:])
    dist.all_gather_into_tensor(whole, share.contiguous())
    return whole


def from_main(value: float, runtime: Runtime) -> float:
    """The main rank's value, on every rank."""
    if runtime.world == 1:
        return value
    box = torch.tensor([value], dtype=torch.float64, device=runtime.device)
    dist.broadcast(box, src=0)
    return float(box.item())


def gather_objects(value: object, runtime: Runtime) -> list[object]:
    """Every rank's picklable value, in rank order, on every rank."""
    if runtime.world == 1:
        return [value]
    values: list[object] = [None] * runtime.world
    dist.all_gather_object(values, value)
    return values
