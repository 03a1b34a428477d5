"""The operator: every backend that a CPU has, autograd, compilers, modes."""

import shutil
from collections.abc import Callable, Iterator
from itertools import accumulate
from typing import Any

import pytest
import torch
import torch._dynamo
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from underpar.errors import UnderparError
from underpar.kernels.attention import attend, available, select

BACKENDS = [n for n, text in available(torch.device("cpu"), torch.float32).items() if text == "yes"]
LENGTHS = [5, 0, 33, 1, 70, 0]
INDUCTOR = (
    pytest.mark.slow,
    pytest.mark.skipif(shutil.which("g++") is None, reason="needs a C++ compiler"),
)


def cuts(lengths: list[int]) -> Tensor:
    return torch.tensor([0, *accumulate(lengths)], dtype=torch.int32)


def draw(
    lengths: list[int], heads: tuple[int, int] = (4, 2), dtype: torch.dtype = torch.float32
) -> list[Tensor]:
    torch.manual_seed(sum(lengths))
    sizes = (heads[0], heads[1], heads[1])
    return [torch.randn(sum(lengths), h, 8, dtype=dtype, requires_grad=True) for h in sizes]


def results(
    tensors: list[Tensor], cu: Tensor, window: int, backend: str
) -> tuple[Tensor, tuple[Tensor, ...]]:
    out = attend(*tensors, cu, len(tensors[0]), window, backend)
    weights = torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view_as(out)
    return out, torch.autograd.grad(out, tensors, weights)


