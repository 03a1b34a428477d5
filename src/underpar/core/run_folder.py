"""The run folder: the name of every file of a run. Stages share nothing else.

A stage reads files of the stages before it and writes its own, so each can be run again alone.
"""

from __future__ import annotations

import errno
import glob
import itertools
import json
import os
import re
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from underpar.core.fields import Fields, read_fields, read_lines
from underpar.core.makers import maker_of
from underpar.errors import RunError
from underpar.recipe import Recipe, read_recipe_file, to_toml

# Tells the temporary files of this process from those of an earlier one with the same number.
_START = uuid.uuid4().hex[:8]
_NUMBERS = itertools.count()


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Inside, an error of the system such as a full disk names `path` in one line."""
    try:
        yield
    except OSError as error:
        why = error.strerror or error
        raise RunError(f"{path} cannot be written: {why}; no file was replaced") from error


def write_atomic(path: Path, data: bytes | str) -> None:
    """Write a file whole or not at all: to a temporary name beside it, to disk, then rename.

    A link at `path` is replaced by the file; what it points to stays as it was.
    """
    if path.exists() and not path.is_file():
        kind = "a folder" if path.is_dir() else "a device"
        raise RunError(f"{path} is {kind}; give the name of a file")
    raw = data.encode() if isinstance(data, str) else data
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        _remove_leftovers(path)
        name = f"{_prefix(path)}{os.getpid()}-{_START}-{next(_NUMBERS)}.part"
        temporary = path.with_name(name)
        try:
            # Created here or refused: neither a link nor a file of another process is written to.
            with temporary.open("xb") as file:
                file.write(raw)
                file.flush()
                os.fsync(file.fileno())
            rename_to_stay(temporary, path)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise


def rename_to_stay(source: Path, target: Path) -> None:
    """Rename a file or folder, and wait until the disk has the new name."""
    os.replace(source, target)
    wait_for_disk(target.parent)


def wait_for_disk(path: Path) -> None:
    """Wait until the content of a file, or the names in a folder, would survive a loss of power."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        # Some network file systems cannot do this for folders.
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
    finally:
        os.close(descriptor)


def _prefix(path: Path) -> str:
    # Shortened, because a name may have 255 bytes at most.
    return f".{path.name:.50}."


def _remove_leftovers(path: Path) -> None:
    """Remove the temporary files that killed writes of `path` left."""
    for file in path.parent.glob(f"{glob.escape(_prefix(path))}*.part"):
        match = re.fullmatch(r"([0-9]{1,9})-(\w+)-[0-9]+\.part", file.name[len(_prefix(path)) :])
        if match and not _is_running(int(match[1]), match[2]):
            file.unlink(missing_ok=True)


def _is_running(process: int, start: str) -> bool:
    if process == os.getpid():
        return start == _START
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True


def write_json(path: Path, value: Any) -> None:
    """Write `value` as indented JSON, whole or not at all."""
    write_atomic(path, json.dumps(value, indent=1) + "\n")


