"""What the counted script runs: score an artifact on a data folder and print the result as JSON."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from underpar.build import build_predictor, read_artifact, require_same_tokenizer
from underpar.data.folder import load_data
from underpar.runtime import Clock, open_runtime
from underpar.score.score import Scorer
from underpar.train.dist import process_group


def main(argv: list[str] | None = None) -> None:
    """`script ARTIFACT DATA [adapt]`, on one rank or under torchrun."""
    arguments = sys.argv[1:] if argv is None else argv
    if len(arguments) < 2:
        raise SystemExit("usage: script ARTIFACT DATA [adapt]")
    clock, runtime = Clock("load"), open_runtime()
    artifact, _ = read_artifact(Path(arguments[0]))
    predictor = build_predictor(artifact, runtime.device)
    data = load_data(Path(arguments[1]))
    require_same_tokenizer(artifact, data.tokenizer)
    with process_group(runtime):
        scorer = Scorer(predictor, data.val, runtime, clock)
        score = scorer.run(artifact.recipe.score, adapt=arguments[2:] == ["adapt"])
    if runtime.is_main:
        print(json.dumps(score.as_dict()))
