"""Makes the runs of a measurement: recipes that are trained, packed and scored, each once.

`ablate.py`, `variants.py` and `experiments.py` say which figures they want and what the figures
show. Runs are processes, and so are packing and scoring. Each figure is recorded as soon as it is
there; a stopped measurement continues, here or, from the record alone, on another machine.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from underpar.build.levers import resolve_levers
from underpar.build.model import weight_shapes
from underpar.build.scoring import open_method
from underpar.core.fields import reading
from underpar.core.locks import lock_folder
from underpar.core.progress import SILENT, Progress
from underpar.core.run_folder import RunFolder
from underpar.core.runtime import open_runtime
from underpar.core.versions import device_name, versions
from underpar.data.folder import data_identity, load_data
from underpar.data.hold_out import priced_documents
from underpar.errors import BenchError, RecipeError, RunError
from underpar.lab.runs import Job, read_tail, run_jobs, start
from underpar.recipe import Recipe, load_recipe
from underpar.score.method import Method

if TYPE_CHECKING:
    import subprocess

Start = Callable[[Sequence[str], Path], "subprocess.Popen[bytes]"]
"""Starts `underpar` with some words; its output goes to a log in a folder."""


@dataclass(frozen=True)
class Figure:
    """Bits per byte of a recipe at the end of training or, with a method, packed and scored."""

    base: str
    job: Job
    """Trains the run: the base with changes."""
    method: Method | None = None
    change: tuple[str, ...] = ()
    """Settings of the method's levers."""

    @property
    def key(self) -> str:
        """Names the figure in records: the recipe, and how it is scored."""
        way = (self.method.label, *self.change) if self.method else ()
        return " ".join((self.job.recipe_hash, *way))

    @property
    def recipe(self) -> Recipe:
        """The recipe of the run."""
        return load_recipe(self.base, self.job.overrides)

    def check(self) -> None:
        """Refuse what cannot be built, or scored in this way."""
        recipe = resolve_levers(self.recipe)
        try:
            weight_shapes(recipe)
        except RecipeError as error:
            raise RecipeError(f"run {self.job.name!r} cannot be built: {error}") from error
        if self.method:
            open_method(recipe, self.method, self.change)

    def score_words(self) -> list[str]:
        """The options of `underpar score`."""
        method = self.method or Method()
        words = [word for name in method.levers for word in ("--with", name)]
        words += ["--stride", str(method.stride)] if method.stride else []
        words += ["--flat"] if method.flat else []
        words += [] if method.order == Method().order else ["--order", method.order]
        return words + [word for change in self.change for word in ("--set", change)]

    def read(self, folder: RunFolder) -> float | None:
        """The figure if it was measured, of the artifact that lies in the folder."""
        if not self.method:
            return read_bpb(folder)
        path = folder.score_file(self.method.label)
        if not (path.exists() and folder.budget_file.exists()):
            return None
        score, budget = folder.read_fields(path), folder.read_fields(folder.budget_file)
        is_of_it = score.text("artifact_sha256") == budget.text("artifact_sha256")
        return score.finite("bpb") if is_of_it else None


def make_job(base: str, overrides: tuple[str, ...], name: str = "") -> Job:
    """The run of a base with changes, in a folder named after its recipe or by `name`."""
    recipe = resolve_levers(load_recipe(base, overrides))
    stem = "+".join(Path(part).stem for part in base.split("+"))
    return Job(name or f"{stem}-{recipe.hash}", overrides, recipe.hash)


def read_bpb(folder: RunFolder) -> float | None:
    """Bits per byte at the end of a run, of its averaged weights if it has any; None before."""
    # Training writes this file last.
    path = folder.validation_file
    if not path.exists():
        return None
    tree = folder.read_fields(path)
    key = "live_bpb" if tree.values.get("average_bpb") is None else "average_bpb"
    if not math.isfinite(bpb := tree.number(key)):
        raise RunError(
            f"{path} says {bpb} bits per byte; remove its folder and run the same command again"
        )
    return bpb


@dataclass
class Allowance:
    """The time that may be used, and how long processes of each kind took so far."""

    seconds: float = math.inf
    expected: dict[str, float] = field(default_factory=dict)
    """Kind of process -> the longest that one of them took, in seconds."""
    now: Callable[[], float] = time.monotonic

    def __post_init__(self) -> None:
        if not self.seconds > 0:
            raise BenchError(f"{self.seconds:g} seconds are no time; give more than 0")
        self._end = self.now() + self.seconds

    def has_time(self, seconds: float) -> bool:
        """Whether something that takes so many seconds would end in time."""
        return self.now() + seconds <= self._end

    def took(self, kind: str, seconds: float) -> None:
        """Remember how long a process took."""
        self.expected[kind] = round(max(seconds, self.expected.get(kind, 0.0)), 1)


