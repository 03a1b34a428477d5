"""Quantization curves: what rounding costs at what size, for the published ways and for ours.

    (a) int6 matrices and int7 embedding, rounded with GPTQ, symbols through lzma
    (b) the same symbols by groups through lrzip or zpaq, with low-rank corrections (PR 2014)
    (c) the symbols of (a) with our coder, which knows the width of each row and column
    (h) the same with steps by the importance of rows (HQClip, PR 1412)
    (d) steps chosen by what errors cost instead of fixed ones; d+ by column too
    (e) with a trellis of 8 states; e+ by column too
    (f) e+ with corrections weighted by what errors cost, and control tensors tuned afterwards

All curves round the same trained weights with the same calibration, which is made in the run
folder if it is missing. All points are priced on the same held-out documents. Bytes are those of
symbols, steps, corrections, control tensors and framing, without code and tokenizer: for (d) to
(f) the artifact that `underpar pack` would write, for the others the sum of their parts. (b)
sorts its rows if that is smaller. It needs lrzip or zpaq on the PATH, or another program that
compresses its standard input. OUT gets quant_curves.json, with every point as soon as it is
measured, quant_curves.md and quant_curves.svg. A stopped run continues.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from threading import Lock
from typing import Any

from underpar.audit.probes import first_documents
from underpar.build.model import build_model
from underpar.core.fields import Fields
from underpar.core.progress import SILENT, Progress
from underpar.core.run_folder import RunFolder, write_atomic, write_json
from underpar.core.runtime import Runtime, num_cores, open_runtime
from underpar.data.folder import DataFolder, data_identity, load_data
from underpar.errors import BenchError, RunError
from underpar.lab.published_coders import find_compressor
from underpar.lab.quant_case import CURVES, Case, Curve, load
from underpar.lab.quant_table import (
    Point,
    compare,
    draw_plot,
    group_points,
    read_point,
    write_table,
)
from underpar.quant import tune
from underpar.quant.allocate import sensitivities
from underpar.quant.files import Measured, read_measured
from underpar.quant.schemes import QuantizedModel, dequantize
from underpar.quant.solve import Solver
from underpar.stages.calibrate import Trained, calibrate_run, read_trained, training_text
from underpar.stages.train import make_validator

# Sizes of a curve: the published widths of steps times one of these factors, in this order.
FACTORS = (1.0, 1.25, 0.8, 1.6, 2.0, 0.64, 2.5, 0.5)
# The curve that all others are compared with.
BASE = "b"
# Threads that count the bytes of points while the next point is rounded.
NUM_COUNTERS = 8


@dataclass(frozen=True)
class Request:
    """Which run to measure, on which text, at how many sizes, and where the results go."""

    run: Path
    data: Path
    out: Path
    num_sizes: int = 4
    num_documents: int = 1000
    tune_steps: int = tune.Settings.steps
    zpaq: Path | None = None
    device: str = "auto"

    def __post_init__(self) -> None:
        if not 2 <= self.num_sizes <= len(FACTORS):
            raise BenchError(f"{self.num_sizes} sizes: expected 2 to {len(FACTORS)}")
        if self.num_documents < 0:
            raise BenchError(f"{self.num_documents} documents: expected 0 (all) or more")


def measure(
    request: Request, progress: Progress = SILENT, curves: Mapping[str, Curve] = CURVES
) -> dict[str, Any]:
    """Measure the points that OUT/quant_curves.json lacks; returns its new content."""
    folder = RunFolder(request.run)
    trained, data = read_trained(folder), load_data(request.data)
    path = request.out / "quant_curves.json"
    about = {
        "weights_sha256": trained.sha256,
        "data_identity": data_identity(data),
        "documents": request.num_documents,
        "tune_steps": request.tune_steps,
    }
    record = _read_record(path, about)
    factors = FACTORS[: request.num_sizes]
    rows = Fields(path, record).rows("points")
    measured = {(row.text("curve"), row.number("factor")) for row in rows}
    todo = [(name, f) for name in curves for f in factors if (name, f) not in measured]
    if todo:
        runtime = open_runtime(request.device)
        with ThreadPoolExecutor(num_cores()) as pool:
            case = open_case(request, trained, data, runtime, pool)
            _note_calibration(record, folder.calibration_file)
            if record["unrounded_bpb"] is None:
                record["unrounded_bpb"] = case.price(trained.weights)
            _measure_all(case, curves, todo, record, path, progress)
    return record


def _read_record(path: Path, about: Mapping[str, Any]) -> dict[str, Any]:
    """The record of a stopped run, or an empty one."""
    if not path.exists():
        return {**about, "unrounded_bpb": None, "points": []}
    record: dict[str, Any] = RunFolder(path.parent).read_json(path)
    if any(record.get(key) != value for key, value in about.items()):
        raise RunError(f"{path} is of other weights, data or settings; choose another --out")
    return record


def _note_calibration(record: dict[str, Any], path: Path) -> None:
    """Refuse a second calibration: all points of a record are rounded with the same one."""
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if record.setdefault("calibration_sha256", digest) != digest:
        raise RunError(
            f"{path} is not the one that earlier points were made with; choose another --out"
        )


def open_case(
    request: Request, trained: Trained, data: DataFolder, runtime: Runtime, pool: Executor
) -> Case:
    """The trained weights with their calibration and the text to price them on."""
    compressor = find_compressor(request.zpaq)
    tuning = tune.Settings(steps=request.tune_steps)
    measured = _calibrate(RunFolder(request.run), trained, data, runtime)
    costs = sensitivities(measured.calibration, measured.fisher)
    part = trained.recipe.quant
    model, teacher = (build_model(trained.recipe).to(runtime.device) for _ in range(2))
    load(teacher, trained.weights)
    documents = first_documents(data.val, request.num_documents)
    return Case(
        trained=trained,
        measured=measured,
        solver=Solver(measured.calibration, costs, 1.0, runtime.device),
        model=model,
        teacher=teacher,
        text=training_text(trained.recipe, data, part.calibration_batches),
        tuning=tuning,
        validator=make_validator(trained.recipe, documents, runtime),
        runtime=runtime,
        compressor=compressor,
        pool=pool,
    )


def _calibrate(folder: RunFolder, trained: Trained, data: DataFolder, runtime: Runtime) -> Measured:
    if folder.calibration_file.exists():
        measured = read_measured(folder.calibration_file, runtime.device)
        if measured.about.get("weights_sha256") == trained.sha256:
            return measured
    return calibrate_run(folder, data, runtime)


def _measure_all(
    case: Case,
    curves: Mapping[str, Curve],
    todo: Sequence[tuple[str, float]],
    record: dict[str, Any],
    path: Path,
    progress: Progress,
) -> None:
    """Round and price one point after another; threads count the bytes of the earlier ones."""
    num_before, lock = len(record["points"]), Lock()

    def finish(tensors: QuantizedModel, point: Point) -> None:
        counted = _count_point(case, curves[point.curve], tensors, point)
        with lock:
            record["points"].append(counted.as_dict())
            write_json(path, record)

    def show(remark: str) -> None:
        task.update(len(record["points"]) - num_before, remark)

    counting: list[Future[None]] = []
    with (
        progress.task("curves", len(todo)) as task,
        ThreadPoolExecutor(NUM_COUNTERS) as counters,
    ):
        for name, factor in todo:
            show(f"rounding ({name}) x {factor:g}")
            bpb = record["unrounded_bpb"]
            rounded = _round_point(case, name, curves[name], factor, bpb)
            counting.append(counters.submit(finish, *rounded))
            # Raise the error of a failed count at once, not after all points are rounded.
            for done in (future for future in counting if future.done()):
                done.result()
        for future in counting:
            show("counting")
            future.result()


def _round_point(
    case: Case, name: str, curve: Curve, factor: float, unrounded_bpb: float
) -> tuple[QuantizedModel, Point]:
    started = time.perf_counter()
    tensors = curve.round(case, factor)
    seconds = time.perf_counter() - started
    bpb = case.price({n: dequantize(tensor) for n, tensor in tensors.items()})
    num_weights = sum(w.size for w in case.trained.weights.values())
    gap = bpb - unrounded_bpb
    return tensors, Point(name, factor, {}, num_weights, bpb, gap, round_seconds=seconds)


def _count_point(case: Case, curve: Curve, tensors: QuantizedModel, point: Point) -> Point:
    started = time.perf_counter()
    parts, remark = curve.count(case, tensors)
    seconds = time.perf_counter() - started
    return replace(point, parts=parts, remark=remark, count_seconds=seconds)


def write_results(record: dict[str, Any], out: Path) -> str:
    """Compare the curves; write table and plot into `out`, return the table."""
    points = [read_point(row) for row in record["points"]]
    curves = group_points(points)
    base = curves[BASE]
    against = {name: [asdict(c) for c in compare(curve, base)] for name, curve in curves.items()}
    write_json(out / "quant_curves.json", {**record, "against_b": against})
    titles = {name: curve.what for name, curve in CURVES.items()}
    table = write_table(points, titles, BASE, record["unrounded_bpb"])
    write_atomic(out / "quant_curves.md", table)
    write_atomic(out / "quant_curves.svg", draw_plot(points, titles))
    return table
