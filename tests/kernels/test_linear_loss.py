"""Head and loss without logits: the loss of all logits, from torch and from tiles alike."""

import importlib.util
from collections.abc import Iterator
from concurrent.futures import Executor, ProcessPoolExecutor
from multiprocessing import get_context

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from underpar.kernels.capped import SAFE_CAP
from underpar.kernels.linear_loss import linear_loss, op, reference, refuse

TRITON = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs triton")
SHAPES = [(1, 4, 2, 8192), (37, 16, 50, 10), (20, 8, 64, 10), (9, 8, 1025, 4)]


def draw(tokens: int, dim: int, words: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Hidden states, weight, targets; some logits are far beyond the cap."""
    source = torch.Generator().manual_seed(tokens)
    x, weight = (torch.randn(n, dim, generator=source, dtype=dtype) for n in (tokens, words))
    weight[0] *= 40.0
    return x.requires_grad_(), weight.requires_grad_(), torch.arange(tokens) * 7 % words


def plain(x: Tensor, weight: Tensor, targets: Tensor, cap: float) -> Tensor:
    return F.cross_entropy(cap * torch.tanh(F.linear(x, weight) / cap), targets)


def results(loss: Tensor, *inputs: Tensor) -> tuple[Tensor, ...]:
    """The loss, and gradients with an upstream that is not 1."""
    return loss.detach(), *torch.autograd.grad(3.0 * loss, inputs)


@pytest.mark.parametrize("cap", [5.0, 30.0, SAFE_CAP])
@pytest.mark.parametrize(("tokens", "dim", "words", "rows"), SHAPES)
def test_the_loss_is_that_of_all_logits(
    tokens: int, dim: int, words: int, rows: int, cap: float
) -> None:
    x, weight, targets = draw(tokens, dim, words, torch.float64)
    wanted = results(plain(x, weight, targets, cap), x, weight)
    got = results(linear_loss(x, weight, targets, cap, rows), x, weight)
    # Nats of chunks are kept in fp32.
    torch.testing.assert_close(got[0].double(), wanted[0], rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(got[1], wanted[1], rtol=1e-9, atol=1e-12)
    # Sums over chunks are kept in fp32.
    torch.testing.assert_close(got[2], wanted[2], rtol=1e-5, atol=1e-6)


def run_tiles(
    logits: np.ndarray, targets: np.ndarray, cap: float, share: float
) -> list[np.ndarray]:
    """What the kernel makes of logits: nats and gradients."""
    from underpar.kernels.linear_loss import tiles

    held, nats = torch.from_numpy(logits), torch.zeros(len(logits))
    tiles.turn_into_gradients(held, torch.from_numpy(targets), nats, cap, share)
    return [nats.numpy(), held.numpy()]


def run_all(*arrays: np.ndarray) -> list[np.ndarray]:
    """What the operator makes of x, weight and targets if its passes are those of the kernel."""
    from underpar.kernels.linear_loss import tiles

    op._backend = lambda x: tiles
    x, weight, targets = map(torch.from_numpy, arrays)
    x, weight = x.requires_grad_(), weight.requires_grad_()
    loss = linear_loss(x, weight, targets, 30.0, 10)
    return [t.numpy() for t in results(loss, x, weight)]


@pytest.fixture(scope="module")
def interpreter() -> Iterator[Executor]:
    """A process of its own: the interpreter must be there before Triton is."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_INTERPRET", "1")
        patch.setenv("OMP_NUM_THREADS", "1")
        with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
            pool.submit(importlib.import_module, "triton").exception()
            yield pool


