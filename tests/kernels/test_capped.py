"""The soft cap against a tanh in fp64, and the loss without a maximum against torch's."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from underpar.kernels.capped import SAFE_CAP, capped_cross_entropy, soft_cap

# One unit in the last place of a sigmoid between a half and one.
ULP = 2.0**-24
CAPS = [5.0, 30.0, SAFE_CAP]


def draw_logits(spread: float, rows: int = 32, columns: int = 64) -> Tensor:
    source = torch.Generator().manual_seed(0)
    logits = spread * torch.randn(rows, columns, generator=source)
    # Nothing, next to nothing, and far beyond any cap.
    logits[0, :6] = torch.tensor([0.0, -0.0, 1e-6, -1e-6, 1e4, -1e4])
    return logits


def gradients(out: Tensor, *inputs: Tensor) -> tuple[Tensor, ...]:
    """Gradients of a weighted sum, so that those of different outputs differ."""
    weights = torch.linspace(-1, 1, out.numel(), dtype=torch.float64).view(out.shape)
    return torch.autograd.grad((out * weights).sum(), inputs)


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("spread", [1.0, 40.0])
@pytest.mark.parametrize("cap", CAPS)
def test_the_soft_cap_is_a_tanh_but_for_rounding(cap: float, spread: float, fused: bool) -> None:
    logits = draw_logits(spread).requires_grad_()
    exact = logits.detach().double().requires_grad_()
    out, expected = soft_cap(logits, cap, fused=fused), cap * torch.tanh(exact / cap)
    # A few units of the sigmoid, times 2 cap: near zero the error is absolute, not relative.
    torch.testing.assert_close(out.double(), expected, rtol=0, atol=8 * cap * ULP)
    assert float(out.detach().abs().max()) <= cap
    for ours, theirs in zip(gradients(out, logits), gradients(expected, exact), strict=True):
        torch.testing.assert_close(ours.double(), theirs, rtol=0, atol=16 * ULP)


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("with_scale", [False, True])
@pytest.mark.parametrize("shape", [(), (64,)])
def test_a_cap_may_be_a_weight(shape: tuple[int, ...], with_scale: bool, fused: bool) -> None:
    source = torch.Generator().manual_seed(1)
    logits = draw_logits(40.0).clamp(-200, 200).requires_grad_()
    cap = (20 + 20 * torch.rand(shape, generator=source)).requires_grad_()
    exact, exact_cap = (t.detach().double().requires_grad_() for t in (logits, cap))
    out = soft_cap(logits, cap, 2.0 / cap if with_scale else None, fused)
    expected = exact_cap * torch.tanh(exact / exact_cap)
    torch.testing.assert_close(out.double(), expected, rtol=0, atol=8 * 40 * ULP)
    actual, wanted = gradients(out, logits, cap), gradients(expected, exact, exact_cap)
    assert float(wanted[1].abs().min()) > 1e-3
    torch.testing.assert_close(actual[0].double(), wanted[0], rtol=0, atol=16 * ULP)
    torch.testing.assert_close(actual[1].double(), wanted[1], rtol=1e-5, atol=1e-4)


def test_a_cap_of_fp32_leaves_bf16_behind() -> None:
    logits = draw_logits(40.0).bfloat16()
    out = soft_cap(logits, 30.0)
    assert out.dtype == torch.float32
    # The same as from the same numbers in fp32: nothing is rounded to bf16 on the way.
    assert torch.equal(out, soft_cap(logits.float(), 30.0))
    assert not torch.equal(out, out.bfloat16().float())


def loss_and_gradient(loss: Tensor, logits: Tensor) -> tuple[Tensor, Tensor]:
    return loss.detach(), torch.autograd.grad(loss, logits)[0]


@pytest.mark.parametrize("cap", CAPS)
def test_the_loss_without_a_maximum_is_the_cross_entropy(cap: float) -> None:
    logits = soft_cap(draw_logits(40.0), cap)
    # Rows in which all logits are alike, at either bound.
    logits[1], logits[2] = cap, -cap
    logits.requires_grad_()
    targets = torch.arange(len(logits)) * 7 % logits.size(1)
    exact = logits.detach().double().requires_grad_()
    expected = loss_and_gradient(F.cross_entropy(exact, targets), exact)
    loss, grad = loss_and_gradient(capped_cross_entropy(logits, targets, cap, fused=True), logits)
    # The logarithm of the sum is as large as the cap, and rounded there.
    torch.testing.assert_close(loss.double(), expected[0], rtol=0, atol=4 * cap * ULP)
    torch.testing.assert_close(grad.double(), expected[1], rtol=1e-5, atol=ULP)


def test_a_cap_that_doubled_overflows_nothing() -> None:
    targets = torch.tensor([0, 3])
    for bound in (2 * SAFE_CAP, -2 * SAFE_CAP):
        logits = torch.full((2, 64), bound, requires_grad=True)
        loss, grad = loss_and_gradient(
            capped_cross_entropy(logits, targets, SAFE_CAP, fused=True), logits
        )
        torch.testing.assert_close(loss, F.cross_entropy(logits.detach(), targets))
        assert bool(grad.isfinite().all())


def test_a_large_cap_falls_back_on_a_maximum() -> None:
    logits = soft_cap(draw_logits(400.0), 200.0).requires_grad_()
    targets = torch.arange(len(logits))
    assert bool(logits.exp().isinf().any())
    expected = loss_and_gradient(F.cross_entropy(logits, targets), logits)
    actual = loss_and_gradient(capped_cross_entropy(logits, targets, 200.0, fused=True), logits)
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(actual, expected, strict=True))
    assert all(bool(tensor.isfinite().all()) for tensor in actual)
