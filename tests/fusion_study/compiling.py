"""Compiles the kernels that a function launches for a Hopper GPU, on a machine without one."""

import contextlib
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode


class _NoDevice:
    """What Triton asks its driver for before it compiles."""

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


def compile_kernels(function: Callable[[], object]) -> list[tuple[str, int]]:
    """Name and bytes of shared memory of each kernel that a function launches; nothing runs.

    Tensors have shapes only, so the shapes may be as large as on a GPU.
    """
    from triton.runtime import driver
    from triton.runtime.jit import JITFunction, MockTensor

    run, found = JITFunction.run, []

    def compile_only(kernel: Any, *args: Any, grid: Any, warmup: bool, **kinds: Any) -> None:
        mocks = [MockTensor(arg.dtype) if isinstance(arg, Tensor) else arg for arg in args]
        compiled = run(kernel, *mocks, grid=grid, warmup=True, **kinds)
        assert b"ELF" in compiled.asm["cubin"][:4]
        found.append((kernel.__name__, compiled.metadata.shared))

    driver.set_active(_NoDevice())
    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.object(JITFunction, "run", compile_only))
        stack.enter_context(FakeTensorMode())
        function()
    return found


def tensors(*shapes: tuple[int, ...], dtype: torch.dtype = torch.bfloat16) -> list[Tensor]:
    """Tensors of these shapes; inside `compile_kernels` without values."""
    return [torch.empty(shape, dtype=dtype) for shape in shapes]