# Beside the budget of a recipe: the process, the compiler, and the prices of held-out text.
START_SECONDS = 90.0


def kind_of(stage: str, figure: Figure) -> str:
    """Names the processes that take as long as this one: stage, base, budget of the training."""
    part = figure.recipe.train
    budget = (part.budget_seconds, part.budget_tokens, part.budget_steps, part.budget_flops)
    return " ".join((stage, figure.base, *(f"{value:g}" for value in budget)))


def guess(stage: str, figure: Figure, allowance: Allowance) -> float | None:
    """Seconds that a process is expected to take; None if nothing says."""
    measured = allowance.expected.get(kind_of(stage, figure))
    if measured is not None:
        return measured
    budget = figure.recipe.train.budget_seconds
    return budget + START_SECONDS if stage == "train" and budget else None


@dataclass(frozen=True)
class Known:
    """What earlier runs left: figures by their keys, and how long processes took."""

    path: Path
    figures: dict[str, float]
    seconds: dict[str, float]
    tree: Mapping[str, Any]
    """The whole record."""


def read_known(path: Path, conditions: Mapping[str, Any]) -> Known:
    """What the record of earlier runs holds, made under the same `conditions`."""
    if not path.is_file():
        raise RunError(f"{path} does not exist; earlier runs leave a record of this name in --out")
    tree = RunFolder(path.parent).read_json(path)
    with reading(path, "it is not the record of a measurement"):
        figures = {str(key): float(value) for key, value in tree["figures"].items()}
        seconds = {str(key): float(value) for key, value in tree.get("seconds", {}).items()}
    for key, value in conditions.items():
        if tree.get(key) != value:
            raise RunError(f"{path} has {key} {tree.get(key)}, these runs have {value}")
    return Known(path, figures, seconds, tree)


