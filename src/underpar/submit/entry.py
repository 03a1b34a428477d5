"""The program of the counted script: score an artifact on a data folder, print JSON."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path

from underpar.build.artifact import read_artifact, require_same_tokenizer
from underpar.build.scoring import ScoringRequest, open_method, run_method
from underpar.core.dist import process_group
from underpar.core.runtime import Clock, open_runtime
from underpar.data.folder import load_data
from underpar.errors import UnderparError
from underpar.score.method import ADAPT, PLAIN


def main(argv: list[str] | None = None) -> None:
    """`script ARTIFACT DATA [adapt]`, on one rank or under torchrun."""
    arguments = sys.argv[1:] if argv is None else argv
    if len(arguments) < 2:
        raise SystemExit("usage: script ARTIFACT DATA [adapt]")
    try:
        _score(arguments)
    except UnderparError as error:
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(2) from None


def _score(arguments: list[str]) -> None:
    clock, runtime = Clock("load"), open_runtime()
    artifact, _ = read_artifact(Path(arguments[0]))
    requested = ADAPT if arguments[2:] == ["adapt"] else PLAIN
    method, recipe = open_method(artifact.recipe, requested)
    data = load_data(Path(arguments[1]))
    require_same_tokenizer(artifact, data.tokenizer)
    with process_group(runtime):
        score = run_method(
            replace(artifact, recipe=recipe), data.val, ScoringRequest(method, runtime, clock)
        )
    if runtime.is_main:
        print(json.dumps(score.as_dict()))
