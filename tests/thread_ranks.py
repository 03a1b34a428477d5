"""Ranks without processes: threads that exchange what they send, or a rank that hears nobody."""

import copy
import threading
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from underpar.core.runtime import Runtime

T = TypeVar("T")
CPU = torch.device("cpu")


class Exchange:
    """Where the ranks of a job meet: what one sends, all get."""

    def __init__(self, world: int) -> None:
        self.barrier = threading.Barrier(world, timeout=60)
        self.sent: list[Any] = [None] * world

    def gather(self, value: Any, rank: int) -> list[Any]:
        self.sent[rank] = copy.deepcopy(value)
        self.barrier.wait()
        values = list(self.sent)
        # No rank sends again before all have read.
        self.barrier.wait()
        return values


class ThreadTransport:
    """The collectives of torch.distributed, for one rank of an exchange."""

    def __init__(self, exchange: Exchange, rank: int) -> None:
        self.exchange, self.rank = exchange, rank
        self.reduced: list[Tensor] = []
        self.gathered: list[list[Tensor]] = []

    def all_reduce(self, tensor: Tensor, op: Any) -> None:
        self.reduced.append(tensor.clone())
        shares = torch.stack(self.exchange.gather(tensor.detach(), self.rank))
        tensor.copy_(shares.amax(0) if op == dist.ReduceOp.MAX else shares.sum(0))

    def all_gather(self, tensor_list: list[Tensor], tensor: Tensor) -> None:
        self.gathered.append(self.exchange.gather(tensor.detach(), self.rank))
        for part, share in zip(tensor_list, self.gathered[-1], strict=True):
            part.copy_(share)

    def broadcast(self, tensor: Tensor, src: int) -> None:
        tensor.copy_(self.exchange.gather(tensor, self.rank)[src])

    def all_gather_object(self, object_list: list[Any], obj: object) -> None:
        object_list[:] = self.exchange.gather(obj, self.rank)

    def broadcast_object_list(self, object_list: list[Any], src: int) -> None:
        object_list[:] = self.exchange.gather(object_list, self.rank)[src]


class Unheard(ThreadTransport):
    """A rank alone with its share: sums stay what this rank has. `reduced` has what it sent."""

    def __init__(self) -> None:
        super().__init__(Exchange(1), 0)

    def all_reduce(self, tensor: Tensor, op: Any) -> None:
        self.reduced.append(tensor.clone())


class Broken(Unheard):
    """Breaks after some sums, as a test's stand-in for any error in the middle of the work."""

    def __init__(self, num_calls: int = 0) -> None:
        super().__init__()
        self.num_calls = num_calls

    def all_reduce(self, tensor: Tensor, op: Any) -> None:
        super().all_reduce(tensor, op)
        if len(self.reduced) > self.num_calls:
            raise ZeroDivisionError


def unheard(rank: int, world: int) -> Runtime:
    """One of `world` ranks, whose share a test adds up by hand."""
    return Runtime(CPU, rank, world, transport=Unheard())


class Ranks:
    """Threads as ranks, one job: make what each rank needs with its runtime, then run them."""

    def __init__(self, world: int = 2) -> None:
        self.exchange = Exchange(world)
        transports = [ThreadTransport(self.exchange, rank) for rank in range(world)]
        self.transports = transports
        self.runtimes = [Runtime(CPU, t.rank, world, transport=t) for t in transports]

    def go(self, calls: Sequence[Callable[[], T]]) -> list[T]:
        """What each rank's call returns; the first error of any, if there is one."""
        results: dict[int, T] = {}
        errors: list[Exception] = []

        def run(rank: int) -> None:
            try:
                results[rank] = calls[rank]()
            except Exception as error:
                errors.append(error)
                self.exchange.barrier.abort()

        threads = [threading.Thread(target=run, args=(rank,)) for rank in range(len(calls))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if errors:
            raise errors[0]
        return [results[rank] for rank in range(len(calls))]
