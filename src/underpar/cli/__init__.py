"""The command line: parse the words, call one function, show its result.

Each command imports what it needs when it runs, so that --help does not wait for torch.
Exit codes: 0 ok; 1 a verdict of fail (audit, parity); 2 a user's mistake, a damaged file or too
little memory; 3 an audit that lacks evidence; 70 an error that nobody foresaw; 130 Ctrl-C; 141 the
reader of the output left. 2 and 70 come with one line on standard error.
"""

from __future__ import annotations

import os
import shlex
import sys
import traceback

from underpar.cli import data, judge, lab, make, submit, use
from underpar.cli.console import show_error
from underpar.cli.options import BROKEN_PIPE, app
from underpar.core.runtime import keep_bytecode
from underpar.errors import UnderparError

__all__ = ["app", "data", "judge", "lab", "main", "make", "submit", "use"]

MISTAKE, UNFORESEEN, INTERRUPTED = 2, 70, 130
REPAIRS = ("--bad-input repair", "--overwrite", "--any-machine")


def main() -> None:
    """Run the command line; the process ends with its exit code."""
    # Commands import torch when they run, so this is early enough.
    keep_bytecode()
    try:
        try:
            app()
        finally:
            # What is still buffered may find that its reader has left.
            sys.stdout.flush()
    except BrokenPipeError:
        # Python flushes once more when it ends, and would complain.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(BROKEN_PIPE)
    except KeyboardInterrupt:
        show_error("interrupted")
        sys.exit(INTERRUPTED)
    except Exception as error:
        if "--debug" in sys.argv:
            traceback.print_exc()
        message, code = explain(error)
        show_error(message + repaired_call(message, sys.argv[1:]))
        sys.exit(code)


def repaired_call(message: str, words: list[str]) -> str:
    """The whole call with the option that an error names, if this option alone repairs it."""
    option = next((option for option in REPAIRS if option in message), "")
    if not option or "'underpar " in message or option.split()[0] in words:
        return ""
    return f"; as in 'underpar {shlex.join(words)} {option}'"


def explain(error: Exception) -> tuple[str, int]:
    """What an error means for the user, and the exit code."""
    if isinstance(error, UnderparError | OSError):
        return str(error), MISTAKE
    kind = type(error).__name__
    # By name, because torch may not be imported. On a CPU torch has no error of its own.
    if isinstance(error, MemoryError) or kind == "OutOfMemoryError" or "can't alloc" in str(error):
        settings = "--set train.micro_batch_tokens=... or --set score.batch_tokens=..."
        return f"out of memory ({error}); use smaller batches: {settings}", MISTAKE
    return (
        f"internal error: {kind}: {error}; please report what 'underpar --debug ...' shows",
        UNFORESEEN,
    )
