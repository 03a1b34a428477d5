"""Which backend attends: trials, refusals, the choice of the process."""

import threading
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from underpar.errors import UnderparError
from underpar.kernels.attention import (
    BACKENDS,
    attend,
    available,
    backend_of,
    choose,
    select,
    set_backend,
    set_backend_aside,
)
from underpar.kernels.attention.backend import Backend, Gradients, Pieces, Saved
from underpar.kernels.attention.reference import REFERENCE

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(select, "_choices", {})
    monkeypatch.setattr(select, "_wishes", {})
    select._probe.cache_clear()
    yield
    select._probe.cache_clear()


def add(monkeypatch: pytest.MonkeyPatch, backend: Backend) -> None:
    """A first backend that every device may try."""
    renamed = replace(backend, name="own")
    monkeypatch.setitem(BACKENDS, "own", renamed)
    monkeypatch.setattr(select, "BACKENDS", {"own": renamed} | BACKENDS)


def test_a_cpu_tries_no_kernel_of_a_gpu() -> None:
    answers = available(CPU, torch.float32)
    assert list(answers) == list(BACKENDS)
    assert answers["sdpa"] == answers["reference"] == "yes"
    for name in ("fa4", "fa3", "flash", "flex", "cudnn"):
        assert answers[name] == "runs on CUDA only"
    assert BACKENDS["flash"].refuse(torch.device("cuda:0"), torch.float32) == (
        "takes half precision only"
    )
    assert BACKENDS["flash"].refuse(torch.device("cuda:0"), torch.bfloat16) == ""


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_auto_on_a_cpu_is_sdpa_without_a_trial(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*args: object) -> str:
        raise AssertionError("tried")

    monkeypatch.setattr(select, "_try", fail)
    assert choose("auto", CPU, dtype) == backend_of(CPU, dtype) == "sdpa"


def test_a_backend_that_cannot_be_had_says_why_and_what_can() -> None:
    with pytest.raises(UnderparError) as caught:
        set_backend("fa4", CPU, torch.float32)
    line = str(caught.value)
    assert "'fa4'" in line and "runs on CUDA only" in line and "auto, sdpa, reference" in line
    assert "\n" not in line
    assert backend_of(CPU, torch.float32) == "sdpa"
    with pytest.raises(UnderparError, match=r"'fa5'.*fa4, fa3"):
        choose("fa5", CPU, torch.float32)


def test_a_choice_holds_for_its_precision_alone() -> None:
    assert set_backend("reference", CPU, torch.float32) == "reference"
    assert backend_of(CPU, torch.float32) == "reference"
    assert backend_of(CPU, torch.float64) == "sdpa"
    assert set_backend("auto", CPU, torch.float32) == backend_of(CPU, torch.float32) == "sdpa"


def test_the_operator_follows_the_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    called = []

    def forward(q: Tensor, k: Tensor, v: Tensor, pieces: Pieces) -> tuple[Tensor, Tensor]:
        called.append(len(q))
        return REFERENCE.forward(q, k, v, pieces)

    add(monkeypatch, replace(REFERENCE, forward=forward))
    assert set_backend("own", CPU, torch.float32) == "own"
    called.clear()
    x = torch.randn(3, 2, 64)
    attend(x, x, x, torch.tensor([0, 3], dtype=torch.int32), 3)
    assert called == [3]


def test_what_is_compiled_follows_a_later_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    called = []

    def forward(q: Tensor, k: Tensor, v: Tensor, pieces: Pieces) -> tuple[Tensor, Tensor]:
        called.append(len(q))
        return REFERENCE.forward(q, k, v, pieces)

    compiled = torch.compile(attend, fullgraph=True, backend="aot_eager")
    x, cu = torch.randn(3, 2, 64), torch.tensor([0, 3], dtype=torch.int32)
    before = compiled(x, x, x, cu, 3)
    add(monkeypatch, replace(REFERENCE, forward=forward))
    set_backend("own", CPU, torch.float32)
    called.clear()
    torch.testing.assert_close(compiled(x, x, x, cu, 3), before)
    assert called == [3]


def test_who_asks_during_a_trial_waits_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    trials, begun, go_on = [], threading.Event(), threading.Event()

    def forward(q: Tensor, k: Tensor, v: Tensor, pieces: Pieces) -> tuple[Tensor, Tensor]:
        trials.append(threading.current_thread().name)
        begun.set()
        assert go_on.wait(60)
        return REFERENCE.forward(q, k, v, pieces)

    add(monkeypatch, replace(REFERENCE, forward=forward))
    answers: list[str] = []

    def ask() -> None:
        answers.append(backend_of(CPU, torch.float32))

    threads = [threading.Thread(target=ask, name=str(number)) for number in range(3)]
    threads[0].start()
    assert begun.wait(60)
    for thread in threads[1:]:
        thread.start()
    threads[1].join(0.2)
    assert not answers
    go_on.set()
    for thread in threads:
        thread.join(60)
    assert (trials, answers) == (["0"], ["own"] * 3)


def test_a_choice_on_the_side_needs_no_thread_on_a_cpu() -> None:
    set_backend("reference", CPU, torch.float32)
    num_threads = threading.active_count()
    set_backend_aside(CPU, torch.float32)
    assert threading.active_count() == num_threads
    assert backend_of(CPU, torch.float32) == "sdpa"


