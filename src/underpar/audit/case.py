"""What the audit judges: an artifact, its data and its scores, and how to repeat the scores."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from underpar.codec.stream import Codec
from underpar.core.runtime import Runtime
from underpar.data.folder import DataFolder
from underpar.data.shards import Shard
from underpar.infer.predictor import Predictor
from underpar.infer.tilt import Mixture
from underpar.recipe import Recipe
from underpar.score.ledger import Score
from underpar.score.tally import OnCommit

# Scores another shard by the method of a score, and reports every price.
Rescore = Callable[[Score, Shard, OnCommit], Score]


@dataclass(frozen=True)
class Case:
    """Everything the rules look at."""

    recipe: Recipe
    # A predictor whose matrix products run in the given precision; fp32 without one.
    open_predictor: Callable[..., Predictor]
    rescore: Rescore
    # The experts of a score's method, with the settings of that score.
    open_mixture: Callable[[Score], Mixture]
    codec: Codec
    artifact_file: Path
    code_bytes: int
    data: DataFolder
    scores: dict[str, Score]
    runtime: Runtime
    # Seconds with training text, by stage: training, calibration, tuning.
    spent_seconds: dict[str, float]
    # Documents are coded in stream order until this many tokens; 0 codes all of them.
    code_tokens: int = 0
