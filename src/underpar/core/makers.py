"""Which command writes which file: what to run if a file is missing or damaged."""

from __future__ import annotations

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
    "score-adapt.json": "score {folder} --adapt",
    "score-*.json": "score {folder}",
    "audit.json": "audit {folder}",
}


def maker_of(path: Path) -> str:
    """The command that writes a file, as in "underpar pack runs/mine"; empty if none is known."""
    commands = (words for name, words in MAKERS.items() if fnmatch(path.name, name))
    words = next(commands, "")
    return words and f"underpar {words.format(folder=path.parent)}"


def again(path: Path) -> str:
    """What helps if a file is damaged."""
    maker = maker_of(path)
    return f"run '{maker}' again" if maker else "make it again"
