"""What the counted script runs: score an artifact on a data folder and print the result as JSON."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from underpar.build import build_predictor, read_artifact
from underpar.data.folder import load_data
from underpar.runtime import Clock, open_runtime
from underpar.score.score import Scorer


def main(argv: list[str] | None = None) -> None:
    """`script ARTIFACT DATA [adapt]`."""
    arguments = sys.argv[1:] if argv is None else argv
    clock, runtime = Clock("load"), open_runtime()
    artifact, _ = read_artifact(Path(arguments[0]))
    predictor = build_predictor(artifact, runtime.device)
    scorer = Scorer(predictor, load_data(Path(arguments[1])).val, runtime, clock)
    score = scorer.run(artifact.recipe.score, adapt=arguments[2:] == ["adapt"])
    print(json.dumps(score.as_dict()))
