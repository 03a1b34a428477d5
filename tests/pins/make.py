"""Pin the behaviour of this tree, or compare it bit for bit with what is pinned.

    python tests/pins/make.py --check-exact     about two minutes of a core
    python tests/pins/make.py                   writes tests/pins/pinned.json

Write the pins only when a change of behaviour is intended, and say in the commit what changed.

The tests hold losses and scores within a tolerance, so that any CPU passes. `--check-exact`
compares losses, scores and the SHA-256 of trained artifacts without a tolerance: of use on the
machine that wrote the pins, while code is moved. On another machine, write the pins there first,
from a commit that is known to be right, into a file of its own: `--file`.
"""

import argparse
import json
import os
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

# This tree, whichever one is installed; processes that a command starts take it too.
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "src"))
os.environ["PYTHONPATH"] = sys.path[0]
# As many threads as in the tests: sums are made in another order with more.
os.environ["OMP_NUM_THREADS"] = "1"

from interface import interfaces
from packed import packed_sha256
from pinned import FILE, differences
from road import Observed, observe_road, observe_slow
from sizes import script_bytes


def observe(runs_only: bool) -> dict[str, Any]:
    """All values of this tree, as JSON holds them.

    Without `runs_only` also those that may change on purpose: the counted script may shrink, and
    commands may be added.
    """
    values = {
        "packed": packed_sha256(),
        "road": _observe(observe_road),
        "slow": _observe(observe_slow),
    }
    if not runs_only:
        values |= {"script_bytes": script_bytes(), "interface": interfaces()}
    plain: dict[str, Any] = json.loads(json.dumps(values))
    return plain


def _observe(run: Any) -> dict[str, Any]:
    with TemporaryDirectory() as folder:
        seen: Observed = run(Path(folder))
    return vars(seen)


def main() -> None:
    """Parse the options; write or compare."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check-exact", action="store_true", help="Compare; write nothing.")
    parser.add_argument("--file", type=Path, default=FILE, help="The pins; default: those here.")
    options = parser.parse_args()
    observed = observe(options.check_exact)
    if not options.check_exact:
        options.file.write_text(json.dumps(observed, indent=1) + "\n")
        return
    pinned = json.loads(options.file.read_text())
    lines = differences({part: pinned[part] for part in observed}, observed)
    print("\n".join(lines) or "all pinned values are equal, bit for bit")
    sys.exit(1 if lines else 0)


if __name__ == "__main__":
    main()
