"""Every kernel of the study compiles for a Hopper GPU at real shapes, and fits its shared memory.

The interpreter does not see types that differ between branches, tiles that are too large, or what
the assembler refuses.
"""

from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from importlib import import_module
from multiprocessing import get_context
from typing import Any

import pytest
import torch
from compiling import compile_kernels, tensors

pytest.importorskip("triton")
pytestmark = pytest.mark.slow

TOKENS = 98_304
# Bytes that a block may have on compute capability 9.0.
SHARED_MEMORY = 232_448


def _linear_loss(module: Any) -> None:
    (logits,) = tensors((4096, 8192))
    (nats,) = tensors((4096,), dtype=torch.float32)
    (targets,) = tensors((4096,), dtype=torch.int64)
    tiles = import_module("underpar.kernels.linear_loss.tiles")
    tiles.turn_into_gradients(logits, targets, nats, 30.0, 1e-5)


def _block_epilogue(module: Any) -> None:
    for num in (1, 2, 3):
        streams = tensors(*[(TOKENS, 512)] * num)
        factors, scale = tensors((num, 512), (), dtype=torch.float32)
        module._mix_norm._init_fn(streams, factors, scale)
        module._mix_norm_backward._init_fn(streams, factors, scale, streams[0], streams[0])


def _qkv(module: Any) -> None:
    packed, q, k = tensors((TOKENS, 1024), (TOKENS, 8, 64), (TOKENS, 4, 64))
    angle, gain = tensors((TOKENS, 8), (8,), dtype=torch.float32)
    module._split_norm_rotate._init_fn(packed, angle, angle, gain, 64)
    module._split_norm_rotate_backward._init_fn(packed, angle, angle, gain, q, k, k)


def _xsa(module: Any) -> None:
    y, v, gate = tensors((TOKENS, 8, 64), (TOKENS, 4, 64), (TOKENS, 8))
    module._run_forward(y, v, gate)
    module._run_backward(y, v, gate, y)


def _mlp(module: Any) -> None:
    x, up, down, hidden = tensors((TOKENS, 512), (2048, 512), (512, 2048), (TOKENS, 2048))
    (scale,) = tensors((TOKENS,), dtype=torch.float32)
    for variant in module.VARIANTS:
        module._mlp._init_fn(x, scale, up, down, 0.5, variant)
        saved = [x, scale, up, down, hidden, hidden]
        module._mlp_backward._init_fn(x, saved, 0.5, variant)


def _ema_update(module: Any) -> None:
    (updates,) = tensors((11, 2048, 512))
    (table,) = tensors((11,), dtype=torch.int64)
    for averages in (True, False):
        sizes = (2048 * 512, 0.9, 0.1, 0.1, averages, module.BLOCK)
        module._update[(512, 11)](updates, table, table, *sizes, num_warps=8)


LAUNCHES = {
    "linear_loss": (_linear_loss, 1),
    "block_epilogue": (_block_epilogue, 6),
    "qkv": (_qkv, 2),
    "xsa": (_xsa, 2),
    "mlp": (_mlp, 10),
    "ema_update": (_ema_update, 2),
}


@pytest.fixture(scope="module")
def compiled() -> Iterator[Callable[[str], list[tuple[str, int]]]]:
    """The kernels of a file, compiled in a process whose driver of Triton is replaced."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        yield lambda name: pool.submit(_compile, name).result()


def _compile(name: str) -> list[tuple[str, int]]:
    module = import_module(f"benchmarks.fusion_study.{name}")
    return compile_kernels(lambda: LAUNCHES[name][0](module))


@pytest.mark.parametrize("name", LAUNCHES)
def test_kernels_compile_for_a_gpu(
    name: str, compiled: Callable[[str], list[tuple[str, int]]]
) -> None:
    kernels = compiled(name)
    assert len(kernels) == LAUNCHES[name][1]
    assert max(shared for _, shared in kernels) <= SHARED_MEMORY
