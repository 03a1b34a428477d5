"""The run scripts: their commands and options exist, and the laptop's runs from end to end."""

import os
import re
import shlex
import subprocess
import sys
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import typer

from underpar.cli import app
from underpar.data.sources.corpus import demo_corpus, read_documents

EXAMPLES = Path(__file__).parents[2] / "examples"
SCRIPTS = sorted(EXAMPLES.glob("*.sh"))
TINY = {
    "model.vocab_size": 400,
    "model.num_layers": 2,
    "model.dim": 32,
    "model.mlp_dim": 64,
    "model.context": 64,
    "levers.bigram.buckets": 256,
    "train.context": 64,
    "train.budget_steps": 4,
    "train.micro_batch_tokens": 256,
    "quant.calibration_batches": 2,
    "quant.calibration_batch_tokens": 256,
    "limits.cap_bytes": 200_000,
}


def commands_of(script: Path) -> list[list[str]]:
    lines = [line for line in script.read_text().splitlines() if line.startswith("underpar ")]
    return [shlex.split(line)[1:] for line in lines]


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.stem)
def test_the_commands_of_a_script_exist(script: Path) -> None:
    subprocess.run(["bash", "-n", script], check=True)
    commands = commands_of(script)
    assert len(commands) >= 8
    for words in commands:
        command: Any = typer.main.get_command(app)
        while hasattr(command, "commands"):
            command = command.commands[words.pop(0)]
        options = {name for parameter in command.params for name in parameter.opts}
        named = {word for word in words if word.startswith("--")}
        assert named <= options, f"{script.name}: {command.name} has no {named - options}"


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.stem)
def test_every_command_of_a_script_has_a_comment(script: Path) -> None:
    for block in re.split(r"\n\n+", script.read_text()):
        if re.search(r"^underpar ", block, re.MULTILINE):
            assert block.startswith("# "), block


@pytest.mark.slow
def test_the_laptop_script_runs(tmp_path: Path) -> None:
    (tmp_path / "texts").mkdir()
    for number, document in enumerate(islice(read_documents([demo_corpus()]), 60)):
        (tmp_path / "texts" / f"{number}.txt").write_text(document.text[:500])
    changes = [word for key, value in TINY.items() for word in ("--set", f"{key}={value}")]
    path = os.pathsep.join((str(Path(sys.executable).parent), os.environ["PATH"]))
    subprocess.run(
        ["bash", EXAMPLES / "laptop.sh", tmp_path / "out", tmp_path / "texts", *changes],
        check=True,
        env=os.environ | {"PATH": path},
    )
    run = tmp_path / "out" / "run"
    assert (run / "report.html").stat().st_size > 10_000
    assert (tmp_path / "out" / "laptop.back").read_bytes() == (EXAMPLES / "laptop.sh").read_bytes()
