"""The pinned values: where they lie, and how observed values are compared with them."""

import json
import math
from pathlib import Path
from typing import Any

FILE = Path(__file__).with_name("pinned.json")
# Sums of floats differ between CPUs: of losses and bits, this share.
TOLERANCE = 1e-4


def read_pinned() -> dict[str, Any]:
    """All pinned values, by the part that they belong to."""
    pinned: dict[str, Any] = json.loads(FILE.read_text())
    return pinned


def differences(pinned: Any, observed: Any, tolerance: float = 0.0, where: str = "") -> list[str]:
    """One line for each place at which two JSON values differ."""
    if isinstance(pinned, dict) and isinstance(observed, dict):
        lines = [f"{where}/{key}: gone" for key in pinned.keys() - observed.keys()]
        lines += [f"{where}/{key}: new" for key in observed.keys() - pinned.keys()]
        for key in pinned.keys() & observed.keys():
            lines += differences(pinned[key], observed[key], tolerance, f"{where}/{key}")
        return sorted(lines)
    if isinstance(pinned, list) and isinstance(observed, list) and len(pinned) == len(observed):
        lines = []
        for i, (old, new) in enumerate(zip(pinned, observed, strict=True)):
            lines += differences(old, new, tolerance, f"{where}[{i}]")
        return lines
    if isinstance(pinned, float) and isinstance(observed, float):
        same = math.isclose(pinned, observed, rel_tol=tolerance, abs_tol=0.0)
    else:
        same = type(pinned) is type(observed) and pinned == observed
    return [] if same else [f"{where}: pinned {pinned!r}, found {observed!r}"]
