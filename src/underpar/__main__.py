"""`underpar`, `python -m underpar` and `torchrun -m underpar`: the same command line."""

import signal
import sys


def main() -> None:
    """Run the command line; Ctrl-C at any moment ends it without a traceback."""
    try:
        from underpar import cli

        cli.main()
    except KeyboardInterrupt:
        sys.exit(130)
    finally:
        # A second Ctrl-C would interrupt what libraries do when the interpreter ends.
        signal.signal(signal.SIGINT, signal.SIG_IGN)


if __name__ == "__main__":
    main()
