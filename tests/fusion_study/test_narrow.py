"""Checks as on a GPU: streams in bf16, weights and factors in fp32, by Triton's interpreter.

On a CPU the operators' own inputs are fp32, which hid mixed precisions and limits for the wrong
one. Kernels with products are not here: the interpreter multiplies the bits of bf16 numbers as if
they were integers.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch

study = pytest.importorskip("benchmarks.fusion_study.study")

NAMES = ["block_epilogue.branch", "block_epilogue.skip", "xsa", "xsa.function", "xsa_rewrite"]


@pytest.mark.parametrize("name", NAMES)
def test_errors_in_bf16_are_within_the_limits(name: str, interpreted: Callable[..., None]) -> None:
    interpreted(_check, name)


def _check(name: str) -> None:
    operator = study.operators_of(name.partition(".")[0])[name]

    def inputs(device: torch.device, tokens: int) -> tuple[Any, ...]:
        return tuple(_as_on_a_gpu(arg, tokens) for arg in operator.inputs(device, tokens))

    dataclasses.replace(operator, inputs=inputs).check(torch.device("cpu"))


def _as_on_a_gpu(arg: Any, tokens: int) -> Any:
    if not isinstance(arg, torch.Tensor) or not arg.requires_grad:
        return arg
    narrow = arg.detach().bfloat16()
    return (narrow if len(arg) == tokens else narrow.float()).requires_grad_()
