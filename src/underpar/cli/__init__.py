"""The command line: verbs over the functions of the package. Teaches with --help.

Exit codes: 0 ok, 1 an audit failed, 2 a user's mistake (one line on standard error).
"""

from __future__ import annotations

import sys

from underpar.cli import data, judge, make, use
from underpar.cli.options import app
from underpar.core.console import ERR
from underpar.core.runtime import keep_bytecode
from underpar.errors import UnderparError

__all__ = ["app", "data", "judge", "main", "make", "use"]


def main() -> None:
    """Run the command line; a user's mistake is one line and exit code 2."""
    # Verbs import torch late, so this is early enough.
    keep_bytecode()
    try:
        app()
    except (UnderparError, OSError) as error:
        ERR.print(f"error: {error}", markup=False, soft_wrap=True)
        sys.exit(2)
