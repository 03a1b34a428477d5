"""Products in FP8: values of emulated rounding, gradients of the plain product, scales that lag."""

import pytest
import torch

fp8 = pytest.importorskip("benchmarks.fusion_study.fp8")


def test_products_and_gradients_are_those_of_emulated_rounding() -> None:
    fp8.check(torch.device("cpu"))


def test_rounding_is_felt() -> None:
    x, weight, *scales = fp8.OPERATORS["fp8.up"].inputs(torch.device("cpu"), 64)
    exact = fp8.bf16(x, weight, *scales)
    error = (fp8.fp8_linear(x, weight, *scales)[0] - exact).norm() / exact.norm()
    # Three bits after the first: 2^-4 at most per factor, a third of it in the mean.
    assert 0.01 < error < 0.06


def test_scales_follow_the_largest_of_earlier_steps() -> None:
    scale = fp8.DelayedScale(steps=2)
    assert scale.scale() == 1
    seen = []
    for largest in (448.0, 44.8, 4.48, 4.48):
        scale.record(torch.tensor(largest))
        seen.append(float(scale.scale()))
    assert seen == pytest.approx([1.0, 1.0, 0.1, 0.01])


def test_what_is_larger_than_before_is_clamped() -> None:
    x = torch.tensor([1.0, -3.0, 100.0])
    assert fp8.rounded(x, torch.tensor(1 / 448)).float().tolist() == [448.0, -448.0, 448.0]


def test_the_operator_is_well_registered() -> None:
    x, weight = (torch.randn(n, 16, requires_grad=True) for n in (5, 24))
    scale = torch.tensor(0.01)
    args = (x, weight, fp8.rounded(x, scale), fp8.rounded(weight, scale), scale, scale)
    # The check of the schema compares arguments by arithmetic that e4m3 does not have.
    tests = ("test_autograd_registration", "test_faketensor", "test_aot_dispatch_static")
    torch.library.opcheck(torch.ops.fusion_study.fp8_linear.default, args, test_utils=tests)
