"""Where the time of a training step goes, beside what the device could do at best.

The ceilings are measured first: products of large matrices, and copies. Then one step runs under
torch's profiler. For each kernel the table has its time, the operations and bytes of the tensors it
was given, and the time that they need at the ceilings. The larger of the two says what bounds it.

Operations count for matrix products and attention. Bytes count each tensor once, so a kernel that
reads one twice looks faster than it could be. On a CPU, operators of torch stand for kernels.
"""

from __future__ import annotations

import gzip
import json
import tempfile
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from underpar.core.progress import SILENT, Progress
from underpar.core.run_folder import write_atomic, write_json
from underpar.core.runtime import Runtime
from underpar.errors import BenchError
from underpar.lab.attention_table import median_ms
from underpar.lab.step_bench import TrainingStep, Variant, open_sides
from underpar.recipe import ModelSpec
from underpar.stages.doctor import copy_speed
from underpar.train.meter import matmul_flops

OPTIMIZER = "underpar optimizer"
# Operators whose kernels make one row together.
WHOLE = ("underpar::", "fusion_study::")
LOSS = "underpar::linear_loss"
PRODUCTS = ("aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm")
# Bytes of a number, by the profiler's name of its type.
SIZES = {"float": 4, "double": 8, "long int": 8, "int": 4, "c10::Half": 2, "c10::BFloat16": 2}
SIZES |= {"bool": 1, "unsigned char": 1, "signed char": 1, "c10::Float8_e4m3fn": 1}
SIZES |= {"c10::Float8_e5m2": 1}
# Bytes of a number in a list of tensors, which has no type in a trace: optimizers have fp32.
LIST_SIZE = 4

# What kinds of kernels are compared by.
SUMS = ("calls", "ms", "floor_ms", "share", "flops", "bytes")


@dataclass(frozen=True)
class Ceilings:
    """What this device reaches: operations per second and bytes per second, read plus written."""

    flops: float
    bytes: float
    shapes: dict[str, float]
    """Operations per second of the products of a recipe, by what they multiply."""


@dataclass(frozen=True)
class Row:
    """All calls of one kernel with tensors of the same shapes in one step."""

    kind: str
    name: str
    shapes: str
    calls: int
    ms: float
    flops: float
    bytes: float
    floor_ms: float
    bound: str
    share: float


@dataclass(frozen=True)
class Roofline:
    """One step: rows in the order of their time, and sums by kind."""

    what: str
    ceilings: Ceilings
    step_ms: float
    kernel_ms: float
    rows: tuple[Row, ...]

    def as_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return asdict(self) | {"kinds": self.kinds()}

    def kinds(self) -> dict[str, dict[str, float]]:
        """Kind -> the sums of its rows."""
        table: dict[str, dict[str, float]] = {}
        for row in self.rows:
            sums = table.setdefault(row.kind, dict.fromkeys(SUMS, 0.0))
            for name in SUMS:
                sums[name] += getattr(row, name)
        return dict(sorted(table.items(), key=lambda item: -item[1]["ms"]))


def to_markdown(found: Roofline, most: int = 30) -> str:
    """The ceilings, the kinds of kernels, and the kernels that take the most time."""
    top = found.ceilings
    lines = [
        f"{found.what}: {found.step_ms:.2f} ms, of which kernels {found.kernel_ms:.2f} ms.",
        "",
        f"Ceilings: products {top.flops / 1e12:.4g} TFLOP/s, copies {top.bytes / 1e9:.4g} GB/s.",
        "",
    ]
    shapes = [(name, f"{flops / 1e12:.4g}") for name, flops in top.shapes.items()]
    lines += _table(("product", "TFLOP/s"), shapes) if shapes else []
    kinds = [
        (
            kind,
            f"{sums['calls']:,.0f}",
            f"{sums['ms']:.3f}",
            f"{100 * sums['share']:.1f}",
            f"{sums['floor_ms']:.3f}",
        )
        for kind, sums in found.kinds().items()
    ]
    lines += _table(("kind", "calls", "ms", "% of kernels", "floor ms"), kinds)
    heads = ("kernel", "tensors", "calls", "ms", "%", "GFLOP", "MB", "floor ms", "bound")
    rows = [
        (
            row.name[:60].replace("|", " "),
            row.shapes,
            f"{row.calls:,}",
            f"{row.ms:.3f}",
            f"{100 * row.share:.1f}",
            f"{row.flops / 1e9:,.1f}",
            f"{row.bytes / 1e6:,.1f}",
            f"{row.floor_ms:.3f}",
            row.bound,
        )
        for row in found.rows[:most]
    ]
    lines += _table(heads, rows)
    return "\n".join(lines)


