"""Runtime: the CPU guard, kept bytecode and kernels, devices, seeds, ages, a clock that adds up."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from underpar import cli
from underpar.build.levers import resolve_levers
from underpar.core import runtime as module
from underpar.core.run_folder import RunFolder
from underpar.core.runtime import (
    Clock,
    Runtime,
    is_machine_busy,
    keep_bytecode,
    keep_kernels,
    open_runtime,
    process_age_seconds,
    seed_everything,
)
from underpar.errors import UnderparError
from underpar.model.network import EAGER
from underpar.recipe import load_recipe
from underpar.stages.train import train
from underpar.train import loop
from watcher import Watcher

KEPT = "FLASH_ATTENTION_CUTE_DSL_CACHE_"


def test_the_guard_is_set_on_import() -> None:
    environment = {k: v for k, v in os.environ.items() if k != "ONEDNN_MAX_CPU_ISA"}
    code = (
        "import underpar, torch, os; a = torch.ones(64, 64, dtype=torch.bfloat16);"
        "print(os.environ['ONEDNN_MAX_CPU_ISA'], float((a @ a)[0, 0]))"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True
    )
    assert result.stdout.split() == ["AVX512_CORE", "64.0"]


def test_a_machine_is_busy_if_others_need_the_cores(tmp_path: Path) -> None:
    load, num_cpus = tmp_path / "loadavg", os.cpu_count() or 1
    # This process is one of those that run.
    for num_others, busy in ((0, False), (num_cpus, True), (4 * num_cpus, True)):
        load.write_text(f"0.20 0.18 0.12 {1 + num_others}/80 11206\n")
        assert is_machine_busy(load) is busy
    for unknown in ("", "0.20 0.18", "a b c d/e f"):
        load.write_text(unknown)
        assert is_machine_busy(load) is False
    assert is_machine_busy(tmp_path / "missing") is False


def test_a_setting_of_the_user_decides_how_threads_wait() -> None:
    code = (
        "import underpar, os; print(os.environ['GOMP_SPINCOUNT'], 'OMP_WAIT_POLICY' in os.environ)"
    )
    kept = {k: v for k, v in os.environ.items() if k != "OMP_WAIT_POLICY"}
    result = subprocess.run(
        [sys.executable, "-c", code],
        env={**kept, "GOMP_SPINCOUNT": "7"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert result.stdout.split() == ["7", "False"]


QUIET = {"PYTHONDONTWRITEBYTECODE": "1"}
OWN = "home/.cache/underpar/bytecode"


def bytecode_of_torch(folder: Path, module_name: str = "torch", **said: str) -> list[str]:
    """Where a process that this one starts keeps the bytecode of a small `torch`."""
    package = folder / "packages" / "torch"
    package.mkdir(parents=True, exist_ok=True)
    for name in ("__init__", "compiler"):
        (package / f"{name}.py").touch()
    code = (
        "import subprocess, sys; from underpar.core.runtime import keep_bytecode; keep_bytecode();"
        f"subprocess.run([sys.executable, '-c', 'import {module_name}'], check=True)"
    )
    unset = ("PYTHONDONTWRITEBYTECODE", "PYTHONPYCACHEPREFIX")
    environment = {name: value for name, value in os.environ.items() if name not in unset}
    source = str(Path(module.__file__).parents[2])
    paths = os.pathsep.join((str(folder / "packages"), source))
    environment |= {"HOME": str(folder / "home"), "PYTHONPATH": paths} | said
    subprocess.run([sys.executable, "-c", code], env=environment, check=True)
    bytecode = folder.glob("**/torch/**/*.pyc")
    return sorted(str(path.relative_to(folder)) for path in bytecode)


def test_bytecode_is_kept_at_home_where_none_may_be_written(tmp_path: Path) -> None:
    (kept,) = bytecode_of_torch(tmp_path, **QUIET)
    assert kept.startswith(OWN)
    # The next start finds it.
    assert bytecode_of_torch(tmp_path, **QUIET) == [kept]


def test_bytecode_goes_where_python_was_told(tmp_path: Path) -> None:
    said = QUIET | {"PYTHONPYCACHEPREFIX": str(tmp_path / "mine")}
    (kept,) = bytecode_of_torch(tmp_path, **said)
    assert kept.startswith("mine")
    # A later start needs more of torch than the first one did.
    both = bytecode_of_torch(tmp_path, "torch.compiler", **said)
    assert len(both) == 2 and all(path.startswith("mine") for path in both)


def test_bytecode_beside_its_source_is_left_alone(tmp_path: Path) -> None:
    (beside,) = bytecode_of_torch(tmp_path)
    assert beside.startswith("packages/torch/__pycache__")
    assert bytecode_of_torch(tmp_path, **QUIET) == [beside]


@pytest.mark.parametrize("writable", [True, False])
def test_packages_that_may_not_be_written_to(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, writable: bool
) -> None:
    for name in ("PYTHONPYCACHEPREFIX", "PYTHONDONTWRITEBYTECODE"):
        # Set first, as below: what was not there before is removed again.
        monkeypatch.setenv(name, "")
    monkeypatch.setattr(Path, "home", lambda: tmp_path)
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    monkeypatch.setattr(sys, "pycache_prefix", None)
    source = SimpleNamespace(origin=str(tmp_path / "torch" / "__init__.py"))
    monkeypatch.setattr("importlib.util.find_spec", lambda name: source)
    monkeypatch.setattr(os, "access", lambda path, mode: writable)
    keep_bytecode()
    expected = None if writable else str(tmp_path / ".cache" / "underpar" / "bytecode")
    assert sys.pycache_prefix == expected


def test_the_command_line_keeps_bytecode(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    monkeypatch.setattr(cli, "keep_bytecode", partial(calls.append, "kept"))
    monkeypatch.setattr(cli, "app", partial(calls.append, "verb"))
    cli.main()
    # Verbs import torch.
    assert calls == ["kept", "verb"]


@pytest.fixture
def clean_environment(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """Without the variables of `keep_kernels`, and left as it was found."""
    for name in ("ENABLED", "DIR"):
        # Set first: what was not there before is removed again after the test.
        monkeypatch.setenv(KEPT + name, "")
        monkeypatch.delenv(KEPT + name)
    return monkeypatch


def test_kernels_are_kept_at_home(clean_environment: pytest.MonkeyPatch, tmp_path: Path) -> None:
    clean_environment.setattr(Path, "home", lambda: tmp_path)
    keep_kernels()
    assert os.environ[KEPT + "ENABLED"] == "1"
    folder = Path(os.environ[KEPT + "DIR"])
    assert folder.is_relative_to(tmp_path) and folder != tmp_path
    assert "underpar" in folder.parts


@pytest.mark.parametrize("name", ["ENABLED", "DIR"])
def test_where_kernels_go_may_be_said(clean_environment: pytest.MonkeyPatch, name: str) -> None:
    clean_environment.setenv(KEPT + name, "0")
    keep_kernels()
    assert os.environ[KEPT + name] == "0"
    assert all(os.environ[KEPT + other] for other in ("ENABLED", "DIR"))


def test_a_cpu_keeps_no_kernels(clean_environment: pytest.MonkeyPatch) -> None:
    open_runtime("cpu")
    assert not any(name.startswith(KEPT) for name in os.environ)


def test_an_unknown_device_is_refused_with_the_choices() -> None:
    with pytest.raises(UnderparError, match=r"'tpu'.*cpu"):
        open_runtime("tpu")


def test_ranks_come_from_torchrun(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setenv("WORLD_SIZE", "4")
    runtime = open_runtime("cpu")
    assert (runtime.rank, runtime.world, runtime.is_main) == (3, 4, False)


def test_seeds_repeat() -> None:
    seed_everything(5)
    first = torch.rand(3)
    seed_everything(5)
    assert torch.equal(first, torch.rand(3))


def test_the_age_of_a_process_is_read_from_the_system(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    # Fields 1 to 22 of proc(5), with a name that looks like fields, then more.
    before = " ".join(str(number) for number in range(4, 22))
    stat = tmp_path / "stat"
    stat.write_text(f"7 (a) S 1 (b) R {before} 12345 99 98\n")
    monkeypatch.setattr(module, "_STAT", stat)
    monkeypatch.setattr(os, "sysconf", {"SC_CLK_TCK": 100}.__getitem__)
    monkeypatch.setattr(time, "clock_gettime", {time.CLOCK_BOOTTIME: 200.0}.__getitem__)
    assert process_age_seconds() == pytest.approx(200.0 - 123.45)


def test_elsewhere_a_process_is_as_old_as_the_import(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(module, "_STAT", tmp_path / "none")
    monkeypatch.setattr(module, "_IMPORTED", 2.5)
    monkeypatch.setattr(time, "perf_counter", lambda: 10.0)
    assert process_age_seconds() == 7.5


def test_a_run_says_what_each_of_its_starts_took(
    tiny_data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    age = [3.0]
    monkeypatch.setattr(loop, "process_age_seconds", lambda: age[0])
    monkeypatch.setattr(loop, "TracedRun", lambda rewrites: EAGER)

    def warm_up(*_: object) -> None:
        age[0] += 40.0

    monkeypatch.setattr(loop, "warm_up", warm_up)
    sets = ["train.budget_steps=3", "model.num_layers=1", "train.micro_batch_tokens=128"]
    recipe, folder = resolve_levers(load_recipe("baseline+cpu", sets)), RunFolder(tmp_path)
    compiled = Runtime(torch.device("cpu"), compiled=True)

    class StopAtStepTwo(Watcher):
        def update(self, completed: float, remark: str = "") -> None:
            if remark.startswith("step 2,"):
                signal.raise_signal(signal.SIGTERM)

        @contextmanager
        def task(self, name: str, total: float) -> Iterator[Any]:
            yield self

    assert not train(recipe, tiny_data, folder, compiled, StopAtStepTwo())["finished"]
    age[0] = 5.0
    summary = train(recipe, tiny_data, folder, Runtime(torch.device("cpu")))
    # The first start compiled before its clock began, the second had nothing to compile.
    assert [line["start_seconds"] for line in folder.metrics()] == [43.0, 43.0, 5.0]
    assert summary["start_seconds"] == 5.0


def test_every_second_has_a_name() -> None:
    before = time.perf_counter()
    clock = Clock("start")
    with clock.phase("a"), clock.phase("b"):
        time.sleep(0.01)
    with pytest.raises(KeyError), clock.phase("a"):
        raise KeyError
    seconds = clock.read()
    after = time.perf_counter()
    assert set(seconds) == {"start", "a", "b"}
    assert seconds["b"] >= 0.01
    assert sum(seconds.values()) <= after - before
