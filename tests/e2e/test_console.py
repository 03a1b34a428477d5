"""Progress on the terminal: notes, hidden bars, silence on other ranks; rich stays in cli."""

import io
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import underpar
from underpar.cli import console
from underpar.cli.console import Lines, Pace, PlainConsole, Terminal, fit, open_progress
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


REMARK = (
    "step 12,000, loss 2.500, held-out 1.2345 BPB, heading for 1.1234 BPB, 15.98 MB, "
    "123,456 tokens/s, MFU 35%"
)


@pytest.mark.parametrize("width", [60, 80, 200])
def test_progress_fits_the_terminal(monkeypatch: pytest.MonkeyPatch, width: int) -> None:
    screen = io.StringIO()
    terminal = PlainConsole(file=screen, force_terminal=True, width=width, color_system=None)
    monkeypatch.setattr(console, "ERR", terminal)
    with Terminal().task("train", 50) as task:
        task.update(0, "first step")
        task.update(1, "step 1")
        task.update(20, REMARK)
    lines = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "\n", screen.getvalue()).split("\n")
    lines = [line.strip("\r") for line in lines]
    assert max(map(len, lines)) <= width
    bar = next(line for line in lines if "40 %" in line)
    assert bar.startswith("train ") and bar.count("\u2501") > 10 and bar.rstrip().endswith(" left")
    assert any("step 12,000, loss 2.500, held-out" in line for line in lines)
    assert any("MFU 35%" in line for line in lines) == (width == 200)


def test_notes_break_between_words(monkeypatch: pytest.MonkeyPatch) -> None:
    screen, words = io.StringIO(), "other processes use this machine: training is slower " * 3
    terminal = PlainConsole(file=screen, force_terminal=True, width=40, color_system=None)
    monkeypatch.setattr(console, "ERR", terminal)
    Terminal().note(words)
    lines = screen.getvalue().splitlines()
    assert max(map(len, lines)) <= 40 and " ".join(map(str.strip, lines)) == words.strip()


def test_a_remark_loses_its_last_parts_first() -> None:
    assert fit("one, two, three", 15) == "one, two, three"
    assert fit("one, two, three", 14) == "one, two"
    assert fit("abcdef", 4) == "abc\u2026"


def test_time_left_is_counted_from_the_first_report() -> None:
    pace = Pace()
    assert pace.left(0, 3) == ""
    # A run that continues at 60 % has not done so much in no time.
    assert pace.left(0.6, 10) == ""
    assert pace.left(0.7, 20) == "0:30 left"
    assert pace.left(1, 50) == ""


def test_a_log_has_a_line_per_tenth_of_long_tasks(capsys: pytest.CaptureFixture[str]) -> None:
    for seconds, num_lines in ((100, 10), (45, 4), (5, 0)):
        clock = Clock()
        lines = Lines("train", 200, clock)
        for i in range(201):
            clock.now = seconds * i / 200
            lines.update(i, f"step {i}")
        assert len(capsys.readouterr().err.splitlines()) == num_lines, seconds
    clock = Clock()
    lines = Lines("train", 1, clock)
    lines.update(0.1)
    clock.now = 20.0
    lines.update(0.5, "step 7")
    assert capsys.readouterr().err == "train 50 %, 0:25 left, step 7\n"


class Clock:
    """A clock that stands still until it is set."""

    now = 0.0

    def __call__(self) -> float:
        return self.now
