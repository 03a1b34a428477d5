"""What rounding costs at what size: the public way to store weights against ours, as curves.

    (a) int6 matrices and int7 embedding, rounded with GPTQ, symbols through lzma
    (b) the same symbols by groups through lrzip or zpaq, with low-rank corrections (PR 2014)
    (c) the symbols of (a) with our coder, which knows each row's and column's width
    (d) steps by what errors cost instead of fixed ones; d+ by column too
    (e) with a trellis of 8 states; e+ by column too
    (f) e+ with corrections that mind what errors cost, and control tensors tuned to the rest

All curves round the same trained weights of RUN with the same calibration, which is made and kept
in RUN where it is missing, and are priced on the same held-out documents. Bytes are those of
symbols, steps, corrections, control tensors and framing, without code and tokenizer: of (d) to (f)
the artifact that `underpar pack` would write, of (a) to (c) the sum of their parts. (b) takes its
rows sorted or not, whichever is smaller. It needs lrzip or zpaq on the PATH, or with --zpaq any
program that compresses its standard input. OUT gets quant_curves.json, with every point as soon as
it is measured, quant_curves.md and quant_curves.svg; a stopped run continues.
"""

from __future__ import annotations

import argparse
import hashlib
import sys
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from threading import Lock
from typing import Any

from underpar.audit.probes import first_documents
from underpar.build.model import build_model
from underpar.core.console import progress_bar
from underpar.core.run_folder import RunFolder, write_atomic, write_json
from underpar.core.runtime import Runtime, num_cores, open_runtime
from underpar.data.folder import DataFolder, data_identity, load_data
from underpar.errors import BenchError, RunError, UnderparError
from underpar.lab.published_coders import find_compressor
from underpar.lab.quant_case import CURVES, Case, load
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
from underpar.quant.calibration import TrainingText
from underpar.quant.files import Measured, read_measured
from underpar.quant.schemes import QuantizedModel, dequantize
from underpar.quant.solve import Solver
from underpar.stages.calibrate import Trained, calibrate_run, read_trained
from underpar.stages.train import make_validator

# Published widths of steps times one factor for all; the first ones are measured first.
FACTORS = (1.0, 1.25, 0.8, 1.6, 2.0, 0.64, 2.5, 0.5)
# The curve that others are compared with.
BASE = "b"
# Points whose bytes are counted while others are rounded.
NUM_COUNTERS = 8


@dataclass(frozen=True)
class Request:
    """Which weights are measured, on what, at how many sizes, and where results go."""

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


def measure(request: Request) -> dict[str, Any]:
    """Measure the points that OUT lacks; returns all that OUT/quant_curves.json then holds."""
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
    there = {(row["curve"], row["factor"]) for row in record["points"]}
    todo = [(name, f) for name in CURVES for f in factors if (name, f) not in there]
    if todo:
        runtime = open_runtime(request.device)
        with ThreadPoolExecutor(num_cores()) as pool:
            case = _open_case(request, trained, data, runtime, pool)
            _note_calibration(record, folder.calibration_file)
            if record["unrounded_bpb"] is None:
                record["unrounded_bpb"] = case.price(trained.weights)
            _measure_all(case, todo, record, path)
    return record


def _read_record(path: Path, about: Mapping[str, Any]) -> dict[str, Any]:
    """What a stopped run left, or the beginning of a new one."""
    if not path.exists():
        return {**about, "unrounded_bpb": None, "points": []}
    record: dict[str, Any] = RunFolder(path.parent).read_json(path)
    if any(record.get(key) != value for key, value in about.items()):
        raise RunError(f"{path} is of other weights, data or settings; choose another --out")
    return record


def _note_calibration(record: dict[str, Any], path: Path) -> None:
    """All points must be rounded with one calibration."""
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if record.setdefault("calibration_sha256", digest) != digest:
        raise RunError(
            f"{path} is not the one that earlier points were made with; choose another --out"
        )


