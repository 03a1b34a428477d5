"""How a command ends: exit codes, one line on standard error, and nothing that a terminal obeys."""

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch

import underpar.recipe
from underpar.cli import main
from underpar.cli.console import Terminal, show_table
from underpar.errors import RunError, one_line


def end_of(monkeypatch: pytest.MonkeyPatch, *words: str) -> object:
    """The exit code of a command."""
    monkeypatch.setattr(sys, "argv", ["underpar", *words])
    with pytest.raises(SystemExit) as caught:
        main()
    return caught.value.code


def fail_with(monkeypatch: pytest.MonkeyPatch, error: BaseException) -> None:
    """`underpar recipe list` then raises `error`."""

    def fail() -> None:
        raise error

    monkeypatch.setattr(underpar.recipe, "list_recipes", fail)


@pytest.mark.parametrize(
    ("error", "code", "words"),
    [
        (RunError("a damaged file"), 2, "error: a damaged file"),
        (OSError(28, "No space left on device", "/full/file"), 2, "/full/file"),
        (MemoryError("8 GiB"), 2, "--set train.micro_batch_tokens"),
        (torch.OutOfMemoryError("CUDA out of memory"), 2, "use smaller batches"),
        (TypeError("no foresight"), 70, "internal error: TypeError: no foresight"),
        (KeyError("key"), 70, "internal error: KeyError: 'key'"),
        (RecursionError("deep"), 70, "internal error: RecursionError: deep"),
        (BrokenPipeError(), 141, ""),
        (KeyboardInterrupt(), 130, ""),
    ],
)
def test_an_error_ends_with_its_code_and_one_line(
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    error: BaseException,
    code: int,
    words: str,
) -> None:
    fail_with(monkeypatch, error)
    assert end_of(monkeypatch, "recipe", "list") == code
    printed = capfd.readouterr().err
    assert words in printed and "Traceback" not in printed
    assert len(printed.splitlines()) == bool(words)


def test_debug_shows_the_traceback(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    fail_with(monkeypatch, TypeError("no foresight"))
    assert end_of(monkeypatch, "--debug", "recipe", "list") == 70
    printed = capfd.readouterr().err
    assert "Traceback" in printed and "in fail" in printed
    assert printed.splitlines()[-1].startswith("error: internal error: TypeError")


INTERRUPTS = {
    # Ctrl-C while the first library is imported.
    "start": """
        class Interrupt:
            def find_spec(self, name, path, target=None):
                if name == "typer":
                    os.kill(os.getpid(), signal.SIGINT)
        sys.meta_path.insert(0, Interrupt())
    """,
    # Another one while the interpreter ends.
    "end": "atexit.register(os.kill, os.getpid(), signal.SIGINT)",
}


@pytest.mark.parametrize(("moment", "code"), [("start", 130), ("end", 0)])
def test_an_interrupt_at_the_edges_shows_no_traceback(moment: str, code: int) -> None:
    program = f"""
import atexit, os, signal, sys
# A shell starts what runs in the background with Ctrl-C ignored.
signal.signal(signal.SIGINT, signal.default_int_handler)
{textwrap.dedent(INTERRUPTS[moment])}
from underpar.__main__ import main
sys.argv = ["underpar", "recipe", "list"]
main()
"""
    process = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert (process.returncode, process.stderr) == (code, "")


def test_a_reader_that_leaves_is_no_failed_audit() -> None:
    for words in (("recipe", "list"), ("recipe", "show", "demo", "--json")):
        reading, writing = os.pipe()
        os.close(reading)
        code = [sys.executable, "-m", "underpar", *words]
        process = subprocess.run(code, stdout=writing, stderr=subprocess.PIPE, text=True)
        os.close(writing)
        assert (process.returncode, process.stderr) == (141, "")


RUDE = "\x1b]0;title\x07[bold]a\nb\r\u202e" + "c" * 5000


def test_foreign_text_is_escaped_and_shortened(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    fail_with(monkeypatch, RunError(f"{RUDE}; the fix"))
    assert end_of(monkeypatch, "recipe", "list") == 2
    [line] = capfd.readouterr().err.splitlines()
    assert line.startswith(r"error: \x1b]0;title\x07[bold]a\nb\r\u202ec") and line.isprintable()
    assert line.endswith("; the fix") and len(line) < 1000
    assert one_line("a file [x].txt") == "a file [x].txt"


def test_tables_and_notes_show_no_terminal_sequences(capfd: pytest.CaptureFixture[str]) -> None:
    show_table(RUDE, ("name", "value#"), [(RUDE, 1), ("[red]x[/]", RUDE)])
    Terminal().note(RUDE)
    printed = "".join(capfd.readouterr())
    assert "[red]x[/]" in printed and all(c.isprintable() or c == "\n" for c in printed)


def test_a_long_hash_in_a_table_is_wrapped(capfd: pytest.CaptureFixture[str]) -> None:
    sha256 = "0123456789abcdef" * 16
    show_table("data", ("name", "evidence"), [("identity", sha256)])
    printed = "".join(c for c in capfd.readouterr().out if c in "0123456789abcdef")
    assert printed.endswith(sha256)


HOSTILE_TOML = [
    b"\xff\xfe", b"x = " + b"9" * 5000, b"x = " + b"[" * 5000, b"x = " + b"{a=" * 5000,
    b".".join([b"a"] * 5000) + b" = 1", b"[model]\ndim = 1" + b"0" * 400, b"base = 3",
    b"base = ['cpu']", b"[levers.smear]\ninit = 1979-05-27", b"[train]\nseed = nan",
    b"#" * (1 << 21), b"[model]\n\"\\u001b[2J\" = 1",
]  # fmt: skip


@pytest.mark.parametrize("content", HOSTILE_TOML, ids=range(len(HOSTILE_TOML)))
def test_hostile_recipes_are_refused_in_one_line(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    content: bytes,
) -> None:
    path = tmp_path / "hostile.toml"
    path.write_bytes(content)
    assert end_of(monkeypatch, "recipe", "show", str(path)) == 2
    [line] = capfd.readouterr().err.splitlines()
    assert line.startswith("error: ") and line.isprintable() and len(line) < 1000