def test_a_cpu_has_two_backends() -> None:
    assert BACKENDS == ["sdpa", "reference"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@settings(max_examples=25, deadline=None)
@given(
    st.lists(st.integers(0, 70), min_size=1, max_size=5).filter(any),
    st.sampled_from([(2, 2), (4, 2), (4, 1)]),
    st.sampled_from([0, 1, 2, 31, 69, 200]),
)
def test_backends_agree_forward_and_backward(
    dtype: torch.dtype, lengths: list[int], heads: tuple[int, int], window: int
) -> None:
    tensors, cu = draw(lengths, heads, dtype), cuts(lengths)
    out, gradients = results(tensors, cu, window, "reference")
    for backend in BACKENDS:
        other, others = results(tensors, cu, window, backend)
        torch.testing.assert_close(other, out, rtol=1e-4, atol=1e-5)
        for a, b in zip(others, gradients, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("backend", BACKENDS)
@settings(max_examples=15, deadline=None)
@given(
    st.lists(st.integers(1, 40), min_size=1, max_size=4),
    st.integers(0, 4),
    st.integers(1, 64),
    st.sampled_from([0, 3]),
)
def test_empty_pieces_change_nothing(
    backend: str, lengths: list[int], place: int, num_empty: int, window: int
) -> None:
    tensors = draw(lengths)
    padded = lengths[:place] + [0] * num_empty + lengths[place:]
    out, gradients = results(tensors, cuts(lengths), window, backend)
    other, others = results(tensors, cuts(padded), window, backend)
    assert torch.equal(out, other)
    assert all(torch.equal(a, b) for a, b in zip(gradients, others, strict=True))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("window", [0, 3])
def test_a_query_sees_its_piece_up_to_itself_within_the_window(backend: str, window: int) -> None:
    lengths, token = [9, 12, 40], 24
    q, k, v = draw(lengths, dtype=torch.float64)
    out = attend(q, k, v, cuts(lengths), 40, window, backend)
    dk, dv = torch.autograd.grad(out[token].sum(), (k, v))
    first = token - window if window else 21
    seen = [i for i in range(61) if dv[i].any()]
    assert seen == list(range(max(21, first), token + 1))
    assert [i for i in range(61) if dk[i].any()] == seen


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("window", [0, 2])
def test_gradients_are_those_of_the_forward_pass(backend: str, window: int) -> None:
    lengths = [3, 0, 5, 1]
    tensors, cu = draw(lengths, dtype=torch.float64), cuts(lengths)
    torch.autograd.gradcheck(lambda *t: attend(*t, cu, 5, window, backend), tensors)


@pytest.mark.parametrize("backend", BACKENDS)
def test_strided_inputs_and_an_expanded_gradient(backend: str) -> None:
    torch.manual_seed(0)
    packed = torch.randn(20, 4 * 6, requires_grad=True)
    cu = cuts([8, 12])

    def run(copy: bool) -> tuple[Tensor, Tensor]:
        parts = packed.split((12, 6, 6), dim=1)
        q, k, v = (p.unflatten(1, (-1, 6)) for p in parts)
        if copy:
            q, k, v = (t.contiguous() for t in (q, k, v))
        out = attend(q, k, v, cu, 12, backend=backend)
        assert out.is_contiguous()
        return out, torch.autograd.grad(out.sum(), packed)[0]

    for a, b in zip(run(copy=False), run(copy=True), strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_operator_is_well_registered(backend: str) -> None:
    q, k, v = draw([5, 0, 9])
    cu = cuts([5, 0, 9])
    forward = torch.ops.underpar.attend.default
    torch.library.opcheck(forward, (q, k, v, cu, 9, 0, backend))
    with torch.no_grad():
        saved = [q, k, v, *forward(q, k, v, cu, 9, 4, backend)]
        plain = [t.detach() for t in saved]
    arguments = (torch.ones_like(q), plain, cu, 9, 4, backend)
    torch.library.opcheck(torch.ops.underpar.attend_backward.default, arguments)


@pytest.fixture
def fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    with torch._dynamo.config.patch(error_on_recompile=True):
        yield


def layer(q: Tensor, k: Tensor, v: Tensor, cu: Tensor) -> Tensor:
    return attend(q * 2, k, v, cu, 70, 4) + q


@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize("compiler", ["aot_eager", pytest.param("inductor", marks=INDUCTOR)])
def test_new_boundaries_compile_nothing_anew(compiler: str) -> None:
    compiled = torch.compile(layer, fullgraph=True, dynamic=False, backend=compiler)
    tensors = draw(LENGTHS)
    for lengths in (LENGTHS, [109], [60, 49], [1] * 109):
        cu = cuts(lengths)
        torch._dynamo.mark_dynamic(cu, 0)
        out, expected = compiled(*tensors, cu), layer(*tensors, cu)
        torch.testing.assert_close(out, expected)
        for a, b in zip(
            torch.autograd.grad(out.square().sum(), tensors),
            torch.autograd.grad(expected.square().sum(), tensors),
            strict=True,
        ):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


@pytest.mark.usefixtures("fresh_compiler")
def test_the_choice_may_be_made_while_tracing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(select, "_choices", {})
    select._probe.cache_clear()
    # A trial, as on a GPU, and not the answer that a CPU gives without one.
    monkeypatch.setattr(select, "BACKENDS", {"reference": select.REFERENCE})
    compiled = torch.compile(layer, fullgraph=True, dynamic=False, backend="aot_eager")
    tensors, cu = draw(LENGTHS), cuts(LENGTHS)
    with torch.no_grad():
        out = compiled(*tensors, cu)
    assert set(select._choices.values()) == {"reference"}
    torch.testing.assert_close(out, layer(*tensors, cu))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_it_runs_where_nothing_is_trained(backend: str, mode: Callable[[], Any]) -> None:
    tensors = draw(LENGTHS)
    expected = attend(*tensors, cuts(LENGTHS), 70, backend=backend)
    with mode():
        cu = cuts(LENGTHS)
        out = attend(*tensors, cu, 70, backend=backend)
        assert torch.equal(out, expected) and not out.requires_grad
        cu[1] += 1
        assert not torch.equal(attend(*tensors, cu, 70, backend=backend), expected)


@pytest.mark.parametrize("backend", BACKENDS)
def test_autocast_does_not_reach_into_the_operator(backend: str) -> None:
    tensors, cu = draw(LENGTHS), cuts(LENGTHS)
    out, gradients = results(tensors, cu, 3, backend)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        other, others = results(tensors, cu, 3, backend)
    assert torch.equal(out, other)
    assert all(torch.equal(a, b) for a, b in zip(gradients, others, strict=True))


def test_shapes_are_known_without_computing() -> None:
    tensors = [t.detach().to("meta") for t in draw(LENGTHS)]
    out = attend(*tensors, cuts(LENGTHS).to("meta"), 70)
    assert out.shape == tensors[0].shape and out.device.type == "meta"


def test_a_backend_that_does_not_exist_is_named() -> None:
    with pytest.raises(UnderparError, match="'flsh'"):
        attend(*draw([3]), cuts([3]), 3, backend="flsh")