def _table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    lines = [heads, ["---", *["---:"] * (len(heads) - 1)], *rows]
    return [*(f"| {' | '.join(line)} |" for line in lines), ""]


def measure_ceilings(runtime: Runtime, spec: ModelSpec | None = None, num: int = 0) -> Ceilings:
    """Products of large matrices, copies, and the products of a network on `num` tokens."""
    flops, copied = matmul_flops(runtime), 1e9 * copy_speed(runtime)
    shapes = {}
    for name, (rows, inner, columns) in (_products_of(spec, num) if spec else {}).items():
        a, b = (
            torch.randn(*size, device=runtime.device, dtype=runtime.dtype)
            for size in ((rows, inner), (inner, columns))
        )
        out = a.new_empty(rows, columns)
        ms = median_ms(partial(torch.mm, a, b, out=out), runtime)
        shapes[f"{name}: {rows} x {inner} x {columns}"] = 2e3 * rows * inner * columns / ms
    return Ceilings(flops, copied, shapes)


def _products_of(spec: ModelSpec, num: int) -> dict[str, tuple[int, int, int]]:
    dim, mlp, kv = spec.dim, max(spec.mlp_dims), spec.num_kv_heads * spec.head_dim
    return {
        "keys": (num, dim, kv),
        "queries": (num, dim, dim),
        "MLP up": (num, dim, mlp),
        "MLP down": (num, mlp, dim),
        "head": (num, dim, spec.vocab_size),
        "gradient of MLP up": (mlp, num, dim),
        "gradient of the head": (spec.vocab_size, num, dim),
    }


def profile_recipe(
    variant: Variant,
    at: float,
    runtime: Runtime,
    out: Path | None = None,
    progress: Progress = SILENT,
) -> Roofline:
    """Ceilings, then one step; `out` gets roofline.json, roofline.md and trace.json.gz."""
    [side] = open_sides([variant], at, runtime, progress)
    ceilings = measure_ceilings(runtime, side.model.spec, len(side.batches[0].inputs))
    if out is None:
        return measure_roofline(side, ceilings)
    out.mkdir(parents=True, exist_ok=True)
    found = measure_roofline(side, ceilings, out / "trace.json.gz")
    write_json(out / "roofline.json", found.as_dict())
    write_atomic(out / "roofline.md", to_markdown(found, len(found.rows)))
    return found


def measure_roofline(side: TrainingStep, ceilings: Ceilings, trace: Path | None = None) -> Roofline:
    """Profile one step; `trace`, a .json or .json.gz file, keeps what the profiler saw."""
    runtime = side.runtime
    on_gpu = runtime.device.type == "cuda"
    side()
    step_ms = 1000 * side.seconds(3) / 3
    activities = [ProfilerActivity.CPU] + ([ProfilerActivity.CUDA] if on_gpu else [])
    with profile(activities=activities, record_shapes=True) as profiler:
        side.step(record_function(OPTIMIZER))
        runtime.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        path = trace or Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        raw = path.read_bytes()
    events = json.loads(gzip.decompress(raw) if path.suffix == ".gz" else raw)["traceEvents"]
    pairs = attention_pairs(side)
    rows = table_of(launches_of(events, on_gpu), ceilings, pairs)
    if not rows:
        raise BenchError("the profiler saw no kernels; is another profiler attached?")
    total = sum(row.ms for row in rows)
    what = f"one training step of {side.step_tokens:,} tokens at {side.at:.0%} of training"
    return Roofline(what, ceilings, step_ms, total, tuple(rows))


