"""Start-up while torch compiles: workers start on the side, threads take short turns, both end."""

import sys
import threading
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial

import pytest
import torch

from underpar.compile import startup as module
from underpar.compile.startup import end_warm_up, wait_for_workers, warm_compiler
from underpar.core.runtime import Runtime


@pytest.fixture
def workers(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Set once the compiler's workers were started; the process's own is left alone."""
    event = threading.Event()
    monkeypatch.setattr(module, "_workers_started", event)
    return event


@pytest.mark.usefixtures("workers")
def test_the_compiler_is_warmed_for_a_gpu_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[str | None] = []

    class Recorder:
        def __init__(self, target: object, name: str, daemon: bool) -> None:
            started.append(name if daemon else None)

        def start(self) -> None:
            started.append("started")

    turns: list[float] = []
    monkeypatch.setattr("underpar.compile.startup.threading.Thread", Recorder)
    monkeypatch.setattr("underpar.compile.startup.sys.setswitchinterval", turns.append)
    for device, compiled in (("cpu", True), ("cuda", False)):
        warm_compiler(Runtime(torch.device(device), compiled=compiled))
    assert not started and not turns
    warm_compiler(Runtime(torch.device("cuda"), compiled=True))
    assert started == ["warm compiler", "started"]
    # Threads beside the main one must not hold it up while it traces.
    assert len(turns) == 1 and 2 * turns[0] < sys.getswitchinterval()
    end_warm_up()
    assert turns[1:] == [sys.getswitchinterval()]


class AtOnce:
    """A thread whose work is done when it is started."""

    def __init__(self, target: Callable[[], None], **_: object) -> None:
        self.start = target


def test_nobody_waits_for_workers_that_are_not_to_start() -> None:
    wait_for_workers()


@pytest.mark.parametrize("fails", [False, True])
def test_others_wait_until_workers_were_started(
    monkeypatch: pytest.MonkeyPatch, workers: threading.Event, fails: bool
) -> None:
    seen: list[bool] = []

    def warm() -> None:
        seen.append(workers.is_set())
        if fails:
            raise RuntimeError("no workers")

    workers.set()
    monkeypatch.setattr("underpar.compile.startup.threading.Thread", AtOnce)
    monkeypatch.setattr("underpar.compile.startup.sys.setswitchinterval", lambda _: None)
    monkeypatch.setattr("torch._inductor.async_compile.maybe_warm_pool", warm)
    with pytest.raises(RuntimeError) if fails else nullcontext():
        warm_compiler(Runtime(torch.device("cuda"), compiled=True))
    assert seen == [False] and workers.is_set()


@pytest.mark.usefixtures("workers")
def test_the_assembler_is_chosen_before_keys_are_made(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    monkeypatch.setattr("underpar.compile.startup.threading.Thread", AtOnce)
    monkeypatch.setattr("underpar.compile.startup.sys.setswitchinterval", lambda _: None)
    for name, word in (
        ("torch._inductor.async_compile.maybe_warm_pool", "workers"),
        ("torch._inductor.runtime.compile_tasks._set_triton_ptxas_path", "assembler"),
        ("torch._inductor.codecache.CacheBase.get_system", "caches"),
        ("torch.utils._triton.triton_hash_with_backend", "kernels"),
    ):
        monkeypatch.setattr(name, partial(calls.append, word))
    warm_compiler(Runtime(torch.device("cuda"), compiled=True))
    # Keys are kept once they are made, and its version is part of them.
    assert calls == ["workers", "assembler", "caches", "kernels"]
