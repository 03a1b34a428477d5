"""What the tests of commands share."""

import sys
from collections.abc import Callable

import pytest

from underpar.cli import main

Fails = Callable[..., str]


@pytest.fixture
def fails(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Fails:
    """A function that gives the one line of a command that must be refused with exit code 2."""

    def run_main(*words: object) -> str:
        monkeypatch.setattr(sys, "argv", ["underpar", *map(str, words)])
        with pytest.raises(SystemExit) as caught:
            main()
        captured = capsys.readouterr()
        assert (caught.value.code, captured.out) == (2, "")
        assert len(captured.err.strip().splitlines()) == 1
        return captured.err

    return run_main