def attention_pairs(side: TrainingStep) -> int:
    """Pairs of a query and a key that it sees in the first micro-batch, without windows."""
    lengths = side.batches[0].segments.cu.diff().double()
    return int((lengths * (lengths + 1) / 2).sum())


@dataclass(frozen=True)
class Launch:
    """A kernel that ran: microseconds, and the operators of torch that it was launched in."""

    name: str
    us: float
    ops: tuple[Mapping[str, Any], ...]  # outermost first
    is_optimizer: bool


def launches_of(events: Iterable[Mapping[str, Any]], on_gpu: bool) -> list[Launch]:
    """The kernels of a trace; on a CPU the operators that call no other operator."""
    timed = [e for e in events if e.get("ph") == "X"]
    steps = [(e["ts"], e["ts"] + e["dur"]) for e in timed if e["name"] == OPTIMIZER]
    ops = [e for e in timed if e.get("cat") == "cpu_op"]
    if not on_gpu:
        launches = list(_leaves(ops))
    else:
        kernels = {
            e["args"]["correlation"]: e
            for e in timed
            if e.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")
        }
        starts = [
            e
            for e in timed
            if e.get("cat") in ("cuda_runtime", "cuda_driver")
            and e["args"].get("correlation") in kernels
        ]
        launches = [
            (kernels.pop(start["args"]["correlation"]), start, around)
            for start, around in _surrounded(starts, ops)
        ]
        # Nobody launched these, as far as the profiler saw.
        launches += [(kernel, kernel, ()) for kernel in kernels.values()]
    return [
        Launch(
            kernel["name"],
            kernel["dur"],
            around,
            any(begin <= start["ts"] <= end for begin, end in steps),
        )
        for kernel, start, around in launches
    ]


def _leaves(
    ops: Sequence[Mapping[str, Any]],
) -> Iterator[tuple[Mapping[str, Any], Mapping[str, Any], tuple[Mapping[str, Any], ...]]]:
    surrounded = list(_surrounded(ops, ops))
    parents = {id(op) for _, around in surrounded for op in around}
    for op, around in surrounded:
        is_inside = any(_is_whole(outer) for outer in around)
        if not is_inside and (_is_whole(op) or id(op) not in parents):
            yield op, op, (*around, op)


def _is_whole(op: Mapping[str, Any]) -> bool:
    return op["name"].startswith(WHOLE) or op["name"] in PRODUCTS


def _surrounded(
    events: Sequence[Mapping[str, Any]], ops: Sequence[Mapping[str, Any]]
) -> Iterator[tuple[Mapping[str, Any], tuple[Mapping[str, Any], ...]]]:
    """Each event with the operators of its thread that run when it begins, outermost first."""
    wanted = {id(event) for event in events}
    everything = {id(e): e for e in (*ops, *events)}
    are_ops = {id(op) for op in ops}
    threads: dict[object, list[Mapping[str, Any]]] = defaultdict(list)
    for event in everything.values():
        threads[event["pid"], event["tid"]].append(event)
    for thread in threads.values():
        open_ops: list[Mapping[str, Any]] = []
        # Of two that begin together, the longer one is around the other.
        for event in sorted(thread, key=lambda e: (e["ts"], -e["dur"])):
            while open_ops and open_ops[-1]["ts"] + open_ops[-1]["dur"] < event["ts"]:
                open_ops.pop()
            if id(event) in wanted:
                yield event, tuple(open_ops)
            if id(event) in are_ops:
                open_ops.append(event)