@dataclass(frozen=True)
class RunFolder:
    """Paths of one run.

    file                     written by   holds
    recipe.toml              train        the resolved recipe
    run.json                 train        recipe hash, data identity, versions, device
    metrics.jsonl            train        a line per logged step
    events.out.tfevents.*    train        the same for TensorBoard, a file per start
    checkpoint.safetensors   train        everything that a resumed run needs
    checkpoints/step-*       train        some of the checkpoints before it, for the audit
    evidence.jsonl           train        a hash chain over data, metrics, checkpoints and weights
    broken.safetensors       train        the batches of a step whose loss was not finite
    weights.safetensors      train        the final weights
    validation.json          train        bits per byte of held-out text, before quantization
    failure.json             train        why the run ended before its time
    tokenizer.model          train        the tokenizer of the training data
    calibration.safetensors  calibrate    inputs of the matrices, and what errors in them cost
    quantized.safetensors    quantize     integers and steps, before entropy coding
    model.upar               pack         the artifact
    score.py                 pack, score  the script that scores the artifact; its bytes are counted
    budget.json              pack         its bytes by tensor and by class
    score-*.json             score        a file per method, with a ledger of documents
    score-*.partial          score        the state of a stopped score
    exact-score.json         score        the score in exact mode, and its cost in bits
    audit.json               audit        verdict and findings
    report.html, .md         report       all of it on one page, and in short for pasting
    """

    path: Path

    @property
    def recipe_file(self) -> Path:
        """The resolved recipe."""
        return self.path / "recipe.toml"

    @property
    def about_file(self) -> Path:
        """Recipe hash, data identity, versions, device."""
        return self.path / "run.json"

    @property
    def metrics_file(self) -> Path:
        """A JSON line per logged step."""
        return self.path / "metrics.jsonl"

    @property
    def checkpoint_file(self) -> Path:
        """The state that a stopped run continues from."""
        return self.path / "checkpoint.safetensors"

    @property
    def evidence_file(self) -> Path:
        """The hash chain of training, an entry per line."""
        return self.path / "evidence.jsonl"

    def kept_file(self, step: int) -> Path:
        """The checkpoint that was kept of a step."""
        return self.path / "checkpoints" / f"step-{step}.safetensors"

    def kept_files(self) -> list[Path]:
        """The checkpoints that are kept, in no order."""
        return list((self.path / "checkpoints").glob("step-*.safetensors"))

    @property
    def weights_file(self) -> Path:
        """Final weights; averaged ones if the recipe averages."""
        return self.path / "weights.safetensors"

    @property
    def validation_file(self) -> Path:
        """Bits per byte of live and averaged weights, before they are quantized."""
        return self.path / "validation.json"

    @property
    def failure_file(self) -> Path:
        """Why training ended before its time; absent while it trains, and after a kill."""
        return self.path / "failure.json"

    @property
    def tokenizer_file(self) -> Path:
        """The tokenizer of the training data."""
        return self.path / "tokenizer.model"

    @property
    def calibration_file(self) -> Path:
        """Second moments of inputs and mean squares of gradients, per matrix."""
        return self.path / "calibration.safetensors"

    @property
    def quantized_file(self) -> Path:
        """The quantized model before entropy coding."""
        return self.path / "quantized.safetensors"

    @property
    def artifact_file(self) -> Path:
        """The packed model."""
        return self.path / "model.upar"

    @property
    def script_file(self) -> Path:
        """The counted script: scores the artifact without this package."""
        return self.path / "score.py"

    @property
    def budget_file(self) -> Path:
        """Bytes by tensor and class, code and tokenizer included."""
        return self.path / "budget.json"

    @property
    def audit_file(self) -> Path:
        """Findings of the audit."""
        return self.path / "audit.json"

    @property
    def report_file(self) -> Path:
        """The page for people."""
        return self.path / "report.html"

    def score_file(self, method: str) -> Path:
        """The score of one method."""
        return self.path / f"score-{method}.json"

    def partial_file(self, method: str) -> Path:
        """The state of a stopped score; other ranks have their own files beside it."""
        return self.path / f"score-{method}.partial"

    @property
    def exact_score_file(self) -> Path:
        """The score in exact mode."""
        return self.path / "exact-score.json"

    def score_files(self) -> list[Path]:
        """The scores that exist, sorted by name."""
        return sorted(self.path.glob("score-*.json"))

    def judged_files(self) -> list[Path]:
        """The files that an audit judges, as far as they exist."""
        files = [
            self.recipe_file,
            self.about_file,
            self.metrics_file,
            self.evidence_file,
            self.validation_file,
            self.tokenizer_file,
            self.weights_file,
            self.calibration_file,
            self.quantized_file,
            self.artifact_file,
            self.script_file,
            self.budget_file,
            *self.score_files(),
        ]
        return [file for file in files if file.is_file()]

    def write_recipe(self, recipe: Recipe) -> None:
        """Store the resolved recipe."""
        write_atomic(self.recipe_file, to_toml(recipe))

    def read_recipe(self) -> Recipe:
        """The recipe this run was trained with."""
        return read_recipe_file(self.need(self.recipe_file))

    def read_fields(self, path: Path) -> Fields:
        """The JSON object in a file of this run."""
        return read_fields(self.need(path))

    def read_json(self, path: Path) -> dict[str, Any]:
        """The same as a plain dictionary."""
        return self.read_fields(path).values

    def metrics(self, *needed: str) -> Iterator[dict[str, Any]]:
        """Logged steps in order, without a last line that a kill cut short.

        Every value is a number, and no line lacks its step or one of the keys `needed`.
        """
        if not self.metrics_file.exists():
            return
        for line in read_lines(self.metrics_file):
            line.count("step")
            for key in (*needed, *line.values):
                line.number(key)
            yield line.values

    def require_files(self) -> None:
        """Refuse a folder in which no stage has left a file."""
        files = (self.recipe_file, self.about_file, self.artifact_file)
        if not any(file.exists() for file in files):
            raise RunError(f"{self.path} is not a run folder; give the --out of 'underpar train'")

    def need(self, path: Path) -> Path:
        """`path` if it exists; else an error names the command that writes it."""
        if path.exists():
            return path
        raise RunError(f"{path} does not exist; run '{maker_of(path)}' first")


def run_at(path: Path) -> RunFolder:
    """The run folder at `path`, which may also be a file in it, such as its artifact."""
    return RunFolder(path.parent if path.is_file() else path)


def artifact_at(path: Path) -> Path:
    """The artifact at `path`, which may also be its run folder."""
    if path.is_dir():
        folder = RunFolder(path)
        folder.require_files()
        return folder.need(folder.artifact_file)
    if not path.exists():
        maker = maker_of(path) or "underpar pack RUN"
        raise RunError(f"{path} does not exist; run '{maker}' first")
    return path
