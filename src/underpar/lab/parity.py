"""Parity: does training with compiler, kernels and large micro-batches match simple code?

Three runs of one seed on the same tokens:

    fast    as a GPU trains by default
    plain   the same without compiler and fast attention
    split   plain with smaller micro-batches; its distance from plain shows the effect of rounding
            and of more cuts of documents alone

`underpar lab parity` calls this; a call with the same arguments continues what was stopped.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from underpar.build.levers import resolve_levers
from underpar.core.progress import SILENT, Progress
from underpar.core.run_folder import RunFolder, write_json
from underpar.core.runtime import open_runtime
from underpar.errors import BenchError, RunError
from underpar.lab.runs import Job, Launch, launcher, read_conditions, read_tail, run_jobs
from underpar.recipe import load_recipe

# Torch's own attention: the reference backend would store every score of a batch.
PLAIN = ("--no-compile", "--attention", "sdpa")
# Differences of mean losses, in nats per token: above the first one a run never passes, below the
# second one a difference counts as nothing.
LARGEST_NATS = 0.005
NOTHING_NATS = 0.001


@dataclass(frozen=True)
class Variant:
    """One of the runs: micro-batches per step, and options of `underpar train`."""

    num_micro_batches: int
    options: tuple[str, ...] = ()


# Fast and plain read the same micro-batch; without a compiler it takes about 80 GB in pr2014.
VARIANTS = {"fast": Variant(1), "plain": Variant(1, PLAIN), "split": Variant(4, PLAIN)}


@dataclass(frozen=True)
class Request:
    """What to train, on which data, for how many steps, and where the runs go."""

    recipe: str
    data: Path
    out: Path
    overrides: tuple[str, ...] = ()
    num_steps: int = 200
    batch_tokens: int = 98_304
    device: str = "cuda"

    def __post_init__(self) -> None:
        if self.num_steps < 4:
            raise BenchError(f"{self.num_steps} steps have no last quarter; use at least 4")
        most = max(variant.num_micro_batches for variant in VARIANTS.values())
        if self.batch_tokens < 1 or self.batch_tokens % most:
            raise BenchError(f"{self.batch_tokens} tokens per step: expected a multiple of {most}")


def run_parity(
    request: Request, progress: Progress = SILENT, launch: Launch | None = None
) -> dict[str, Any]:
    """Make the runs that are not finished, one at a time; write and return OUT/parity.json.

    It holds losses, their differences and the verdict. `launch` replaces the processes that train.
    """
    if launch is None:
        # Refuses a device that is not there, before any folder is made.
        open_runtime(request.device)
        launch = launcher(request.recipe, request.data, request.out, request.device)
    jobs = [make_job(request, name) for name in VARIANTS]
    for job in jobs:
        _claim(request, job)

    def on_end(job: Job, code: int) -> None:
        _refuse_unfinished(request, job, code)
        progress.note(f"{job.name}: trained")

    waiting = [job for job in jobs if not _is_done(request, job)]
    run_jobs(waiting, launch, 1, on_end)
    result = _describe_result(request)
    write_json(request.out / "parity.json", result)
    return result


def _describe_result(request: Request) -> dict[str, Any]:
    runs = {name: _describe(request, name) for name in VARIANTS}
    return {
        "recipe": request.recipe,
        "overrides": list(request.overrides),
        "steps": request.num_steps,
        "batch_tokens": request.batch_tokens,
        "runs": runs,
        **judge(*(runs[name]["loss_nats"] for name in VARIANTS)),
        **read_conditions(_folder(request, "fast")),
    }


def judge(fast: float, plain: float, split: float) -> dict[str, Any]:
    """Differences of mean losses, in nats per token, and "pass" or "fail"."""
    ours, rounding = fast - plain, plain - split
    # The difference of two runs is noisy, and `rounding` may be almost 0 by chance. If both
    # differences are almost 0, neither is evidence.
    both_nothing = abs(ours) < NOTHING_NATS and abs(rounding) < NOTHING_NATS
    within = abs(ours) <= LARGEST_NATS and abs(ours) <= abs(rounding)
    return {
        "fast_minus_plain_nats": ours,
        "plain_minus_split_nats": rounding,
        "verdict": "pass" if within or both_nothing else "fail",
    }


def mean_last_loss(folder: RunFolder, num_steps: int) -> float:
    """Mean nats per token of the last quarter of a run's steps, each of which is logged."""
    first = num_steps - num_steps // 4
    losses = {line["step"]: line["loss"] for line in folder.metrics("loss") if line["step"] > first}
    if sorted(losses) != list(range(first + 1, num_steps + 1)):
        raise RunError(
            f"{folder.metrics_file} lacks some of the steps {first + 1} to {num_steps}; remove "
            "its folder and run the same command again"
        )
    return fmean(losses.values())


def make_job(request: Request, name: str) -> Job:
    """The run of one variant."""
    num = VARIANTS[name].num_micro_batches
    budgets = ("seconds", "tokens", "flops")
    part = {f"budget_{budget}": "0" for budget in budgets} | {"reserve_seconds": "0"}
    part |= {"budget_steps": str(request.num_steps), "log_every": "1"}
    # Sizes and contexts that micro-batches take in turn would differ between the runs.
    part |= {"micro_sizes": "[]", "contexts": "[]", "num_micro_batches": str(num)}
    part |= {"micro_batch_tokens": str(request.batch_tokens // num)}
    overrides = (*request.overrides, *(f"train.{key}={value}" for key, value in part.items()))
    recipe = resolve_levers(load_recipe(request.recipe, overrides))
    return Job(name, overrides, recipe.hash, VARIANTS[name].options)


def _folder(request: Request, name: str) -> RunFolder:
    return RunFolder(request.out / name)


def _claim(request: Request, job: Job) -> None:
    """Write down which run a folder belongs to; refuse the folder of another run.

    The recipe alone does not tell: variants differ in options of the command.
    """
    folder = _folder(request, job.name)
    path = folder.path / "parity.json"
    about = {"recipe_hash": job.recipe_hash, "data": str(request.data), "device": request.device}
    about |= {"options": " ".join(job.options)}
    if path.exists() and folder.read_json(path) != about:
        raise RunError(f"{path} is of another recipe, data or device; choose another --out")
    write_json(path, about)


def _is_done(request: Request, job: Job) -> bool:
    # Training writes this file last.
    return _folder(request, job.name).validation_file.exists()


def _refuse_unfinished(request: Request, job: Job, code: int) -> None:
    folder = request.out / job.name
    if not _is_done(request, job):
        why = f"exit code {code}" if code else "stopped before its end"
        # An error is one line: of the log, the last one.
        raise RunError(f"run {folder} failed, {why}: {read_tail(folder, 1)}")


def _describe(request: Request, name: str) -> dict[str, Any]:
    folder = _folder(request, name)
    about = folder.read_json(folder.about_file)
    return {
        "micro_batches": VARIANTS[name].num_micro_batches,
        "compiled": about.get("compiled"),
        "attention": folder.read_json(folder.validation_file).get("attention"),
        "loss_nats": mean_last_loss(folder, request.num_steps),
    }
