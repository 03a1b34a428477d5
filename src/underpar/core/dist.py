"""The few collectives used: what is reduced, and when. Here alone a lost rank is noticed.

Each step: gradients are summed over ranks after the last micro-batch, Muon's updates are gathered,
one message for all matrices of a shape, and the main rank's progress is sent to all, so that every
rank takes the same step with the same rates and stops together. A start: all ranks compare what
they train, and the main rank sends its checkpoint.
"""

from __future__ import annotations

import math
import re
import time
import uuid
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from underpar.core.runtime import Runtime
from underpar.errors import RunError

T = TypeVar("T")

# A single rank: nothing is sent, so its device does not matter.
ALONE = Runtime(torch.device("cpu"))

# Sockets tell of a dead process at once; this is for a node or a rank that hangs. It must outlast
# a rank that compiles while others need not (151 s for pr2014 on one GPU, longer on eight at once).
TIMEOUT = timedelta(minutes=10)

# Sent in place of a value: the main rank has failed.
FAILED = math.nan


@contextmanager
def process_group(runtime: Runtime) -> Iterator[None]:
    """Join the ranks that torchrun started, if there is more than one."""
    if runtime.world == 1:
        yield
        return
    # What ranks say about the run goes by host: no device is waited for, and where NCCL would hang
    # until the timeout, gloo fails as soon as a rank is gone.
    with _needs_all(runtime):
        store, rank, world = next(dist.rendezvous("env://", timeout=TIMEOUT))
        store = dist.PrefixStore(_meet(store, rank, world), store)
        backend = "cpu:gloo,cuda:nccl" if runtime.device.type == "cuda" else "gloo"
        dist.init_process_group(backend, store=store, rank=rank, world_size=world, timeout=TIMEOUT)
    yield
    # Not after an error: NCCL would first wait for messages that never come.
    dist.destroy_process_group()


def _meet(store: dist.Store, rank: int, world: int) -> str:
    """A name for this start of the job, known once every rank that is alive has agreed to it.

    torchrun keeps one store over its restarts, in which ranks would find the addresses of the dead
    (pytorch issue 167288); its count of restarts differs between nodes (pytorch issue 135712). So
    each process signs in under a new name, and all wait until they have read the same names.
    """
    own, deadline = uuid.uuid4().hex, time.monotonic() + TIMEOUT.total_seconds()
    store.set(f"name/{rank}", own)
    while time.monotonic() < deadline:
        names = [store.get(f"name/{other}").decode() for other in range(world)]
        start = " ".join(names)
        store.set(f"start/{own}", start)
        signed = [f"start/{name}" for name in names]
        if store.check(signed) and all(store.get(key).decode() == start for key in signed):
            return names[0]
        time.sleep(0.05)
    raise RuntimeError(f"not all of {world} ranks came within {TIMEOUT}")


@contextmanager
def _needs_all(runtime: Runtime) -> Iterator[None]:
    """A collective that fails inside means that a rank is gone."""
    try:
        yield
    except RuntimeError as error:
        # The first sentence, without the place in gloo's source.
        why = re.sub(r"\[\S+\.cc:\d+\] |\n.*|\. .*", "", str(error), flags=re.DOTALL)
        raise RunError(
            f"rank {runtime.rank} of {runtime.world} lost another one ({why}); start the same "
            "command again, training continues from its last checkpoint, or let torchrun "
            "--max-restarts 3 do that"
        ) from error


def sum_over_ranks(tensors: Iterable[Tensor], runtime: Runtime) -> None:
    """Replace each tensor by its sum over ranks, in one flat message."""
    _reduce(list(tensors), runtime, dist.ReduceOp.SUM)


def largest_over_ranks(tensors: Iterable[Tensor], runtime: Runtime) -> None:
    """Replace each tensor by its largest values over ranks, in one flat message."""
    _reduce(list(tensors), runtime, dist.ReduceOp.MAX)


def _reduce(parts: list[Tensor], runtime: Runtime, how: dist.ReduceOp.RedOpType) -> None:
    if runtime.world == 1:
        return
    flat = torch.cat([t.reshape(-1) for t in parts])
    with _needs_all(runtime):
        dist.all_reduce(flat, how)
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
    with _needs_all(runtime):
        dist.all_gather(list(whole.chunk(runtime.world)), share.contiguous())
    return whole


def from_main(value: float, runtime: Runtime) -> float:
    """The main rank's value, on every rank; an error where `may_fail` told of one instead."""
    if runtime.world == 1:
        return value
    box = torch.tensor([value], dtype=torch.float64)
    with _needs_all(runtime):
        dist.broadcast(box, src=0)
    if math.isnan(box.item()) and not runtime.is_main:
        raise RunError(f"rank {runtime.rank} stops: the main rank failed, and says why")
    return float(box.item())


@contextmanager
def may_fail(runtime: Runtime) -> Iterator[None]:
    """Work of the main rank whose failure ends the others, at their next `from_main`."""
    try:
        yield
    except Exception:
        if runtime.is_main:
            # Whatever else went wrong, the first error is the one to show.
            with suppress(RunError):
                from_main(FAILED, runtime)
        raise


def ask_main(work: Callable[[], T], runtime: Runtime) -> T:
    """What `work` returns on the main rank, which alone does it; its failure ends every rank."""
    if runtime.world == 1:
        return work()
    box: list[T | None] = [None]
    with may_fail(runtime):
        box[0] = work() if runtime.is_main else None
    from_main(0.0, runtime)
    with _needs_all(runtime):
        dist.broadcast_object_list(box, src=0)
    return box[0]  # type: ignore[return-value]


def gather_objects(value: object, runtime: Runtime) -> list[object]:
    """Every rank's picklable value, in rank order, on every rank."""
    if runtime.world == 1:
        return [value]
    values: list[object] = [None] * runtime.world
    with _needs_all(runtime):
        dist.all_gather_object(values, value)
    return values


def require_same(value: object, runtime: Runtime) -> None:
    """Refuse, on every rank, to go on where ranks differ in what they are about to do."""
    values = gather_objects(value, runtime)
    for rank, other in enumerate(values):
        if other != values[0]:
            raise RunError(
                f"rank {rank} has {other}, the main rank {values[0]}; give every node the same "
                "recipe, data and version"
            )


def require_on_main(path: Path, runtime: Runtime) -> None:
    """Refuse, on every rank, a file that others have and the main rank, which reads it, has not.

    A restart may make another node's rank the main one. It would begin anew.
    """
    here = gather_objects(path.exists(), runtime)
    if True in here and not here[0]:
        raise RunError(
            f"rank {here.index(True)} has {path}, the main rank has not: copy its folder to the "
            "main rank's node, or choose another --out"
        )
