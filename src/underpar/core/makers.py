"""Which command writes which file: what to run if a file is missing or damaged."""

from __future__ import annotations

import re
import shlex
from fnmatch import fnmatch
from pathlib import Path

# Names of files, and the command that writes them into the run folder `{folder}`.
TRAIN = "train RECIPE --data DATA --out {folder}"
MAKERS = {
    "recipe.toml": TRAIN,
    "run.json": TRAIN,
    "metrics.jsonl": TRAIN,
    "evidence.jsonl": TRAIN,
    "validation.json": TRAIN,
    "weights.safetensors": TRAIN,
    "tokenizer.model": TRAIN,
    "calibration.safetensors": "calibrate {folder}",
    "quantized.safetensors": "quantize {folder}",
    "model.upar": "pack {folder}",
    "score.py": "pack {folder}",
    "budget.json": "pack {folder}",
    "score-*.json": "score {folder}{options}",
    "exact-score.json": "score {folder} --exact",
    "audit.json": "audit {folder}",
}


def maker_of(path: Path) -> str:
    """The command that writes a file, as in "underpar pack runs/mine"; empty if none is known."""
    commands = (words for name, words in MAKERS.items() if fnmatch(path.name, name))
    words = next(commands, "")
    folder, options = shlex.quote(str(path.parent)), _score_options(path.stem)
    return words and f"underpar {words.format(folder=folder, options=options)}"


def _score_options(stem: str) -> str:
    """The options with which `underpar score` writes a file of this name (`Method.label`)."""
    known = {"plain": "", "adapt": " --adapt", "flat": " --flat", "published": " --order published"}
    options = ""
    for part in stem.removeprefix("score-").split("+"):
        stride = re.fullmatch(r"sliding([0-9]+)", part)
        other = f" --stride {stride[1]}" if stride else f" --with {shlex.quote(part)}"
        options += known.get(part, other)
    return options


def again(path: Path) -> str:
    """What helps if a file is damaged."""
    maker = maker_of(path)
    return f"run '{maker}' again" if maker else "make it again"