@TRITON
@settings(max_examples=10, deadline=None)
@given(
    rows=st.integers(1, 5),
    words=st.sampled_from([1, 2, 31, 64, 100, 513, 1025]),
    cap=st.floats(1.0, SAFE_CAP),
    spread=st.sampled_from([0.1, 5.0, 200.0]),
)
def test_tiles_compute_as_the_reference_does(
    interpreter: Executor, rows: int, words: int, cap: float, spread: float
) -> None:
    source = torch.Generator().manual_seed(rows * words)
    logits = spread * torch.randn(rows, words, generator=source)
    targets = torch.randint(words, (rows,), generator=source)
    arrays = logits.clone().numpy(), targets.numpy()
    nats, gradients = interpreter.submit(run_tiles, *arrays, cap, 0.25).result()
    wanted = torch.zeros(rows)
    reference.turn_into_gradients(logits, targets, wanted, cap, 0.25)
    torch.testing.assert_close(torch.from_numpy(nats), wanted, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(torch.from_numpy(gradients), logits, rtol=1e-4, atol=1e-6)


@TRITON
@pytest.mark.parametrize(("tokens", "dim", "words", "rows"), SHAPES[1:3])
def test_the_operator_of_tiles_is_the_loss(
    interpreter: Executor, tokens: int, dim: int, words: int, rows: int
) -> None:
    x, weight, targets = draw(tokens, dim, words, torch.float32)
    arrays = [t.detach().numpy() for t in (x, weight, targets)]
    got = map(torch.from_numpy, interpreter.submit(run_all, *arrays).result())
    exact = [t.detach().double().requires_grad_() for t in (x, weight)]
    wanted = results(plain(*exact, targets, 30.0), *exact)
    for ours, theirs in zip(got, wanted, strict=True):
        torch.testing.assert_close(ours.double(), theirs, rtol=1e-4, atol=1e-5)


def test_the_operator_is_well_registered() -> None:
    x, weight, targets = draw(5, 8, 11, torch.float32)
    torch.library.opcheck(torch.ops.underpar.linear_loss.default, (x, weight, targets, 30.0, 2))


def test_shapes_are_known_without_numbers() -> None:
    with FakeTensorMode():
        x = torch.empty(6, 8, dtype=torch.bfloat16, requires_grad=True)
        weight = torch.empty(11, 8, requires_grad=True)
        loss = linear_loss(x, weight, torch.zeros(6, dtype=torch.long), 30.0)
        grads = torch.autograd.grad(loss, (x, weight))
    assert (loss.shape, loss.dtype) == ((), torch.float32)
    assert [(g.shape, g.dtype) for g in grads] == [((6, 8), x.dtype), ((11, 8), weight.dtype)]


def test_products_run_in_the_precision_of_autocast() -> None:
    x, weight, targets = draw(6, 8, 11, torch.float32)
    # In place of bf16, in which products crash some CPUs.
    wanted = linear_loss(x.half(), weight, targets, 30.0)
    with torch.autocast("cpu", dtype=torch.float16):
        loss = linear_loss(x, weight, targets, 30.0)
    assert torch.equal(loss, wanted)
    assert not torch.equal(loss, linear_loss(x, weight, targets, 30.0))


@pytest.mark.parametrize(
    ("device", "dtype", "words", "cap", "reason"),
    [
        ("cpu", torch.float32, 64, 30.0, "CUDA only"),
        ("cuda", torch.float16, 64, 30.0, "fp16"),
        ("cuda", torch.bfloat16, 50_257, 30.0, "at most 16,384 words, not 50,257"),
        ("cuda", torch.bfloat16, 64, 0.0, "up to 36, not 0"),
        ("cuda", torch.bfloat16, 64, 50.0, "up to 36, not 50"),
        ("cuda", torch.bfloat16, 8192, 30.0, ""),
    ],
)
def test_what_it_does_not_take_is_said(
    device: str, dtype: torch.dtype, words: int, cap: float, reason: str
) -> None:
    told = refuse(torch.device(device), dtype, words, cap)
    assert reason in told and bool(reason) == bool(told)


@pytest.mark.gpu
def test_a_gpu_computes_real_sizes_as_the_plain_loss_does() -> None:
    torch.manual_seed(0)
    x = torch.randn(3 * 8192 + 37, 512, device="cuda").bfloat16().requires_grad_()
    # bf16 holds the weight, so that rounding it is no error of the operator.
    weight = (0.1 * torch.randn(8192, 512, device="cuda")).bfloat16().float().requires_grad_()
    targets = torch.randint(8192, (len(x),), device="cuda")
    exact = [t.detach().double().requires_grad_() for t in (x, weight)]
    wanted = results(plain(*exact, targets, 30.0), *exact)
    for ours, theirs, most in zip(
        results(linear_loss(x, weight, targets, 30.0), x, weight),
        wanted,
        (1e-5, 8e-3, 8e-3),
        strict=True,
    ):
        assert float((ours.double() - theirs).norm() / theirs.norm()) < most
