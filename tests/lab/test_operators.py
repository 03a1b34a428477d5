"""Operators in two versions: wrong ones are refused, right ones are timed."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from underpar.errors import BenchError
from underpar.lab.bench import run_bench
from underpar.lab.operators import PEAK_BYTES, PEAK_FLOPS, Operator

CPU = torch.device("cpu")


def _inputs(device: torch.device, tokens: int) -> tuple[Any, ...]:
    x, scale = torch.randn(tokens, 8, device=device), torch.randn(8, device=device)
    return x.requires_grad_(), scale.requires_grad_(), 2.0


def _plain(x: Tensor, scale: Tensor, power: float) -> tuple[Tensor, Tensor]:
    return scale * x, x.abs().pow(power)


def _fused(x: Tensor, scale: Tensor, power: float) -> tuple[Tensor, Tensor]:
    return x * scale, x.square()


class _WrongGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: Tensor) -> Tensor:
        ctx.save_for_backward(x, scale)
        return x * scale

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        x, scale = ctx.saved_tensors
        return grad * scale, (grad * x).sum(0) * 1.001


OPERATOR = Operator(
    what="scale and square",
    source="none",
    plain=_plain,
    fused=_fused,
    inputs=_inputs,
    flops=PEAK_FLOPS / 1e3,
    bytes=PEAK_BYTES / 2e3,
    plain_bytes=PEAK_BYTES,
)


def test_two_right_versions_pass() -> None:
    OPERATOR.check(CPU)


@pytest.mark.parametrize(
    "wrong",
    [
        lambda x, scale, power: (x * scale, 1.001 * x.square()),
        lambda x, scale, power: (_WrongGradient.apply(x, scale), x.square()),
        lambda x, scale, power: (x * scale, x.square() * torch.empty_like(x).mul(0).add(1)),
    ],
    ids=["value", "gradient", "place that was never written"],
)
def test_a_wrong_version_is_refused(wrong: Any) -> None:
    with pytest.raises(BenchError, match="scale and square"):
        replace(OPERATOR, fused=wrong).check(CPU)


def test_the_coarsest_of_the_inputs_sets_the_limit() -> None:
    def inputs(device: torch.device, tokens: int) -> tuple[Any, ...]:
        scale = torch.randn(8).bfloat16().float().requires_grad_()
        return scale, torch.randn(tokens, 8).bfloat16().requires_grad_()

    def plain(scale: Tensor, x: Tensor) -> Tensor:
        return scale.to(x.dtype) * x

    operator = replace(OPERATOR, plain=plain, fused=plain, inputs=inputs)
    operator.check(CPU)
    with pytest.raises(BenchError, match=r"more than 0\.004"):
        replace(operator, fused=lambda scale, x: 1.01 * plain(scale, x)).check(CPU)


def test_the_floor_is_that_of_the_scarcer_resource() -> None:
    assert OPERATOR.floor_ms == pytest.approx(1.0)
    assert replace(OPERATOR, bytes=2 * PEAK_BYTES / 1e3).floor_ms == pytest.approx(2.0)


def test_both_passes_of_both_versions_are_timed() -> None:
    calls = []

    def counted(name: str, version: Any) -> Any:
        return lambda *args: (calls.append(name), version(*args))[1]

    operator = replace(OPERATOR, plain=counted("A", _plain), fused=counted("B", _fused))
    result = run_bench(operator.bench("op", CPU, 16), 4, 1e-4, 0.0)
    assert len(result.blocks) == 32
    assert calls.count("A") > 32 and calls.count("B") > 8
