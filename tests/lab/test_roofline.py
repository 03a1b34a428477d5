"""Kernels of a step: what a trace says, what they cost, what bounds them."""

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from underpar.core.runtime import Runtime
from underpar.lab.roofline import (
    OPTIMIZER,
    Ceilings,
    Row,
    attention_pairs,
    launches_of,
    measure_ceilings,
    measure_roofline,
    table_of,
    to_markdown,
)
from underpar.lab.step_bench import Variant, open_sides
from underpar.recipe import load_recipe

CPU = Runtime(torch.device("cpu"))
BF16 = "c10::BFloat16"
# A teraflop and a gigabyte per second: microseconds and floors are easy to see.
ROUND = Ceilings(1e12, 1e9, {})


def event(cat: str, name: str, ts: float, dur: float, tid: int = 1, **args: Any) -> dict[str, Any]:
    return {"ph": "X", "cat": cat, "name": name, "ts": ts, "dur": dur, "pid": 1, "tid": tid} | {
        "args": args
    }


def op(name: str, ts: float, dur: float, *tensors: tuple[list[Any], str], **more: Any) -> Any:
    shapes = {"Input Dims": [t[0] for t in tensors], "Input type": [t[1] for t in tensors]}
    return event("cpu_op", name, ts, dur, **more, **shapes)


def launch(ts: float, number: int, tid: int = 1) -> dict[str, Any]:
    return event("cuda_runtime", "cudaLaunchKernel", ts, 1, tid, correlation=number)


def kernel(name: str, dur: float, number: int) -> dict[str, Any]:
    return event("kernel", name, 1000 + 10 * number, dur, 7, correlation=number)


@pytest.fixture
def rows() -> dict[str, Row]:
    events = [
        # A product, launched inside an operator of torch inside another one.
        op("aten::linear", 0, 30, ([8, 4], BF16), ([2, 4], BF16)),
        op("aten::mm", 5, 20, ([8, 4], BF16), ([4, 2], BF16)),
        launch(10, 1),
        kernel("nvjet_128x64", 40, 1),
        # A kernel of the compiler, on the thread of the backward pass.
        op("triton_poi_fused_add_0", 40, 5, ([8, 4], BF16), ([8, 4], "float"), ([], ""), tid=2),
        launch(42, 2, tid=2),
        kernel("triton_poi_fused_add_0", 20, 2),
        # Attention: an operator of ours with two kernels, one of them inside an operator of torch.
        op("underpar::attend", 50, 20, ([6, 2, 4], BF16), ([6, 1, 4], BF16), ([6, 1, 4], BF16)),
        op("aten::zeros", 52, 3, ([6], "float")),
        launch(53, 3),
        launch(60, 4),
        kernel("fill", 5, 3),
        kernel("flash_fwd", 25, 4),
        # The same product in the optimizer.
        event("user_annotation", OPTIMIZER, 80, 30),
        op("aten::mm", 85, 10, ([8, 4], BF16), ([4, 2], BF16)),
        launch(86, 5),
        kernel("nvjet_128x64", 8, 5),
        # Launched by nobody that the profiler saw.
        kernel("mystery", 2, 6),
        {"ph": "i", "name": "a mark", "ts": 3},
    ]
    launches = launches_of(events, on_gpu=True)
    assert len(launches) == 6
    return {row.name + row.kind: row for row in table_of(launches, ROUND, pairs=10)}


def test_kernels_are_found_with_the_operators_that_launched_them(rows: dict[str, Row]) -> None:
    assert {name: (row.calls, row.ms) for name, row in rows.items()} == {
        "aten::mmmatrix products": (1, 0.04),
        "triton_poi_fused_add_0element-wise and sums": (1, 0.02),
        "underpar::attendattention": (1, 0.03),
        "aten::mmoptimizer": (1, 0.008),
        "mysteryother": (1, 0.002),
    }
    assert [row.ms for row in rows.values()] == sorted((r.ms for r in rows.values()), reverse=True)
    assert sum(row.share for row in rows.values()) == pytest.approx(1.0)


