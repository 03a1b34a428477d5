"""The command line: parse the words, call one function, show its result.

Each command imports what it needs when it runs, so that --help does not wait for torch.
Exit codes: 0 ok, 1 an audit or a parity check failed, 2 a user's mistake (one line on standard
error).
"""

from __future__ import annotations

import sys

from underpar.cli import data, judge, lab, make, use
from underpar.cli.console import ERR
from underpar.cli.options import app
from underpar.core.runtime import keep_bytecode
from underpar.errors import UnderparError

__all__ = ["app", "data", "judge", "lab", "main", "make", "use"]


def main() -> None:
    """Run the command line; a user's mistake is one line and exit code 2."""
    # Commands import torch when they run, so this is early enough.
    keep_bytecode()
    try:
        app()
    except (UnderparError, OSError) as error:
        ERR.print(f"error: {error}", markup=False, soft_wrap=True)
        sys.exit(2)