@dataclass
class Measurement:
    """The figures that are wanted, what all of their runs share, and what is known of them."""

    wanted: list[Figure]
    data: Path
    out: Path
    device: str = "auto"
    num_at_once: int = 1
    allowance: Allowance = field(default_factory=Allowance)
    progress: Progress = SILENT
    start: Start = start
    conditions: dict[str, Any] = field(init=False)
    """Runs are compared with each other: they need the same device, versions and text."""
    figures: dict[str, float] = field(init=False, default_factory=dict)
    """Key -> bits per byte, of everything that was measured."""
    failed: dict[str, str] = field(init=False, default_factory=dict)
    """Name of a run -> why it has no figure."""

    def __post_init__(self) -> None:
        if self.num_at_once < 1:
            raise BenchError(f"{self.num_at_once} runs at once do nothing; use at least 1")
        opened = load_data(self.data, verify=False)
        for figure in self.wanted:
            self._require_own_share(figure)
            size = figure.recipe.model.vocab_size
            if size != opened.tokenizer.vocab_size:
                raise BenchError(
                    f"{figure.base} needs a vocabulary of {size:,}, {self.data} has "
                    f"{opened.tokenizer.vocab_size:,}; choose claims of one vocabulary with --claim"
                )
        self.conditions = {
            "device": device_name(open_runtime(self.device).device),
            "versions": versions(),
            "data_identity": data_identity(opened),
            "text": priced_documents(opened.manifest),
        }

    def _require_own_share(self, figure: Figure) -> None:
        """Refuse runs side by side with a budget of seconds: each would take fewer steps."""
        seconds = figure.recipe.train.budget_seconds
        if self.num_at_once > 1 and seconds:
            raise BenchError(
                f"{self.num_at_once} runs at once share the device, and {figure.base} has a budget "
                f"of {seconds:g} s; use --jobs 1, or --set train.budget_seconds=0 --set "
                "train.reserve_seconds=0 --set train.budget_steps=N"
            )

    def recall(self, name: str, known: Path | None) -> list[Known]:
        """Take over what `known`, if there is one, and OUT/NAME, if it exists, hold."""
        own = self.out / name
        paths = ([known] if known else []) + ([own] if own.exists() else [])
        found = [read_known(path, self.conditions) for path in paths]
        for earlier in found:
            self.figures |= earlier.figures
            for kind, seconds in earlier.seconds.items():
                self.allowance.took(kind, seconds)
        return found

    def record(self) -> dict[str, Any]:
        """What this measurement has to tell the next one."""
        seconds = dict(self.allowance.expected)
        return {**self.conditions, "seconds": seconds, "figures": dict(self.figures)}

    def folder(self, figure: Figure) -> RunFolder:
        """Where the run of a figure lies."""
        return RunFolder(self.out / figure.job.name)

    def run(self, on_figure: Callable[[], object]) -> dict[str, str]:
        """Measure what is missing; returns what failed. `on_figure` is called after each process.

        No process starts that the allowance has no time for. When this function is stopped, its
        processes stop too, and can be continued.
        """
        with lock_folder(self.out, create=True):
            left = [figure for figure in self.wanted if figure.key not in self.figures]
            for figure in left:
                self._refuse_other_run(figure)

            def look() -> None:
                for figure in left:
                    bpb = figure.read(self.folder(figure))
                    if bpb is not None:
                        self.figures[figure.key] = bpb
                on_figure()

            look()
            self._train(left, look)
            scored = [figure for figure in left if figure.method]
            self._pack(scored, look)
            self._score(scored, look)
        return self.failed

    def _train(self, figures: Sequence[Figure], look: Callable[[], None]) -> None:
        jobs = {}
        for figure in figures:
            folder = self.folder(figure)
            if read_bpb(folder) is None:
                # Nobody repeats the steps of these runs, so no checkpoint is kept for an audit.
                words = ["train", figure.base, "--data", str(self.data), "--out", str(folder.path)]
                words += ["--keep", "0"]
                words += [word for o in figure.job.overrides for word in ("--set", o)]
                # Figures of equal recipes share a run.
                jobs[figure.job.name] = figure, self._job(figure, words)
        self._run("train", [*jobs.values()], self.num_at_once, look)

    def _pack(self, figures: Sequence[Figure], look: Callable[[], None]) -> None:
        jobs = {}
        for figure in figures:
            folder = self.folder(figure)
            if read_bpb(folder) is not None and not folder.budget_file.exists():
                jobs[figure.job.name] = figure, self._job(figure, ["pack", str(folder.path)])
        self._run("pack", [*jobs.values()], self.num_at_once, look)

    def _score(self, figures: Sequence[Figure], look: Callable[[], None]) -> None:
        jobs = {}
        for figure in figures:
            folder = self.folder(figure)
            if folder.artifact_file.exists() and figure.read(folder) is None:
                words = ["score", str(folder.artifact_file), "--data", str(self.data)]
                jobs[figure.key] = figure, self._job(figure, words + figure.score_words())
        # A folder has one writer.
        self._run("score", [*jobs.values()], 1, look)

    def _job(self, figure: Figure, words: Sequence[str]) -> Job:
        return replace(figure.job, options=(*words, "--device", self.device))

    def _run(
        self,
        stage: str,
        work: Sequence[tuple[Figure, Job]],
        num_at_once: int,
        look: Callable[[], None],
    ) -> None:
        figures = {job: figure for figure, job in work}
        begun: dict[Job, float] = {}
        done = 0

        def may_start(job: Job) -> bool:
            # What was never measured starts if any time is left.
            fits = self.allowance.has_time(guess(stage, figures[job], self.allowance) or 0.0)
            if not fits:
                self.progress.note(f"{stage} {job.name}: no time left for it")
            return fits

        def launch(job: Job) -> subprocess.Popen[bytes]:
            begun[job] = self.allowance.now()
            return self.start(job.options, self.out / job.name)

        def on_end(job: Job, code: int) -> None:
            nonlocal done
            done += 1
            about = f"{stage} {done} of {len(figures)}, {job.name}"
            bpb = read_bpb(self.folder(figures[job]))
            if code or bpb is None:
                reason = f"exit code {code}" if code else "stopped before its end"
                self.failed[job.name] = f"{stage}: {reason}"
                tail = read_tail(self.out / job.name)
                self.progress.note(f"{about}: failed, {reason}\n{tail}")
            else:
                is_new = stage == "train"
                self.progress.note(f"{about}: {f'{bpb:.4f} bits per byte' if is_new else 'done'}")
                taken = self.allowance.now() - begun[job]
                self.allowance.took(kind_of(stage, figures[job]), taken)
            look()

        run_jobs([*figures], launch, num_at_once, on_end, may_start)

    def _refuse_other_run(self, figure: Figure) -> None:
        """Refuse a folder that holds the run of another recipe or of other data."""
        folder = self.folder(figure)
        if not folder.about_file.exists():
            return
        about = folder.read_json(folder.about_file)
        # The two hashes differ if micro-batches did not fit in memory.
        about["recipe_hash"] = about.get("asked_recipe_hash", about.get("recipe_hash"))
        wanted = {"recipe_hash": figure.job.recipe_hash}
        wanted["data_identity"] = self.conditions["data_identity"]
        for key, value in wanted.items():
            if about.get(key) != value:
                raise RunError(
                    f"{folder.path} holds a run with {key} {about.get(key)}, this one has {value}; "
                    "choose another --out"
                )
