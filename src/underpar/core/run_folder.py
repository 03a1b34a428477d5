"""The run folder: name and schema of every file a run leaves. The only thing stages share."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from underpar.errors import RunError
from underpar.recipe import Recipe, read_recipe_file, to_toml


def write_atomic(path: Path, data: bytes | str) -> None:
    """Write to a temporary name beside `path`, flush to disk, rename: whole or not at all."""
    if path.is_dir():
        raise RunError(f"{path} is a folder; give the name of a file")
    raw = data.encode() if isinstance(data, str) else data
    path.parent.mkdir(parents=True, exist_ok=True)
    # One name a file: what a kill leaves behind, the next write takes over.
    temporary = path.with_name(f".{path.name}.part")
    try:
        with temporary.open("wb") as file:
            file.write(raw)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def write_json(path: Path, value: Any) -> None:
    """`value` as indented JSON, atomically."""
    write_atomic(path, json.dumps(value, indent=1) + "\n")


@dataclass(frozen=True)
class RunFolder:
    """Paths of one run.

    recipe.toml      the resolved recipe
    run.json         recipe hash, data and their identity, versions, device
    metrics.jsonl    one line a logged step
    events.out.tfevents.*    the same for TensorBoard, one file a start
    checkpoint.safetensors   everything a resumed run needs
    broken.safetensors       the batches of a step whose loss broke
    weights.safetensors      what training hands to packing
    validation.json  bits per byte of the held-out text before weights are quantized
    tokenizer.model  the tokenizer it was trained with
    calibration.safetensors  what its matrices meet, and how much their errors cost
    quantized.safetensors    integers and steps, before they are entropy-coded
    model.upar       the artifact
    budget.json      where its bytes go
    score-*.json     one file a scoring method, with the ledger of each document
    score-*.partial  what a stopped scoring continues from
    audit.json       findings
    report.html      all of it on one page
    """

    path: Path

    @property
    def recipe_file(self) -> Path:
        """The resolved recipe."""
        return self.path / "recipe.toml"

    @property
    def about_file(self) -> Path:
        """What was run, on what."""
        return self.path / "run.json"

    @property
    def metrics_file(self) -> Path:
        """One JSON line a logged step."""
        return self.path / "metrics.jsonl"

    @property
    def checkpoint_file(self) -> Path:
        """The state a killed run resumes from."""
        return self.path / "checkpoint.safetensors"

    @property
    def weights_file(self) -> Path:
        """Final weights, averaged where the recipe averages."""
        return self.path / "weights.safetensors"

    @property
    def validation_file(self) -> Path:
        """Bits per byte of live and averaged weights, before they are quantized."""
        return self.path / "validation.json"

    @property
    def tokenizer_file(self) -> Path:
        """The tokenizer of the training data."""
        return self.path / "tokenizer.model"

    @property
    def calibration_file(self) -> Path:
        """Second moments of inputs, mean squares of gradients."""
        return self.path / "calibration.safetensors"

    @property
    def quantized_file(self) -> Path:
        """The rounded model."""
        return self.path / "quantized.safetensors"

    @property
    def artifact_file(self) -> Path:
        """The packed model."""
        return self.path / "model.upar"

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
        """Score of one method."""
        return self.path / f"score-{method}.json"

    def partial_file(self, method: str) -> Path:
        """What a stopped scoring continues from; other ranks have theirs beside it."""
        return self.path / f"score-{method}.partial"

    def score_files(self) -> list[Path]:
        """Scores that exist, by name."""
        return sorted(self.path.glob("score-*.json"))

    def write_recipe(self, recipe: Recipe) -> None:
        """Store the resolved recipe."""
        write_atomic(self.recipe_file, to_toml(recipe))

    def read_recipe(self) -> Recipe:
        """The recipe this run was trained with."""
        return read_recipe_file(self.need(self.recipe_file))

    def read_json(self, path: Path) -> Any:
        """A JSON file of this run; a missing or damaged one is named."""
        try:
            return json.loads(self.need(path).read_text())
        except ValueError as error:
            raise RunError(f"{path} is not valid JSON ({error}); run its stage again") from error

    def metrics(self) -> Iterator[dict[str, Any]]:
        """Logged steps in order. A last line cut short by a kill is left out."""
        if not self.metrics_file.exists():
            return
        with self.metrics_file.open() as lines:
            for line in lines:
                if line.endswith("\n"):
                    yield json.loads(line)

    def need(self, path: Path) -> Path:
        """`path` if it exists, else an error that names the command that writes it."""
        if path.exists():
            return path
        makers = {
            self.recipe_file: "train",
            self.about_file: "train",
            self.weights_file: "train",
            self.validation_file: "train",
            self.tokenizer_file: "train",
            self.calibration_file: "calibrate",
            self.quantized_file: "quantize",
            self.artifact_file: "pack",
            self.budget_file: "pack",
            self.audit_file: "audit",
        }
        verb = makers.get(path, "score")
        raise RunError(f"{path} does not exist; run 'underpar {verb}' first")