def table_of(launches: Sequence[Launch], ceilings: Ceilings, pairs: int) -> list[Row]:
    """Rows in the order of their time."""
    groups: dict[tuple[str, str, str], list[Launch]] = defaultdict(list)
    for launch in launches:
        groups[_group_of(launch)].append(launch)
    total = sum(launch.us for launch in launches)
    rows = []
    for (kind, name, shapes), members in groups.items():
        us = sum(launch.us for launch in members)
        op = _shaped(members[0])
        calls = len({id(_shaped(m)) for m in members}) if op else len(members)
        flops, num_bytes = (calls * cost for cost in _costs(op, pairs))
        by_flops, by_bytes = 1e3 * flops / ceilings.flops, 1e3 * num_bytes / ceilings.bytes
        bound = "unknown" if not num_bytes else "arithmetic" if by_flops > by_bytes else "memory"
        floor = max(by_flops, by_bytes)
        rows.append(
            Row(kind, name, shapes, calls, us / 1e3, flops, num_bytes, floor, bound, us / total)
        )
    return sorted(rows, key=lambda row: -row.ms)


def _group_of(launch: Launch) -> tuple[str, str, str]:
    op = _shaped(launch)
    name = launch.name
    kind = "copies and fills" if name.startswith(("Mem", "aten::copy", "aten::fill")) else "other"
    if "triton" in name or name.startswith("aten::"):
        kind = "element-wise and sums" if kind == "other" else kind
    if op is not None:
        if op["name"].startswith(WHOLE):
            name = op["name"]
            kind = "attention" if "attend" in name else name.partition("::")[0]
            kind = "loss" if name == LOSS else kind
        elif op["name"] in PRODUCTS:
            kind, name = "matrix products", op["name"]
    if launch.is_optimizer:
        kind = "optimizer"
    return kind, name, _shapes_text(op)


def _shaped(launch: Launch) -> Mapping[str, Any] | None:
    """The operator whose tensors a kernel reads: one that counts as a whole, or the innermost."""
    for op in launch.ops:
        if op["name"].startswith(WHOLE):
            return op
    for op in reversed(launch.ops):
        if any(op.get("args", {}).get("Input Dims", [])):
            return op
    return None


def _shapes_text(op: Mapping[str, Any] | None) -> str:
    if op is None:
        return ""
    shapes = [dims for dims in op.get("args", {}).get("Input Dims", []) if dims]
    plain = [d for dims in shapes for d in (dims if isinstance(dims[0], list) else [dims])]
    text = " ".join("x".join(map(str, dims)) for dims in plain[:6])
    return text + (f" and {len(plain) - 6} more" if len(plain) > 6 else "")


def _costs(op: Mapping[str, Any] | None, pairs: int) -> tuple[float, float]:
    """Operations and bytes of one call."""
    if op is None:
        return 0.0, 0.0
    dims, types = (op.get("args", {}).get(key, []) for key in ("Input Dims", "Input type"))
    tensors: list[tuple[list[int], int]] = []
    for size, kind in zip(dims, types, strict=False):
        if size and isinstance(size[0], list):
            # As the tensor before it, if there is one.
            tensors += [(each, tensors[0][1] if tensors else LIST_SIZE) for each in size]
        elif size:
            tensors.append((size, SIZES.get(kind, 0)))
    moved = float(sum(prod(size) * width for size, width in tensors))
    name = op["name"]
    if name in PRODUCTS:
        has_summand = "add" in name
        a, b = (size for size, _ in tensors[has_summand:][:2])
        result = prod(a[:-1]) * b[-1]
        # What an operator returns is listed only if it was given ("out=").
        is_listed = len(tensors) > 2 + has_summand
        return 2.0 * result * a[-1], moved + (0 if is_listed else result * tensors[0][1])
    if name.startswith("underpar::attend"):
        # First the queries, or the gradient: of their shape are what comes out, and the gradient of
        # the queries. Backward needs five products instead of two.
        (size, width), is_backward = tensors[0], "backward" in name
        return (10.0 if is_backward else 4.0) * prod(size[1:]) * pairs, moved + prod(size) * width
    if name == LOSS:
        # Three products; the gradients of both factors come out.
        (hidden, width), (weight, weight_width) = tensors[:2]
        made = prod(hidden) * width + prod(weight) * weight_width
        return 6.0 * prod(hidden) * weight[0], moved + made
    return 0.0, moved
