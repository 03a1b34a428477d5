"""What the audit judges: an artifact, its data and its scores, and how to repeat the scores."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from underpar.artifact.unpack import Artifact
from underpar.codec.adapted import Adaptation
from underpar.codec.stream import Codec
from underpar.core.run_folder import RunFolder
from underpar.core.runtime import Runtime
from underpar.data.folder import (
    MANIFEST_NAME,
    SPLITS,
    TOKENIZER_NAME,
    DataFolder,
    hash_file,
    read_manifest,
    shard_name,
)
from underpar.data.shards import Shard
from underpar.data.tokens.tokenizer import read_model
from underpar.errors import RuleError
from underpar.infer.predictor import Predictor
from underpar.infer.tilt import Mixture
from underpar.recipe import Recipe
from underpar.score.ledger import Score
from underpar.score.tally import OnCommit
from underpar.train.loop import Trainer

# Scores another shard by the method of a score, and reports every price.
Rescore = Callable[[Score, Shard, OnCommit], Score]
# The documents that were scored again, and their score.
Repeated = tuple[list[int], Score]


def hash_files(folder: RunFolder) -> dict[str, str]:
    """The SHA-256 of every file of a run that an audit judges, by name.

    A verdict holds for these files: a report of other files does not show it.
    """
    return {file.name: hash_file(file) for file in folder.judged_files()}


def changed_data_files(folder: Path, data: DataFolder) -> list[str]:
    """Names of files that are no longer those from which `data` was read."""
    stated = {
        shard_name(split): hash_file(folder / shard_name(split)) == data.manifest[split]["sha256"]
        for split in SPLITS
    }
    stated[TOKENIZER_NAME] = read_model(folder / TOKENIZER_NAME) == data.tokenizer.content
    stated[MANIFEST_NAME] = read_manifest(folder) == data.manifest
    return [name for name, is_same in stated.items() if not is_same]


@dataclass(frozen=True)
class Limits:
    """What the auditor allows. Limits that a recipe names for itself can only be tighter.

    The defaults are those of Parameter Golf: 16,000,000 bytes, 600 s to train, 600 s to score.
    """

    cap_bytes: int = 16_000_000
    train_seconds: float = 600.0
    score_seconds: float = 600.0
    # The SHA-256 that the data must have, in hex; "" accepts any data.
    data_sha256: str = ""

    def __post_init__(self) -> None:
        if self.data_sha256 and not re.fullmatch("[0-9a-fA-F]{64}", self.data_sha256):
            raise RuleError(f"data SHA-256 {self.data_sha256!r:.80}: expected 64 hex digits")
        # Written so that NaN is refused too.
        if not (self.cap_bytes > 0 and self.train_seconds > 0 and self.score_seconds > 0):
            raise RuleError(
                f"cap {self.cap_bytes}, seconds {self.train_seconds:g} and "
                f"{self.score_seconds:g}: expected more than 0"
            )


DEFAULT_LIMITS = Limits()


@dataclass(frozen=True)
class Case:
    """Everything the rules look at."""

    folder: RunFolder
    # Of the artifact as it was read, which is the one that every rule judges.
    artifact_sha256: str
    recipe: Recipe
    artifact: Artifact
    # A predictor whose matrix products run in the given precision; fp32 without one.
    open_predictor: Callable[..., Predictor]
    # A score's method on short text for probes, with settings that fit it.
    rescore: Rescore
    # The same with a model that knows next to nothing: its prices are nearly those of a uniform
    # choice from the given tokens.
    rescore_flat: Callable[[npt.NDArray[Any]], Rescore]
    # A score's method again, on the whole text or on some documents of it.
    repeat: Callable[[Score, Shard], Score]
    # The experts of a score's method, with the settings of that score.
    open_mixture: Callable[[Score], Mixture]
    # How a score's method adapts while it codes; a RuleError if it cannot be coded.
    open_adaptation: Callable[[Score], Adaptation]
    # A trainer of the run's recipe on the audited data, before its first step.
    open_trainer: Callable[[], Trainer]
    # The artifact made again from the weights, with the constant that packing found.
    pack_again: Callable[[], Artifact]
    # The script that must lie beside the artifact, byte for byte.
    expected_script: Callable[[], bytes]
    codec: Codec
    data: DataFolder
    data_path: Path
    # The scores that can be read and belong to this artifact, by label, and their whole files.
    scores: dict[str, Score]
    claims: Mapping[str, Mapping[str, Any]]
    # Score files that cannot be read or belong to another artifact: file name -> why.
    refused: Mapping[str, str]
    runtime: Runtime
    # Seconds with training text, by stage: training, calibration, tuning.
    spent_seconds: dict[str, float]
    limits: Limits = DEFAULT_LIMITS
    # Random choices of the audit. They are made after the files were read, so a run cannot know
    # them.
    rng: np.random.Generator = field(default_factory=np.random.default_rng)
    # Scores that the audit has repeated, by label, so that no rule repeats them twice.
    repeated: dict[str, Repeated] = field(default_factory=dict)
    # The number of random documents that are scored again if documents do not depend on each
    # other; 0 stands for all.
    num_documents: int = 0
    # The number of training steps that are taken again. None: all of them where they repeat bit for
    # bit, a few elsewhere.
    num_retrained: int | None = None
    # Random documents are coded until this many tokens; 0 codes all of them.
    code_tokens: int = 0
