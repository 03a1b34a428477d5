"""Every attention backend of an accelerator at real shapes. Runs where there is one."""

import numpy as np
import pytest
import torch
import torch._dynamo
from torch import Tensor

from underpar.data.batch import Segments, segments_from_starts
from underpar.kernels.attention import BACKENDS, attend, available, backend_of

pytestmark = pytest.mark.gpu

NUM_TOKENS = 98304
CONTEXT = 2048


def segments(seed: int, num_tokens: int = NUM_TOKENS) -> Segments:
    lengths = 1 + np.random.default_rng(seed).exponential(957, num_tokens).astype(np.int64)
    starts = np.cumsum(lengths)
    cut = segments_from_starts(starts[starts < num_tokens], num_tokens, CONTEXT, 64)
    return cut.to("cuda")


def draw(num_tokens: int = NUM_TOKENS) -> list[Tensor]:
    torch.manual_seed(0)
    shapes = [(num_tokens, heads, 64) for heads in (8, 4, 4)]
    return [torch.randn(s, device="cuda", dtype=torch.bfloat16, requires_grad=True) for s in shapes]


def results(tensors: list[Tensor], cut: Segments, window: int, backend: str) -> list[Tensor]:
    out = attend(*tensors, cut.cu, cut.max_len, window, backend)
    # The same gradient in any precision.
    torch.manual_seed(1)
    grad = torch.randn(out.shape, device="cuda", dtype=torch.bfloat16).to(out.dtype)
    return [out, *torch.autograd.grad(out, tensors, grad)]


def relative_error(got: Tensor, want: Tensor) -> float:
    return float((got.float() - want.float()).norm() / want.float().norm())


@pytest.mark.parametrize("name", list(BACKENDS))
@pytest.mark.parametrize("window", [0, 512])
def test_backends_agree_on_real_shapes(name: str, window: int) -> None:
    answer = available(torch.device("cuda"), torch.bfloat16)[name]
    if answer != "yes":
        pytest.skip(answer)
    # A length that no block divides.
    num_tokens = NUM_TOKENS - 37
    tensors, cut = draw(num_tokens), segments(0, num_tokens)
    exact = [t.detach().float().requires_grad_() for t in tensors]
    want = results(exact, cut, window, "reference")
    errors = [
        relative_error(a, b) for a, b in zip(results(tensors, cut, window, name), want, strict=True)
    ]
    # Forward, then gradients: what rounding to bf16 inside a kernel may cost.
    assert errors[0] < 4e-3
    assert max(errors[1:]) < 8e-3


def test_the_chosen_backend_computes_single_precision_elsewhere() -> None:
    half, single = (backend_of(torch.device("cuda", 0), d) for d in (torch.bfloat16, torch.float32))
    assert single == "sdpa"
    assert available(torch.device("cuda"), torch.bfloat16)[half] == "yes"


@pytest.mark.parametrize("window", [0, 512])
def test_new_boundaries_compile_nothing_anew_on_a_gpu(window: int) -> None:
    def layer(q: Tensor, k: Tensor, v: Tensor, cu: Tensor) -> Tensor:
        return attend(q * 2, k, v, cu, CONTEXT, window) + q

    torch._dynamo.reset()
    compiled = torch.compile(layer, fullgraph=True, dynamic=False)
    tensors = draw()
    equal = torch.arange(0, NUM_TOKENS + 1, CONTEXT, dtype=torch.int32, device="cuda")
    cuts = [segments(0).cu, segments(1).cu, equal]
    assert len({len(cu) for cu in cuts}) > 1
    with torch._dynamo.config.patch(error_on_recompile=True):
        for cu in cuts:
            torch._dynamo.mark_dynamic(cu, 0)
            out, expected = compiled(*tensors, cu), layer(*tensors, cu)
            assert relative_error(out, expected) < 4e-3
            for a, b in zip(
                torch.autograd.grad(out, tensors, out.detach()),
                torch.autograd.grad(expected, tensors, out.detach()),
                strict=True,
            ):
                assert relative_error(a, b) < 8e-3


@pytest.mark.parametrize("name", [name for name, backend in BACKENDS.items() if backend.recordable])
def test_a_recording_follows_its_boundaries(name: str) -> None:
    answer = available(torch.device("cuda"), torch.bfloat16)[name]
    if answer != "yes":
        pytest.skip(answer)
    tensors = [tensor.detach() for tensor in draw()]
    first, second = (segments(seed).cu for seed in (0, 1))
    num = max(len(first), len(second))
    # Equal ones at the end are empty pieces.
    cu, other = (
        torch.cat((bounds, bounds[-1:].expand(num - len(bounds)))) for bounds in (first, second)
    )
    before = attend(*tensors, cu, CONTEXT, 0, name)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = attend(*tensors, cu, CONTEXT, 0, name)
    cu.copy_(other)
    graph.replay()
    assert relative_error(out, attend(*tensors, other, CONTEXT, 0, name)) < 4e-3
    assert relative_error(out, before) > 4e-3
