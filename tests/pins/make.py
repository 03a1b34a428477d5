"""Pin the behaviour of this tree, or compare it bit for bit with what is pinned.

    PYTHONPATH=src python tests/pins/make.py --check-exact     takes about a minute
    PYTHONPATH=src python tests/pins/make.py                   writes tests/pins/pinned.json

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

# As many threads as in the tests: sums are made in another order with more.
os.environ["OMP_NUM_THREADS"] = "1"

from interface import interfaces
from packed import packed_sha256
from pinned import FILE, differences
from road import Observed, observe_road, observe_slow
from sizes import script_bytes

import underpar

SOURCE = Path(__file__).parents[2] / "src"


def observe() -> dict[str, Any]:
    """All values of this tree, as JSON holds them."""
    found = {
        "packed": packed_sha256(),
        "script_bytes": script_bytes(),
        "interface": interfaces(),
        "road": _observe(observe_road),
        "slow": _observe(observe_slow),
    }
    plain: dict[str, Any] = json.loads(json.dumps(found))
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
    if SOURCE not in Path(underpar.__file__).parents:
        sys.exit(f"underpar comes from {underpar.__file__}; set PYTHONPATH={SOURCE}")
    found = observe()
    if not options.check_exact:
        options.file.write_text(json.dumps(found, indent=1) + "\n")
        return
    lines = differences(json.loads(options.file.read_text()), found)
    print("\n".join(lines) or "all pinned values are equal, bit for bit")
    sys.exit(1 if lines else 0)


if __name__ == "__main__":
    main()
