"""Products in FP8: values of emulated rounding, gradients of the plain product."""

import pytest
import torch

fp8 = pytest.importorskip("benchmarks.fusion_study.fp8")


def test_products_and_gradients_are_those_of_emulated_rounding() -> None:
    fp8.check(torch.device("cpu"))


def test_rounding_is_felt() -> None:
    x, weight, *scales = fp8.OPERATORS["fp8.up"].inputs(torch.device("cpu"), 64)
    exact = fp8.bf16(x, weight, *scales)
    error = (fp8.fused(x, weight, *scales)[0] - exact).norm() / exact.norm()
    # Three bits after the first: 2^-4 at most per factor, a third of it in the mean.
    assert 0.01 < error < 0.06
