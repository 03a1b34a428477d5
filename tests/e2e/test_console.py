"""Progress on the terminal: notes, hidden bars, silence on other ranks; rich stays in cli."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import underpar
from underpar.cli.console import open_progress
from underpar.core.progress import SILENT
from underpar.core.runtime import Runtime


def test_notes_go_to_standard_error_and_bars_only_to_a_terminal() -> None:
    code = (
        "from underpar.cli.console import Terminal\n"
        "progress = Terminal()\n"
        "with progress.task('work', 10) as task:\n"
        "    task.update(5, 'half')\n"
        "    progress.note('a [note]')\n"
    )
    process = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (process.returncode, process.stdout) == (0, "")
    assert "a [note]" in process.stderr and "half" not in process.stderr


@pytest.mark.parametrize("json", [False, True])
def test_other_ranks_are_silent(json: bool) -> None:
    cpu = torch.device("cpu")
    assert open_progress(json, Runtime(cpu, rank=1, world=2)) is SILENT
    assert open_progress(json, Runtime(cpu, rank=0, world=2)) is not SILENT


def test_silence_accepts_everything(capfd: pytest.CaptureFixture[str]) -> None:
    with SILENT.task("work", 10) as task:
        task.update(5, "half")
        SILENT.note("a note")
    assert capfd.readouterr() == ("", "")


def test_only_the_command_line_draws() -> None:
    source = Path(underpar.__file__).parent
    for path in source.rglob("*.py"):
        text = path.read_text()
        if "cli" not in path.relative_to(source).parts:
            drawing = re.search(r"\b(import|from) (rich|underpar\.cli\.)", text)
            assert drawing is None, path