def _open_case(
    request: Request, trained: Trained, data: DataFolder, runtime: Runtime, pool: Executor
) -> Case:
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
        text=TrainingText(data, part.calibration_batches, part.calibration_batch_tokens),
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
    case: Case, todo: Sequence[tuple[str, float]], record: dict[str, Any], path: Path
) -> None:
    """Round and price one point after another; bytes of earlier ones are counted meanwhile."""
    num_before, lock = len(record["points"]), Lock()

    def finish(tensors: QuantizedModel, point: Point) -> None:
        counted = _count_point(case, tensors, point)
        with lock:
            record["points"].append(counted.as_dict())
            write_json(path, record)

    def show(remark: str) -> None:
        bar.update(len(record["points"]) - num_before, remark)

    counting: list[Future[None]] = []
    with (
        progress_bar("curves", len(todo)) as bar,
        ThreadPoolExecutor(NUM_COUNTERS) as counters,
    ):
        for name, factor in todo:
            show(f"rounding ({name}) x {factor:g}")
            counting.append(
                counters.submit(finish, *_round_point(case, name, factor, record["unrounded_bpb"]))
            )
            # What failed is not waited for.
            for done in (future for future in counting if future.done()):
                done.result()
        for future in counting:
            show("counting")
            future.result()


def _round_point(
    case: Case, name: str, factor: float, unrounded_bpb: float
) -> tuple[QuantizedModel, Point]:
    started = time.perf_counter()
    tensors = CURVES[name].round(case, factor)
    seconds = time.perf_counter() - started
    bpb = case.price({own: dequantize(tensor) for own, tensor in tensors.items()})
    num_weights = sum(w.size for w in case.trained.weights.values())
    gap = bpb - unrounded_bpb
    return tensors, Point(name, factor, {}, num_weights, bpb, gap, round_seconds=seconds)


def _count_point(case: Case, tensors: QuantizedModel, point: Point) -> Point:
    started = time.perf_counter()
    parts, remark = CURVES[point.curve].count(case, tensors)
    seconds = time.perf_counter() - started
    return replace(point, parts=parts, remark=remark, count_seconds=seconds)


def read_request(words: Sequence[str] | None = None) -> Request:
    """The command line, or `words`, as a request."""
    parser = argparse.ArgumentParser(
        prog="python -m underpar.lab.quant_curves",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("run", type=Path, help="the folder of a trained run")
    parser.add_argument("--data", type=Path, required=True, help="its data folder")
    parser.add_argument("--out", type=Path, required=True, help="a folder for the results")
    factors = (
        f"sizes of each curve, up to {len(FACTORS)}: steps times {', '.join(map(str, FACTORS))}"
    )
    parser.add_argument("--sizes", type=int, default=Request.num_sizes, help=factors)
    documents = "held-out documents that are priced, the first ones; 0: all of them"
    parser.add_argument("--documents", type=int, default=Request.num_documents, help=documents)
    steps = "of tuning the control tensors of (f), each on a batch of the recipe's calibration text"
    parser.add_argument("--tune-steps", type=int, default=Request.tune_steps, help=steps)
    zpaq = "a program for (b) that compresses its standard input, in place of lrzip"
    parser.add_argument("--zpaq", type=Path, help=zpaq)
    parser.add_argument("--device", default=Request.device, help="auto, cpu, cuda or mps")
    found = parser.parse_args(words)
    where, sizes = (found.run, found.data, found.out), (found.sizes, found.documents)
    return Request(*where, *sizes, found.tune_steps, found.zpaq, found.device)


def write_results(record: dict[str, Any], out: Path) -> str:
    """Compare the curves; writes the table and the plot, and returns the table."""
    points = [read_point(row) for row in record["points"]]
    curves = group_points(points)
    base = curves[BASE]
    against = {name: [asdict(c) for c in compare(own, base)] for name, own in curves.items()}
    write_json(out / "quant_curves.json", {**record, "against_b": against})
    titles = {name: curve.what for name, curve in CURVES.items()}
    table = write_table(points, titles, BASE, record["unrounded_bpb"])
    write_atomic(out / "quant_curves.md", table)
    write_atomic(out / "quant_curves.svg", draw_plot(points, titles))
    return table


def main(words: Sequence[str] | None = None) -> int:
    """Measure, write and print; returns the exit code."""
    try:
        request = read_request(words)
        print(write_results(measure(request), request.out))
    except (UnderparError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
