"""Jobs on several processes, with their results in the order of the jobs."""

import multiprocessing
import os
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from typing import Any, TypeVar

from underpar.errors import DataError

Job = TypeVar("Job")
Result = TypeVar("Result")

# Jobs in flight per worker: one in work, one waiting, one being taken.
_AHEAD = 3
# Below so many bytes of text, starting processes takes longer than they save.
_WORTH_BYTES = 16_000_000


def workers_for(num_bytes: int) -> int:
    """One process per core for much text, this process alone for little."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return max(1, cores or 1) if num_bytes > _WORTH_BYTES else 1


def map_in_order(
    start: Callable[[], Callable[[Job], Result]], jobs: Iterable[Job], workers: int
) -> Iterator[tuple[Job, Result]]:
    """Every job with its result, in order, on `workers` processes (1: in this process).

    Each process calls `start` once and the function that it returns for every job. `start`, jobs
    and results are sent between processes.
    """
    if workers < 1:
        raise DataError(f"workers is {workers}, expected at least 1")
    if workers == 1:
        run = start()
        for job in jobs:
            yield job, run(job)
        return
    # Spawned processes: a fork of a process with threads may hang.
    context = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(workers, context, initializer=_start_worker, initargs=(start,))
    waiting: deque[tuple[Job, Future[Result]]] = deque()
    try:
        for job in jobs:
            waiting.append((job, pool.submit(_run_job, job)))
            if len(waiting) >= _AHEAD * workers:
                done, future = waiting.popleft()
                yield done, future.result()
        while waiting:
            done, future = waiting.popleft()
            yield done, future.result()
    finally:
        pool.shutdown(cancel_futures=True)


_run: Callable[[Any], Any] | None = None


def _start_worker(start: Callable[[], Callable[[Any], Any]]) -> None:
    global _run
    threading.Thread(target=_end_with_parent, daemon=True).start()
    _run = start()


def _end_with_parent() -> None:
    # A worker of a killed process would wait for its next job forever.
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def _run_job(job: Any) -> Any:
    assert _run is not None
    return _run(job)
