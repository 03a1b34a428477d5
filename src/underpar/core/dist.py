"""Communication between ranks; every error of a lost rank is raised here.

In each step, gradients are summed over ranks after the last micro-batch, Muon's updates are
gathered with one message per shape of matrix, and the main rank's progress is sent to all ranks:
all take the same step with the same learning rates, and stop together. At the start, all ranks
compare what they are about to train, and the main rank sends its checkpoint.
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
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from underpar.core.runtime import Runtime
from underpar.errors import RunError

T = TypeVar("T")

# A single rank. It sends nothing, so its device does not matter.
ALONE = Runtime(torch.device("cpu"))

# A dead process is noticed at once, because its sockets close. This limit is for a node or rank
# that hangs. It must be longer than one rank compiles while the others wait: 151 s for pr2014 on
# one GPU, more if eight ranks compile at once.
TIMEOUT = timedelta(minutes=10)

# The main rank sends this instead of a value when it has failed.
FAILED = math.nan


@contextmanager
def process_group(runtime: Runtime) -> Iterator[None]:
    """Inside, the ranks that torchrun started can communicate."""
    if runtime.world == 1:
        yield
        return
    # Messages about the run go through the host with gloo: they do not wait for a device, and gloo
    # fails as soon as a rank is gone, while NCCL hangs until the timeout.
    with _needs_all(runtime):
        store, rank, world = next(dist.rendezvous("env://", timeout=TIMEOUT))
        store = dist.PrefixStore(_meet(store, rank, world), store)
        backend = "cpu:gloo,cuda:nccl" if runtime.device.type == "cuda" else "gloo"
        dist.init_process_group(backend, store=store, rank=rank, world_size=world, timeout=TIMEOUT)
    yield
    # Only without an error: after one, NCCL would wait for messages that never come.
    dist.destroy_process_group()


def _meet(store: dist.Store, rank: int, world: int) -> str:
    """A name for this start of the job, on which all living ranks agree.

    torchrun keeps one store over its restarts, in which ranks would find the addresses of dead
    ranks (pytorch issue 167288), and its count of restarts differs between nodes (pytorch issue
    135712). So each process signs in under a new random name, and all wait until they have read
    the same list of names.
    """
    name, deadline = uuid.uuid4().hex, time.monotonic() + TIMEOUT.total_seconds()
    store.set(f"name/{rank}", name)
    while time.monotonic() < deadline:
        names = [store.get(f"name/{other}").decode() for other in range(world)]
        start = " ".join(names)
        store.set(f"start/{name}", start)
        signed = [f"start/{other}" for other in names]
        if store.check(signed) and all(store.get(key).decode() == start for key in signed):
            return names[0]
        time.sleep(0.05)
    raise RuntimeError(f"not all of {world} ranks came within {TIMEOUT}")


def _transport(runtime: Runtime) -> Any:
    return runtime.transport or dist


@contextmanager
def _needs_all(runtime: Runtime) -> Iterator[None]:
    """Turn a failed collective inside into a RunError that says what to do: a rank is gone."""
    try:
        yield
    except RuntimeError as error:
        # Keep the first sentence, without gloo's source file and line.
        why = re.sub(r"\[\S+\.cc:\d+\] |\n.*|\. .*", "", str(error), flags=re.DOTALL)
        raise RunError(
            f"rank {runtime.rank} of {runtime.world} lost another one ({why}); start the same "
            "command again, training continues from its last checkpoint, or let torchrun "
            "--max-restarts 3 do that"
        ) from error


def sum_over_ranks(tensors: Iterable[Tensor], runtime: Runtime) -> None:
    """Replace each tensor by its sum over ranks; all tensors travel in one message."""
    _reduce(list(tensors), runtime, dist.ReduceOp.SUM)


def largest_over_ranks(tensors: Iterable[Tensor], runtime: Runtime) -> None:
    """Replace each tensor by its element-wise maximum over ranks; one message."""
    _reduce(list(tensors), runtime, dist.ReduceOp.MAX)


def _reduce(parts: list[Tensor], runtime: Runtime, how: dist.ReduceOp.RedOpType) -> None:
    if runtime.world == 1:
        return
    flat = torch.cat([t.reshape(-1) for t in parts])
    with _needs_all(runtime):
        _transport(runtime).all_reduce(flat, how)
    for tensor, total in zip(parts, flat.split([t.numel() for t in parts]), strict=True):
        tensor.copy_(total.view_as(tensor))


def gather_shares(share: Tensor, runtime: Runtime) -> Tensor:
    """The shares (B, ...) of all ranks in rank order, as one (world * B, ...), on every rank.

    The optimizer's step calls this once per shape of matrix, with the orthogonalized updates in
    the precision of their computation: bf16 on a GPU, fp32 elsewhere. All shares have equal length.
    """
    if runtime.world == 1:
        return share
    whole = share.new_empty(runtime.world * len(share), *share.shape[1:])
    with _needs_all(runtime):
        _transport(runtime).all_gather(list(whole.chunk(runtime.world)), share.contiguous())
    return whole


def from_main(value: float, runtime: Runtime) -> float:
    """The main rank's value, on every rank; a RunError if the main rank failed in `may_fail`."""
    if runtime.world == 1:
        return value
    box = torch.tensor([value], dtype=torch.float64)
    with _needs_all(runtime):
        _transport(runtime).broadcast(box, src=0)
    if math.isnan(box.item()) and not runtime.is_main:
        raise RunError(f"rank {runtime.rank} stops: the main rank failed, and says why")
    return float(box.item())


@contextmanager
def may_fail(runtime: Runtime) -> Iterator[None]:
    """Inside, a failure of the main rank ends the other ranks too, at their next `from_main`."""
    try:
        yield
    except Exception:
        if runtime.is_main:
            # The error to show is the first one, not a failure to report it.
            with suppress(RunError):
                from_main(FAILED, runtime)
        raise


def ask_main(work: Callable[[], T], runtime: Runtime) -> T:
    """Do `work` on the main rank only; every rank gets its result, or ends if it fails."""
    if runtime.world == 1:
        return work()
    box: list[T | None] = [None]
    with may_fail(runtime):
        box[0] = work() if runtime.is_main else None
    from_main(0.0, runtime)
    with _needs_all(runtime):
        _transport(runtime).broadcast_object_list(box, src=0)
    return box[0]  # type: ignore[return-value]


def gather_objects(value: object, runtime: Runtime) -> list[object]:
    """The picklable values of all ranks in rank order, on every rank."""
    if runtime.world == 1:
        return [value]
    values: list[object] = [None] * runtime.world
    with _needs_all(runtime):
        _transport(runtime).all_gather_object(values, value)
    return values


def require_same(value: object, runtime: Runtime) -> None:
    """Raise an error on every rank if the ranks have different values."""
    values = gather_objects(value, runtime)
    for rank, other in enumerate(values):
        if other != values[0]:
            raise RunError(
                f"rank {rank} has {other}, the main rank {values[0]}; give every node the same "
                "recipe, data and version"
            )


def require_on_main(path: Path, runtime: Runtime) -> None:
    """Raise an error on every rank if only the main rank lacks a file, which it is about to read.

    After a restart the main rank may be on another node. Without the file it would start over.
    """
    here = gather_objects(path.exists(), runtime)
    if True in here and not here[0]:
        raise RunError(
            f"rank {here.index(True)} has {path}, the main rank has not: copy its folder to the "
            "main rank's node, or choose another --out"
        )