def test_operations_and_bytes_are_those_of_the_tensors(rows: dict[str, Row]) -> None:
    product = rows["aten::mmmatrix products"]
    # 8 x 4 by 4 x 2, and 16 results.
    assert (product.flops, product.bytes) == (2 * 8 * 4 * 2, 2 * (32 + 8 + 16))
    assert product.bound == "memory" and product.floor_ms == pytest.approx(112 / 1e6)
    added = rows["triton_poi_fused_add_0element-wise and sums"]
    assert (added.flops, added.bytes, added.bound) == (0, 32 * 2 + 32 * 4, "memory")
    attention = rows["underpar::attendattention"]
    assert attention.flops == 4 * 2 * 4 * 10
    assert attention.bytes == 2 * (48 + 24 + 24 + 48)
    assert rows["mysteryother"].bound == "unknown"


def test_a_loss_without_logits_is_three_products() -> None:
    tensors = ([6, 4], BF16), ([10, 4], "float"), ([6], "long int")
    events = [op("underpar::linear_loss", 0, 9, *tensors), launch(1, 1), kernel("k", 5, 1)]
    [row] = table_of(launches_of(events, on_gpu=True), ROUND, 0)
    assert (row.kind, row.flops) == ("loss", 3 * 2 * 6 * 4 * 10)
    # Factors and gradients of both, and targets.
    assert row.bytes == 2 * (2 * 24) + 2 * (4 * 40) + 8 * 6


def test_a_product_that_is_added_or_written_in_place_counts_once() -> None:
    tensors = [([3, 8, 2], BF16), ([3, 8, 4], BF16), ([3, 4, 2], BF16)]
    for name, given in (("aten::baddbmm", tensors), ("aten::bmm", tensors[1:])):
        for out in ([], [tensors[0]]):
            launches = launches_of(
                [op(name, 0, 9, *given, *out), launch(1, 1), kernel("k", 5, 1)], on_gpu=True
            )
            [row] = table_of(launches, ROUND, 0)
            # The summand is read, and the result is written.
            assert row.flops == 2 * 3 * 8 * 2 * 4
            assert row.bytes == 2 * (96 + 24 + 48 * (1 + (name == "aten::baddbmm")))


def test_arithmetic_bounds_what_has_enough_of_it() -> None:
    tensors = ([512, 512], BF16), ([512, 512], BF16)
    events = [op("aten::mm", 0, 9, *tensors), launch(1, 1), kernel("k", 400, 1)]
    fast_memory = Ceilings(1e12, 1e12, {})
    [row] = table_of(launches_of(events, on_gpu=True), fast_memory, 0)
    assert row.bound == "arithmetic" and row.floor_ms == pytest.approx(2e3 * 512**3 / 1e12)


def test_a_step_is_profiled_on_a_cpu(tmp_path: Path) -> None:
    changes = ("model.num_layers=2", "train.micro_batch_tokens=256", "train.num_micro_batches=1")
    [side] = open_sides([Variant("baseline+cpu", changes)], 0.0, CPU)
    found = measure_roofline(side, ROUND, tmp_path / "trace.json.gz")
    kinds = found.kinds()
    assert {"matrix products", "attention", "element-wise and sums", "optimizer"} <= kinds.keys()
    spec, n = side.model.spec, 256
    weights = sum(p.numel() for p in side.model.parameters() if p.ndim == 2)
    # Forward once, backward twice; the head's weight is the embedding's.
    assert kinds["matrix products"]["flops"] == 6 * n * weights
    pairs = attention_pairs(side)
    assert n <= pairs <= n * (spec.context + 1) / 2
    heads = spec.num_heads * spec.head_dim
    assert kinds["attention"]["flops"] == 2 * 14 * heads * pairs
    assert json.loads(gzip.decompress((tmp_path / "trace.json.gz").read_bytes()))["traceEvents"]
    page = to_markdown(found)
    assert "| attention |" in page and "products 1 TFLOP/s" in page
    json.dumps(found.as_dict(), allow_nan=False)


def test_the_ceilings_are_measured() -> None:
    spec = load_recipe("baseline+cpu").model
    found = measure_ceilings(CPU, spec, 64)
    assert found.flops > 1e6 and found.bytes > 1e6
    assert found.shapes.keys() >= {"MLP up: 64 x 96 x 128", "head: 64 x 96 x 512"}
    assert all(flops > 0 for flops in found.shapes.values())
