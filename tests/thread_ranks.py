"""Two threads as ranks, for tests of scoring that need no processes."""

import copy
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from lane_runs import Run
from lever_stacks import CPU
from underpar.core.runtime import Runtime


class Ranks:
    """Two threads as ranks: what one sends, both get."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.barrier = threading.Barrier(2, timeout=60)
        self.sent: list[Any] = [None, None]
        for module in ("score.ttt.scorer", "score.partial"):
            monkeypatch.setattr(f"underpar.{module}.gather_objects", self.gather)
        for module in ("score.method", "score.partial"):
            monkeypatch.setattr(f"underpar.{module}.from_main", self.from_main)
        monkeypatch.setattr("underpar.infer.sgd.sum_over_ranks", self.add)

    def gather(self, value: Any, runtime: Runtime) -> list[Any]:
        if runtime.world == 1:
            return [value]
        self.sent[runtime.rank] = copy.deepcopy(value)
        self.barrier.wait()
        values = list(self.sent)
        self.barrier.wait()
        return values

    def from_main(self, value: float, runtime: Runtime) -> float:
        return float(self.gather(value, runtime)[0])

    def add(self, tensors: list[Tensor], runtime: Runtime) -> None:
        shares = self.gather([t.clone() for t in tensors], runtime)
        for tensor, *parts in zip(tensors, *shares, strict=True):
            tensor.copy_(torch.stack(parts).sum(0))

    def go(self, make: Callable[[Runtime], Run]) -> list[Run]:
        runs = [make(Runtime(CPU, rank, 2)) for rank in range(2)]
        errors: list[Exception] = []

        def work(run: Run) -> None:
            try:
                run.go()
            except Exception as error:
                errors.append(error)
                self.barrier.abort()

        threads = [threading.Thread(target=work, args=(run,)) for run in runs]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if errors:
            raise errors[0]
        return runs
