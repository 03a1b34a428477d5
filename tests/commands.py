"""Run commands of the command line inside the test's process."""

import json
from typing import Any

from click.testing import Result
from typer.testing import CliRunner

from underpar.cli import app


def invoke(*words: object) -> Result:
    """The result of a command, which may not raise."""
    return CliRunner().invoke(app, [str(word) for word in words], catch_exceptions=False)


def run(*words: object) -> str:
    """Standard output of a command that must succeed."""
    result = invoke(*words)
    assert result.exit_code == 0, result.output
    return result.stdout


def run_json(*words: object) -> dict[str, Any]:
    """What a command prints with --json."""
    parsed: dict[str, Any] = json.loads(run(*words, "--json"))
    return parsed
