"""Fast against plain: do compiler, kernels and large micro-batches train as simple code does?

Three runs of one seed on the same tokens: fast, as a GPU trains by default; plain, the same without
compiler and fast attention; split, which is plain in smaller micro-batches and shows what rounding
and more cuts of documents do by themselves.
`python -m underpar.lab.parity RECIPE --data DATA --out OUT` writes OUT/parity.json and continues
what was stopped. Exit codes: 0 pass, 1 fail, 2 a mistake.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from underpar.build.levers import resolve_levers
from underpar.core.run_folder import RunFolder, write_json
from underpar.errors import BenchError, RunError, UnderparError
from underpar.lab.ablate import LOG, Job, Launch, read_conditions, read_tail, run_jobs
from underpar.recipe import load_recipe

# Torch's own attention: the reference would hold every score of a batch.
PLAIN = ("--no-compile", "--attention", "sdpa")
# Differences of mean losses, in nats a token: what never passes, and what is nothing.
LARGEST_NATS = 0.005
NOTHING_NATS = 0.001


@dataclass(frozen=True)
class Variant:
    """One of the runs: into how many micro-batches a step is cut, and options of `train`."""

    num_micro_batches: int
    options: tuple[str, ...] = ()


# Fast and plain read the same micro-batch, of some 80 GB in pr2014 without a compiler.
VARIANTS = {"fast": Variant(1), "plain": Variant(1, PLAIN), "split": Variant(4, PLAIN)}


@dataclass(frozen=True)
class Request:
    """What is trained, on what, for how long, and where the runs go."""

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
            raise BenchError(f"{self.batch_tokens} tokens a step: expected a multiple of {most}")


def run_parity(request: Request, launch: Launch) -> dict[str, Any]:
    """Make the runs that are not finished yet, one at a time; losses, differences, verdict."""
    jobs = [_make_job(request, name) for name in VARIANTS]
    for job in jobs:
        _claim(request, job)
    waiting = [job for job in jobs if not _is_done(request, job)]
    run_jobs(waiting, launch, 1, lambda job, code: _end(request, job, code))
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


def launcher(request: Request) -> Launch:
    """Starts `underpar train` in a folder of its own below `out`, with a log beside its files."""

    def start(job: Job) -> subprocess.Popen[bytes]:
        folder = request.out / job.name
        words = [sys.executable, "-m", "underpar", "train", request.recipe, "--out", str(folder)]
        words += ["--data", str(request.data), "--device", request.device]
        words += VARIANTS[job.name].options
        words += [word for override in job.overrides for word in ("--set", override)]
        with (folder / LOG).open("ab") as log:
            return subprocess.Popen(
                words, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT
            )

    return start


def judge(fast: float, plain: float, split: float) -> dict[str, Any]:
    """Differences of mean losses, in nats a token, and "pass" or "fail"."""
    ours, rounding = fast - plain, plain - split
    # One difference of two runs is itself noise: the plain one may be next to nothing by chance,
    # so that where both are, neither says more than the other.
    both_nothing = abs(ours) < NOTHING_NATS and abs(rounding) < NOTHING_NATS
    within = abs(ours) <= LARGEST_NATS and abs(ours) <= abs(rounding)
    return {
        "fast_minus_plain_nats": ours,
        "plain_minus_split_nats": rounding,
        "verdict": "pass" if within or both_nothing else "fail",
    }


def mean_last_loss(folder: RunFolder, num_steps: int) -> float:
    """Mean nats a token of the last quarter of a run's steps, each of which is logged."""
    first = num_steps - num_steps // 4
    losses = {line["step"]: line["loss"] for line in folder.metrics() if line["step"] > first}
    if sorted(losses) != list(range(first + 1, num_steps + 1)):
        raise RunError(
            f"{folder.metrics_file} lacks some of the steps {first + 1} to {num_steps}; remove "
            "its folder and train again"
        )
    return fmean(losses.values())


def _make_job(request: Request, name: str) -> Job:
    num = VARIANTS[name].num_micro_batches
    budgets = ("seconds", "tokens", "flops")
    part = {f"budget_{budget}": "0" for budget in budgets} | {"reserve_seconds": "0"}
    part |= {"budget_steps": str(request.num_steps), "log_every": "1"}
    # Sizes and contexts that micro-batches take in turn would be others in each run.
    part |= {"micro_sizes": "[]", "contexts": "[]", "num_micro_batches": str(num)}
    part |= {"micro_batch_tokens": str(request.batch_tokens // num)}
    overrides = (*request.overrides, *(f"train.{key}={value}" for key, value in part.items()))
    return Job(name, overrides, resolve_levers(load_recipe(request.recipe, overrides)).hash)


def _folder(request: Request, name: str) -> RunFolder:
    return RunFolder(request.out / name)


def _claim(request: Request, job: Job) -> None:
    """Note what a folder's run is, as its recipe does not tell all; refuse another one's."""
    folder = _folder(request, job.name)
    path = folder.path / "parity.json"
    about = {"recipe_hash": job.recipe_hash, "data": str(request.data), "device": request.device}
    about |= {"options": " ".join(VARIANTS[job.name].options)}
    if path.exists() and folder.read_json(path) != about:
        raise RunError(f"{path} is of another recipe, data or device; choose another --out")
    write_json(path, about)


def _is_done(request: Request, job: Job) -> bool:
    # Written last.
    return _folder(request, job.name).validation_file.exists()


def _end(request: Request, job: Job, code: int) -> None:
    folder = request.out / job.name
    if not _is_done(request, job):
        why = f"exit code {code}" if code else "stopped before its end"
        raise RunError(f"run {folder} failed, {why}:\n{read_tail(folder)}")
    print(f"{job.name}: trained", file=sys.stderr, flush=True)


def _describe(request: Request, name: str) -> dict[str, Any]:
    folder = _folder(request, name)
    about = folder.read_json(folder.about_file)
    return {
        "micro_batches": VARIANTS[name].num_micro_batches,
        "compiled": about.get("compiled"),
        "attention": folder.read_json(folder.validation_file).get("attention"),
        "loss_nats": mean_last_loss(folder, request.num_steps),
    }


def read_request(words: Sequence[str] | None = None) -> Request:
    """The command line, or `words`, as a request."""
    parser = argparse.ArgumentParser(prog="python -m underpar.lab.parity", description=__doc__)
    parser.add_argument("recipe", help="a shipped recipe or a .toml file; overlays: pr2014+cpu")
    parser.add_argument("--data", type=Path, required=True, help="a data folder")
    parser.add_argument("--out", type=Path, required=True, help="a folder for runs and result")
    parser.add_argument("--set", action="append", default=[], help="change a recipe value")
    parser.add_argument("--steps", type=int, default=Request.num_steps)
    parser.add_argument("--batch-tokens", type=int, default=Request.batch_tokens)
    parser.add_argument("--device", default=Request.device, help="auto, cpu, cuda or mps")
    found = parser.parse_args(words)
    where = (found.recipe, found.data, found.out, tuple(found.set))
    return Request(*where, found.steps, found.batch_tokens, found.device)


def main(words: Sequence[str] | None = None) -> int:
    """Run, print and write the result; returns the exit code."""
    try:
        request = read_request(words)
        result = run_parity(request, launcher(request))
        write_json(request.out / "parity.json", result)
    except (UnderparError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(json.dumps(result, indent=1))
    return 0 if result["verdict"] == "pass" else 1


if __name__ == "__main__":
    sys.exit(main())