def test_a_choice_on_the_side_waits_for_what_is_first(monkeypatch: pytest.MonkeyPatch) -> None:
    go_on, chosen = threading.Event(), threading.Event()
    monkeypatch.setattr("torch.cuda.device", lambda _: nullcontext())
    monkeypatch.setattr(select, "set_backend", lambda *_: chosen.set())

    def wait() -> None:
        go_on.wait(60)

    set_backend_aside(torch.device("cuda", 0), torch.bfloat16, wait)
    assert not chosen.wait(0.2)
    go_on.set()
    assert chosen.wait(60)


@pytest.mark.parametrize(
    "error", [ImportError("no module"), RuntimeError("no kernel\nand a long story"), TypeError("?")]
)
def test_a_failing_backend_is_passed_over(
    error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    def forward(*args: object) -> tuple[Tensor, Tensor]:
        raise error

    add(monkeypatch, replace(REFERENCE, forward=forward))
    first = str(error).split("\n")[0]
    assert available(CPU, torch.float32)["own"] == f"{type(error).__name__}: {first}"
    assert choose("auto", CPU, torch.float32) == "sdpa"


def test_auto_does_not_try_what_must_be_named(monkeypatch: pytest.MonkeyPatch) -> None:
    add(monkeypatch, replace(REFERENCE, by_name=True))
    assert choose("auto", CPU, torch.float32) == "sdpa"
    assert choose("own", CPU, torch.float32) == "own"
    add(monkeypatch, REFERENCE)
    assert choose("auto", CPU, torch.float32) == "own"


def test_windows_are_tried_only_where_they_are_wanted(monkeypatch: pytest.MonkeyPatch) -> None:
    add(monkeypatch, replace(REFERENCE, forward=farther))
    assert set_backend("own", CPU, torch.float32) == backend_of(CPU, torch.float32) == "own"
    with pytest.raises(UnderparError, match="wrong results"):
        backend_of(CPU, torch.float32, windowed=True)
    assert set_backend("auto", CPU, torch.float32) == "own"
    assert backend_of(CPU, torch.float32, windowed=True) == "sdpa"


def test_a_head_that_a_backend_does_not_know_has_another(monkeypatch: pytest.MonkeyPatch) -> None:
    def forward(q: Tensor, k: Tensor, v: Tensor, pieces: Pieces) -> tuple[Tensor, Tensor]:
        if q.size(-1) != 64:
            raise RuntimeError("no kernel for this width")
        return REFERENCE.forward(q, k, v, pieces)

    add(monkeypatch, replace(REFERENCE, forward=forward))
    assert set_backend("auto", CPU, torch.float32) == "own"
    assert backend_of(CPU, torch.float32, head_dim=32) == "sdpa"
    x, cu = torch.randn(3, 2, 32), torch.tensor([0, 3], dtype=torch.int32)
    torch.testing.assert_close(attend(x, x, x, cu, 3), attend(x, x, x, cu, 3, backend="reference"))
    assert backend_of(CPU, torch.float32) == "own"


def test_a_bug_is_not_taken_for_a_missing_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    def forward(*args: object) -> tuple[Tensor, Tensor]:
        raise ZeroDivisionError

    add(monkeypatch, replace(REFERENCE, forward=forward))
    with pytest.raises(ZeroDivisionError):
        available(CPU, torch.float32)


def farther(q: Tensor, k: Tensor, v: Tensor, pieces: Pieces) -> tuple[Tensor, Tensor]:
    wider = pieces.window + 1 if pieces.window else 0
    return REFERENCE.forward(q, k, v, replace(pieces, window=wider))


def ungrouped(q: Tensor, k: Tensor, v: Tensor, pieces: Pieces) -> tuple[Tensor, Tensor]:
    return REFERENCE.forward(q, k.flip(1), v, pieces)


def joined(q: Tensor, k: Tensor, v: Tensor, pieces: Pieces) -> tuple[Tensor, Tensor]:
    return REFERENCE.forward(q, k, v, replace(pieces, cu=pieces.cu[[0, -1]]))


def halved(grad: Tensor, saved: Saved, pieces: Pieces) -> Gradients:
    dq, dk, dv = REFERENCE.backward(grad, saved, pieces)
    return dq, dk, dv / 2


def nothing(grad: Tensor, saved: Saved, pieces: Pieces) -> Gradients:
    dq, dk, dv = REFERENCE.backward(grad, saved, pieces)
    return dq * float("nan"), dk, dv


@pytest.mark.parametrize(
    "wrong",
    [
        replace(REFERENCE, forward=farther),
        replace(REFERENCE, forward=ungrouped),
        replace(REFERENCE, forward=joined),
        replace(REFERENCE, backward=halved),
        replace(REFERENCE, backward=nothing),
    ],
    ids=["window", "heads", "pieces", "gradient", "nan"],
)
def test_a_backend_with_wrong_results_is_refused(
    wrong: Backend, monkeypatch: pytest.MonkeyPatch
) -> None:
    add(monkeypatch, wrong)
    assert available(CPU, torch.float32)["own"].startswith("wrong results")
    with pytest.raises(UnderparError, match=r"'own' does not work on cpu.*wrong results"):
        choose("own", CPU, torch.float32, windowed=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_trial_works_in_any_mode_and_leaves_no_trace(dtype: torch.dtype) -> None:
    state = torch.get_rng_state()
    with torch.inference_mode(), torch.autocast("cpu", dtype=torch.bfloat16):
        assert available(CPU, dtype)["sdpa"] == "yes"
    assert torch.equal(torch.get_rng_state(), state)
